"""Time: the first token with a cached prefix, bookkeeping, tokens a second by batch size.

All of it is processor time of the measuring thread, so that others on the machine count less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.engine_memory.stand_in import engine_without_model, request
from kvruntime import LLM, EngineConfig, SamplingParams, model_runner
from kvruntime.model_runner import StepLogits
from kvruntime.steps import SchedulerOutput
from kvruntime.weights import Checkpoint

REPEATS = 5


def seconds_of(work: Callable[[], object]) -> float:
    """The processor seconds that some work takes this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def first_token(checkpoint: Checkpoint) -> dict[str, Any]:
    """A prompt of 400 tokens of which 384 are cached, against the same without a cache."""
    llm = LLM(checkpoint, EngineConfig(num_blocks=512))
    one = SamplingParams(max_tokens=1, temperature=0)
    ratios, cold, warm = [], [], []
    for number in range(REPEATS):
        prefix = request(1000 + number, 384, 1).prompt_token_ids
        tails = [request(2000 + 2 * number + i, 16, 1).prompt_token_ids for i in range(2)]
        cold.append(seconds_of(lambda p=prefix + tails[0]: llm.generate([p], one)))
        warm.append(seconds_of(lambda p=prefix + tails[1]: llm.generate([p], one)))
        ratios.append(cold[-1] / warm[-1])
    if llm.stats.num_cached_tokens != REPEATS * 384:
        raise RuntimeError("the prefixes were not found in the cache")
    return {
        "cold, ms": round(1e3 * median(cold), 1),
        "cached, ms": round(1e3 * median(warm), 1),
        "ratio": round(median(ratios), 1),
    }


def bookkeeping(checkpoint: Checkpoint) -> dict[str, Any]:
    """A step without a model, and the share that is no model of a step of SmolLM2."""
    found: dict[str, Any] = {}
    for count in (32, 256):
        engine = engine_without_model(
            num_blocks=count * 40, max_num_seqs=count, max_num_batched_tokens=count * 80
        )
        for number in range(count):
            engine.add(request(number, 64 + number % 13, 400))
        for _ in range(20):
            engine.step()
        steps = sorted(seconds_of(engine.step) for _ in range(300))
        found[f"{count} sequences, no model"] = {
            "ms a step, median": round(1e3 * median(steps), 3),
            "ms a step, 95 of 100 below": round(1e3 * steps[285], 3),
        }
    llm = LLM(checkpoint, EngineConfig(num_blocks=256))
    execute, spent = llm.engine.runner.execute, [0.0]

    def timed(output: SchedulerOutput) -> StepLogits:
        start = time.thread_time()
        logits = execute(output)
        spent[0] += time.thread_time() - start
        return logits

    llm.engine.runner.execute = timed  # type: ignore[method-assign]  # it takes the time
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = [request(i, 40, 1).prompt_token_ids for i in range(32)]

    def run() -> None:
        llm.generate(prompts, params)

    run()
    before, whole = spent[0], seconds_of(run)
    model = spent[0] - before
    found["32 sequences, SmolLM2"] = {
        "ms a step": round(1e3 * whole / 24, 1),
        "share that is no model": round(1 - model / whole, 4),
    }
    return found


def shared_prefix(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sequences that begin with the same 2,048 tokens, which attention reads once or for each."""
    llm = LLM(checkpoint, EngineConfig(num_blocks=1024, max_num_batched_tokens=2048))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prefix = request(3000, 2048, 1).prompt_token_ids
    fewest, found = model_runner.FEWEST_SHARED_TOKENS, {}
    for count in (4, 16, 32):
        prompts = [prefix + request(4000 + i, 16, 1).prompt_token_ids for i in range(count)]
        llm.generate(prompts, params)  # from now on all prompts are cached
        used: dict[int, list[float]] = {fewest: [], 2**60: []}
        for _ in range(REPEATS):
            for number, seconds in used.items():
                model_runner.FEWEST_SHARED_TOKENS = number
                seconds.append(seconds_of(lambda p=prompts: llm.generate(p, params)))
        model_runner.FEWEST_SHARED_TOKENS = fewest
        once, each = (1e3 * median(seconds) / params.max_tokens for seconds in used.values())
        found[f"{count} sequences"] = {
            "read once, ms a step": round(once, 1),
            "read for each, ms a step": round(each, 1),
            "ratio": round(each / once, 2),
        }
    return found


def by_batch_size(checkpoint: Checkpoint) -> dict[str, Any]:
    """Generated tokens a processor second, prompts of 40 tokens and outputs of 24."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    found = {}
    for count in (1, 2, 4, 8, 16, 32, 64):
        llm = LLM(
            checkpoint, EngineConfig(num_blocks=768, max_num_seqs=count, prefix_caching=False)
        )
        rates = []
        for repeat in range(2):
            prompts = [request(1000 * repeat + i, 40, 1).prompt_token_ids for i in range(count)]
            used = seconds_of(lambda p=prompts, llm=llm: llm.generate(p, params))
            rates.append(count * 24 / used)
        found[str(count)] = round(max(rates), 1)
    return found
