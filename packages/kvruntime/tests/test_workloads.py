"""Random requests on random engines: each gets the logits and tokens that it gets alone.

Pools from the smallest that holds the longest prompt to roomy ones, budgets from one token a step,
shared prefixes, samples that fork, requests that arrive while others run.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvruntime import Engine, EngineConfig, FinishReason, SamplingParams, load_checkpoint
from kvruntime.model_runner import StepLogits
from kvruntime.models import Llama
from kvruntime.request import Request
from kvruntime.steps import SchedulerOutput

MAX_STEPS = 10_000  # only a livelock reaches it


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Llama:
    checkpoint = load_checkpoint(tiny_checkpoint("mistral-window"))
    return Llama(checkpoint.config, checkpoint.tensors)


class Workload:
    """Requests and the engine that serves them, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
        block_size = chance.choice([1, 2, 3, 4, 5, 8, 16, 32])
        max_num_seqs = chance.choice([1, 2, 4, 64])
        shared = self.tokens(40)
        self.asked: list[tuple[list[int], SamplingParams]] = []
        for _ in range(chance.randint(1, 6)):
            length = chance.choice([1, 2, chance.randint(3, 20), chance.randint(20, 40)])
            num_shared = chance.choice([0, length // 2, length - 1, length])
            params = SamplingParams(
                n=chance.randint(1, min(max_num_seqs, 4)),
                max_tokens=chance.randint(1, 16),
                temperature=chance.choice([0, 0.8]),
                top_p=chance.choice([1, 0.9]),
                ignore_eos=chance.random() < 0.7,
            )
            self.asked.append((shared[:num_shared] + self.tokens(length - num_shared), params))
        longest = max(len(prompt) + 1 for prompt, _ in self.asked)
        self.config: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": -(-longest // block_size) + chance.choice([0, 0, 1, 4, 100]),
            "max_num_batched_tokens": chance.choice([1, 2, 7, 64]),
            "max_num_seqs": max_num_seqs,
            "prefix_caching": chance.random() < 0.75,
            # Requests end where the pool does, so the request alone ends there too.
            "max_model_len": longest + chance.randint(0, 16),
            "preemption": chance.choice(["recompute", "swap", "auto"]),
            "num_host_blocks": chance.choice([None, 3]),
        }

    def tokens(self, length: int) -> list[int]:
        return [self.chance.randrange(3, 380) for _ in range(length)]

    def requests(self) -> list[Request]:
        return [
            Request(i, "", list(prompt), params, seed=i)
            for i, (prompt, params) in enumerate(self.asked)
        ]


class Recorder:
    """Runs an engine's steps and keeps the logits behind every token: bits, not only choices."""

    def __init__(self, engine: Engine) -> None:
        self.execute = engine.runner.execute
        self.logits: dict[tuple[tuple[int, int], int], torch.Tensor] = {}
        engine.runner.execute = self  # type: ignore[method-assign]  # one that keeps a copy

    def __call__(self, output: SchedulerOutput) -> StepLogits:
        logits = self.execute(output)
        completing = (item.sequence for item in output.scheduled if item.completes)
        for sequence, row in zip(completing, logits.last, strict=True):
            self.logits[sequence.seq_id, len(sequence.token_ids)] = row.clone()
        return logits


def samples(request: Request) -> list[tuple[int, list[int], FinishReason | None]]:
    return [(s.index, s.output_token_ids, s.finish_reason) for s in request.sequences]


def run_alone(model: Llama, like: Engine, request: Request) -> Recorder:
    """Run a request on a roomy engine of its own, without a prefix cache."""
    engine = Engine(
        model,
        EngineConfig(
            block_size=like.config.block_size,
            num_blocks=1000,
            max_model_len=like.max_model_len,
            prefix_caching=False,
        ),
    )
    recorder = Recorder(engine)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return recorder


@pytest.mark.parametrize("seed", range(40))
def test_a_request_gets_what_it_gets_alone_and_the_books_balance(model: Llama, seed: int) -> None:
    workload = Workload(seed)
    engine = Engine(model, EngineConfig(**workload.config))
    recorder = Recorder(engine)
    requests = workload.requests()
    arriving = list(requests)
    num_steps = 0
    while arriving or engine.has_work:
        while arriving and (not engine.has_work or workload.chance.random() < 0.5):
            engine.add(arriving.pop(0))
        engine.step()
        engine.manager.check()
        num_steps += 1
        assert num_steps < MAX_STEPS

    for request, alone in zip(requests, workload.requests(), strict=True):
        expected = run_alone(model, engine, alone)
        assert samples(request) == samples(alone)
        for key, row in expected.logits.items():
            assert torch.equal(recorder.logits[key], row)

    stats = engine.stats()
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_found_or_computed = stats.num_prefill_tokens + stats.num_cached_tokens
    assert stats.num_leaked_blocks == 0
    assert num_found_or_computed >= num_prompt_tokens
    assert num_found_or_computed == num_prompt_tokens or stats.num_preemptions_recompute
    assert 0 <= stats.tail_waste_slots < stats.peak_blocks * engine.config.block_size
    assert stats.num_generated_tokens == sum(
        sequence.num_output_tokens for request in requests for sequence in request.sequences
    )
