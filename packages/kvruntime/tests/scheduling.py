"""A scheduler without a model: requests of any tokens, and steps that always choose the same one.

Knows how a step is driven. Does not know what is expected of it.
"""

from collections.abc import Iterable
from typing import Any

from kvblocks import BlockManager
from kvruntime import FinishReason, SamplingParams
from kvruntime.engine_config import SchedulerConfig
from kvruntime.request import Request
from kvruntime.scheduler import Scheduler
from kvruntime.steps import SchedulerOutput

NEXT_TOKEN = 7


def make(
    num_blocks: int = 64,
    budget: int = 32,
    seqs: int = 8,
    *,
    host: int = 0,
    caching: bool = True,
    **policies: Any,
) -> Scheduler:
    """A scheduler on blocks of four tokens."""
    manager = BlockManager(num_blocks, 4, num_host_blocks=host, prefix_caching=caching)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, **policies)
    return Scheduler(manager, config)


def add(
    scheduler: Scheduler,
    request_id: int,
    tokens: Iterable[int],
    n: int = 1,
    *,
    max_tokens: int = 128,
    priority: int = 0,
) -> Request:
    """Queue a request of these tokens."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = Request(request_id, "", list(tokens), params, seed=0, priority=priority)
    scheduler.add(request)
    return request


def run(scheduler: Scheduler) -> SchedulerOutput:
    """Schedule and complete a step; each sequence that completes gets a next token."""
    output = scheduler.schedule()
    scheduler.complete(output)
    for item in output.scheduled:
        if item.completes:
            request, children = item.sequence.request, []
            if not request.is_forked:
                children = [scheduler.fork(item.sequence) for _ in range(request.params.n - 1)]
                request.is_forked = True
            for sequence in (item.sequence, *children):
                sequence.token_ids.append(NEXT_TOKEN)
    scheduler.manager.check()
    return output


def counts(output: SchedulerOutput) -> dict[tuple[int, int], int]:
    """How many tokens of whom a step computes."""
    return {item.sequence.seq_id: len(item.token_ids) for item in output.scheduled}


def end(scheduler: Scheduler, request: Request) -> None:
    """Finish all samples of a request."""
    for sequence in request.sequences:
        scheduler.finish(sequence, FinishReason.LENGTH)


def kinds(request: Request) -> list[str]:
    """What happened to a request, in a word each."""
    return [event.kind.partition(",")[0] for event in request.events]
