"""Memory: blocks by forks against copies, requests side by side against contiguous reservations.

Knows engines and what they hold. Does not know kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from statistics import mean
from typing import Any

from benchmarks.engine_memory.stand_in import engine_without_model, request
from kvruntime import LLM, BeamSearchParams, EngineConfig, SamplingParams
from kvruntime.engine import Engine
from kvruntime.request import Request
from kvruntime.weights import Checkpoint

# Mean lengths of prompts and outputs in the workloads of the paper (Kwon et al., SOSP 2023).
LENGTHS = {"Alpaca": (19, 58), "ShareGPT": (161, 338)}
NUM_PROMPTS = {"Alpaca": 4, "ShareGPT": 1}  # that beams follow
TEXTS = (
    "The old lighthouse keeper opened the door and saw ",
    "A page table is a data structure that an operating system uses to ",
    "In the spring the river rises over the meadows, and the farmers ",
    "She had never been to the city before, but her brother told her that ",
)


def sharing(checkpoint: Checkpoint) -> dict[str, Any]:
    """How many of the blocks that copies would need are saved by forks, over all steps.

    For samples the tokens do not matter, so that no model runs; beams follow SmolLM2.
    """
    found: dict[str, Any] = {}
    for name, (num_prompt, num_output) in LENGTHS.items():
        engine = engine_without_model(num_blocks=4096, prefix_caching=False)
        requests = [request(i, num_prompt, num_output, n=4) for i in range(8)]
        found[f"4 samples, {name}"] = _saved(engine, requests)
        llm = LLM(checkpoint, EngineConfig(num_blocks=1024, prefix_caching=False))
        beams = BeamSearchParams(num_beams=4, max_tokens=num_output, ignore_eos=True)
        prompts = [_prompt(llm, text, num_prompt) for text in TEXTS[: NUM_PROMPTS[name]]]
        requests = [Request(i, "", prompt, beams, seed=0) for i, prompt in enumerate(prompts)]
        found[f"4 beams, {name}"] = _saved(llm.engine, requests)
    return found


def side_by_side() -> dict[str, Any]:
    """Requests that run at once in one memory, reserved in three ways; no model runs.

    Prompts and outputs of the lengths of ShareGPT, log-normal, 400 of them, all there at once.
    Memory for 32,768 tokens; the longest a sequence may become is 2,048.
    """
    chance = random.Random(0)
    lengths = [
        (min(1000, max(4, _lognormal(chance, 161))), min(1000, max(4, _lognormal(chance, 338))))
        for _ in range(400)
    ]
    num_tokens = 32_768
    ways: dict[str, dict[str, Any]] = {
        "reserve 2,048 slots each": {"max_num_seqs": num_tokens // 2048},
        "reserve the output to be, known beforehand": {"admission": "output"},
        "paged": {},
    }
    found = {}
    for name, settings in ways.items():
        engine = engine_without_model(
            num_blocks=num_tokens // 16,
            prefix_caching=False,
            max_num_batched_tokens=4096,
            **{"max_num_seqs": 512, **settings},
        )
        for number, (num_prompt, num_output) in enumerate(lengths):
            engine.add(request(number, num_prompt, num_output))
        running = []
        while engine.has_work:
            engine.step()
            if engine.scheduler.waiting:  # once nobody waits, memory is not what is short
                running.append(len(engine.scheduler.running))
        stats = engine.stats()
        found[name] = {
            "mean running": round(mean(running), 1),
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions_recompute,
        }
    return found


def pressure(checkpoint: Checkpoint) -> dict[str, Any]:
    """32 requests in a pool that is far too small: what recomputing costs, and what swapping."""
    chance = random.Random(1)
    asked = [(chance.randint(8, 64), chance.randint(8, 48)) for _ in range(32)]
    prompts = [request(i, n, 1).prompt_token_ids for i, (n, _) in enumerate(asked)]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in asked]
    found = {}
    expected: list[list[int]] = []
    ways: dict[str, dict[str, Any]] = {
        "roomy": {"num_blocks": 512},
        "recompute": {"num_blocks": 24},
        "swap": {"num_blocks": 24, "preemption": "swap"},
    }
    for name, settings in ways.items():
        llm = LLM(checkpoint, EngineConfig(prefix_caching=False, **settings))
        start = time.thread_time()
        answers = llm.generate(prompts, params)
        used = time.thread_time() - start
        tokens = [output.outputs[0].token_ids for output in answers]
        expected = expected or tokens
        if tokens != expected:
            raise RuntimeError(f"{name} has answered otherwise than a roomy pool")
        stats = llm.stats
        found[name] = {
            "processor seconds": round(used, 2),
            "preemptions": stats.num_preemptions_recompute + stats.num_preemptions_swap,
            "tokens of prompts computed": stats.num_prefill_tokens,
            "steps": stats.num_steps,
            "blocks swapped": stats.num_swapped_out_blocks + stats.num_swapped_in_blocks,
        }
    return found


def _saved(engine: Engine, requests: Iterable[Request]) -> dict[str, Any]:
    """The share of blocks saved, the mean over steps, and the largest number of both."""
    block_size = engine.manager.block_size
    shared, copied = [], []
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
        running = [s for s in engine.scheduler.running if s.seq_id in engine.manager]
        if any(sequence.num_output_tokens > 1 for sequence in running):
            shared.append(engine.manager.stats().num_held_blocks)
            lengths = [engine.manager.num_computed_tokens(s.seq_id) for s in running]
            copied.append(sum(-(-length // block_size) for length in lengths))
    return {
        "saved": round(1 - sum(shared) / sum(copied), 3),
        "blocks at most, by forks": max(shared),
        "blocks at most, by copies": max(copied),
    }


def _prompt(llm: LLM, text: str, num_tokens: int) -> list[int]:
    token_ids = llm.tokenizer.encode(text)
    return (token_ids * (-(-num_tokens // len(token_ids))))[:num_tokens]


def _lognormal(chance: random.Random, average: float) -> int:
    return round(chance.lognormvariate(0, 1) * average / 1.6487)  # the mean of that is exp(1/2)
