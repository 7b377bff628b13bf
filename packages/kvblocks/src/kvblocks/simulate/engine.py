"""Replays a trace through the real `BlockManager`, as an engine would drive it.

Of a block of the trace only its identity and whether it is full matter, not how many tokens it has.
So the manager gets two tokens for each full block, which are the block's number in the prefix tree,
and one for a rest: the same blocks are taken, keyed, found and evicted, and a prompt of 100,000
tokens costs no more than its blocks.

    trace, 512 a block:   | 512 tokens | 512 tokens | 40 tokens |     generated: 700 tokens
    manager, 2 a block:   |   n   n    |   m   m    |   x       |  y  |  y   y  | y

Full blocks only are keyed; at least one token of a prompt is computed; what a running request holds
is not evicted; blocks that cache nothing are reused first. Generated tokens are either ignored or
held: they then take blocks until their request ends. What they say is not in a trace, so they are
never found.

Requests run one at a time, or when they came: see `Service`.

Knows the calls of an engine and simulated time. Does not know batches, budgets or preemption.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from kvblocks.errors import InvalidTrace
from kvblocks.manager import BlockManager
from kvblocks.simulate.outcomes import Load, Outcome
from kvblocks.simulate.prefixes import PrefixTree, Window
from kvblocks.simulate.progress import Progress, silent
from kvblocks.traces.records import Request

BLOCK_SIZE = 2  # of the manager: enough to tell a full block from a rest
UNKNOWN = 2**32 - 1  # no block has this number


class Service(NamedTuple):
    """How long a request holds its blocks when requests overlap.

    Requests are admitted in the order in which they came, as soon as the pool has room for the
    prompt and for all that will be generated. Tokens that were not found are computed at
    `prefill_rate` tokens a second; then the prompt can be found by others, and the answer follows at
    `decode_rate` tokens a second. Neither rate depends on what else runs.
    """

    prefill_rate: float = 8_000.0
    decode_rate: float = 40.0


class Prompt(NamedTuple):
    """One request in the manager's measure."""

    tokens: array[int] | int
    num_prompt: int
    num_known: int  # tokens of full blocks with a name: what may be found
    num_generated: int
    num_blocks: int  # of the prompt


class Job(NamedTuple):
    """What a replay needs to know."""

    requests: tuple[Request, ...]
    tree: PrefixTree | None  # none where nothing is known of content
    block_size: int  # of the trace
    window: Window
    capacity: int
    policy: str
    holds_outputs: bool


