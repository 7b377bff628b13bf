"""Random requests on random engines: the tokens of each are those of the request alone.

Pools from the smallest that holds the longest prompt to roomy ones, budgets from one token a step,
shared prefixes, samples that fork, requests that arrive while others run.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvruntime import Engine, EngineConfig, SamplingParams, load_checkpoint
from kvruntime.models import Llama
from kvruntime.request import Request

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
        }

    def tokens(self, length: int) -> list[int]:
        return [self.chance.randrange(3, 380) for _ in range(length)]

    def requests(self) -> list[Request]:
        return [
            Request(i, "", list(prompt), params, seed=i)
            for i, (prompt, params) in enumerate(self.asked)
        ]


def samples(request: Request) -> list[tuple[Any, ...]]:
    return [(s.index, s.output_token_ids, s.finish_reason) for s in request.sequences]


def alone(model: Llama, engine: Engine, request: Request) -> list[tuple[Any, ...]]:
    """The samples of a request that has a roomy engine without a cache for itself."""
    config = EngineConfig(
        block_size=engine.config.block_size,
        num_blocks=1000,
        max_model_len=engine.max_model_len,
        prefix_caching=False,
    )
    roomy = Engine(model, config)
    roomy.add(request)
    while roomy.has_work:
        roomy.step()
    return samples(request)


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_the_request_alone_and_the_books_balance(
    model: Llama, seed: int
) -> None:
    workload = Workload(seed)
    engine = Engine(model, EngineConfig(**workload.config))
    requests, arriving = workload.requests(), workload.requests()
    running = list(arriving)
    num_steps = 0
    while arriving or engine.has_work:
        while arriving and (not engine.has_work or workload.chance.random() < 0.5):
            engine.add(arriving.pop(0))
        engine.step()
        engine.manager.check()
        num_steps += 1
        assert num_steps < MAX_STEPS

    assert list(map(samples, running)) == [alone(model, engine, r) for r in requests]
    stats = engine.stats()
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in running)
    assert stats.num_leaked_blocks == 0
    assert stats.num_prefill_tokens + stats.num_cached_tokens >= num_prompt_tokens
    if not stats.num_preemptions_recompute:
        assert stats.num_prefill_tokens + stats.num_cached_tokens == num_prompt_tokens
    assert 0 <= stats.tail_waste_slots < stats.peak_blocks * engine.config.block_size
    assert stats.num_generated_tokens == sum(
        sequence.num_output_tokens for request in running for sequence in request.sequences
    )