class Replay:
    """One manager, the requests of a trace, and what was counted."""

    def __init__(self, job: Job) -> None:
        if job.capacity < 1:
            raise InvalidTrace(f"capacity must be at least 1, got {job.capacity}")
        self.job = job
        self.manager = BlockManager(
            job.capacity, BLOCK_SIZE, prefix_caching=job.tree is not None, policy=job.policy
        )
        self.hit_blocks = 0
        self.total_blocks = 0
        self.refused = 0
        self.evicted_before: int | None = None

    def prompt(self, index: int) -> Prompt:
        """A request as the manager gets it."""
        request = self.job.requests[index]
        length, size = request.num_input_tokens, self.job.block_size
        num_full = length // size
        num_prompt = self._scaled(length)
        outputs = request.num_output_tokens if self.job.holds_outputs else 0
        tokens: array[int] | int = num_prompt
        num_known = 0
        if self.job.tree is not None:
            known = self.job.tree.paths[index][:num_full]
            num_known = BLOCK_SIZE * len(known)
            tokens = array("I", chain.from_iterable(zip(known, known, strict=True)))
            if num_prompt <= BLOCK_SIZE * self.job.capacity:  # or else it will not be served
                tokens.extend([UNKNOWN] * (num_prompt - num_known))
        return Prompt(
            tokens,
            num_prompt,
            num_known,
            self._scaled(length + outputs) - num_prompt,
            -(-length // size),
        )

    def _scaled(self, num_tokens: int) -> int:
        num_full, rest = divmod(num_tokens, self.job.block_size)
        return BLOCK_SIZE * num_full + bool(rest)

    def begin(self, index: int, prompt: Prompt) -> bool:
        """Count a request in; whether the pool could serve it if it were empty."""
        if index >= self.job.window.first:
            if self.evicted_before is None:
                self.evicted_before = self.manager.stats().num_evicted_blocks
            self.total_blocks += prompt.num_blocks
        needed = -(-(prompt.num_prompt + prompt.num_generated) // BLOCK_SIZE)
        if needed <= self.job.capacity:
            return True
        self.refused += index >= self.job.window.first
        return False

    def allocate(self, index: int, prompt: Prompt) -> int:
        """Take the blocks of a prompt; the number of blocks that were found."""
        found = self.manager.allocate(index, prompt.tokens).num_cached_tokens
        if index >= self.job.window.first:
            self.hit_blocks += found // BLOCK_SIZE
        self.manager.append({index: prompt.num_prompt - found})  # a token at least is left
        return found // BLOCK_SIZE

    def generate(self, index: int, prompt: Prompt) -> None:
        """Take the blocks of what is generated."""
        if prompt.num_generated:
            self.manager.append({index: prompt.num_generated})

    def outcome(self, load: Load | None = None) -> Outcome:
        """What was counted."""
        first = self.job.window.first
        evicted = self.manager.stats().num_evicted_blocks
        return Outcome(
            policy=self.job.policy,
            semantics="engine",
            capacity=self.job.capacity,
            hit_blocks=self.hit_blocks,
            total_blocks=self.total_blocks,
            hit_tokens=self.hit_blocks * self.job.block_size,
            total_tokens=sum(r.num_input_tokens for r in self.job.requests[first:]),
            evictions=evicted - (self.evicted_before or 0),
            refused_requests=self.refused,
            load=load,
        )


def run_one_by_one(job: Job, progress: Progress = silent) -> Outcome:
    """Each request ends before the next begins."""
    replay = Replay(job)
    for index in range(len(job.requests)):
        prompt = replay.prompt(index)
        if replay.begin(index, prompt):
            replay.allocate(index, prompt)
            replay.manager.commit(index, prompt.num_known)
            replay.generate(index, prompt)
            replay.manager.free(index)
        progress(index + 1)
    return replay.outcome()


def run_by_timestamps(job: Job, service: Service, progress: Progress = silent) -> Outcome:
    """Requests begin when they came, or when there is room; the trace must be in that order."""
    clock = _Clock(job, service)
    for index, request in enumerate(job.requests):
        assert request.timestamp is not None, "the caller has looked"
        clock.advance(request.timestamp)
        clock.arrive(index)
        progress(index + 1)
    clock.advance(float("inf"))
    return clock.replay.outcome(clock.load())


class _Clock:
    """Simulated time: requests wait, compute their prompt, generate, and end."""

    def __init__(self, job: Job, service: Service) -> None:
        self.replay = Replay(job)
        self.service = service
        self.waiting: deque[tuple[int, Prompt]] = deque()
        # (when, order, request, its prompt): a prompt is computed, or, without one, a request ends
        self.due: list[tuple[float, int, int, Prompt | None]] = []
        self.now = 0.0
        self.num_running = 0
        self.peak_running = 0
        self.waits: list[float] = []

    def advance(self, until: float) -> None:
        """Let happen what is due."""
        while self.due and self.due[0][0] <= until:
            self.now, _, index, prompt = heappop(self.due)
            if prompt is not None:
                self.replay.manager.commit(index, prompt.num_known)
                outputs = self.replay.job.requests[index].num_output_tokens
                self._later(outputs / self.service.decode_rate, index, None)
            else:
                self.replay.manager.free(index)
                self.num_running -= 1
                self._admit()
        self.now = until

    def arrive(self, index: int) -> None:
        """A request comes and waits for its turn, unless it can never be served."""
        prompt = self.replay.prompt(index)
        if self.replay.begin(index, prompt):
            self.waiting.append((index, prompt))
            self._admit()

    def _admit(self) -> None:
        while self.waiting:
            index, prompt = self.waiting[0]
            verdict = self.replay.manager.can_allocate(prompt.tokens)
            num_total = -(-(prompt.num_prompt + prompt.num_generated) // BLOCK_SIZE)
            num_beyond = num_total - prompt.num_blocks
            if verdict.num_available_blocks < verdict.num_needed_blocks + num_beyond:
                return
            self.waiting.popleft()
            found = self.replay.allocate(index, prompt)
            self.replay.generate(index, prompt)
            request = self.replay.job.requests[index]
            assert request.timestamp is not None, "the caller has looked"
            self.waits.append(self.now - request.timestamp)
            self.num_running += 1
            self.peak_running = max(self.peak_running, self.num_running)
            computed = request.num_input_tokens - found * self.replay.job.block_size
            self._later(computed / self.service.prefill_rate, index, prompt)

    def _later(self, delay: float, index: int, prompt: Prompt | None) -> None:
        # Two entries of one request are never in the heap together, so prompts are not compared.
        heappush(self.due, (self.now + delay, len(self.waits), index, prompt))

    def load(self) -> Load:
        """How full the pool was."""
        waits = sorted(self.waits)
        return Load(
            peak_running_requests=self.peak_running,
            peak_held_blocks=self.replay.manager.stats().peak_held_blocks,
            num_waited=sum(wait > 0 for wait in waits),
            mean_wait_seconds=sum(waits) / len(waits) if waits else 0.0,
            longest_wait_seconds=waits[-1] if waits else 0.0,
        )
