"""The engine on a GPU against itself on the CPU; `nox -s gpu` runs these, and elsewhere none runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvruntime import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MakeLLM = Callable[..., LLM]
PROMPTS = [[3 + (7 * i + j * (i + 2)) % 377 for j in range(9 + 5 * i)] for i in range(6)]
PARAMS = {
    "greedy": SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    "samples": SamplingParams(n=3, max_tokens=16, seed=5, ignore_eos=True),
    "beams": BeamSearchParams(num_beams=3, n=3, max_tokens=12, ignore_eos=True),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "batched": ({}, "num_steps"),
    "chunked": ({"max_num_batched_tokens": 7}, "num_steps"),
    "recomputed": ({"num_blocks": 24}, "num_preemptions_recompute"),
    "swapped": (
        {"num_blocks": 24, "preemption": "swap", "prefix_caching": False},
        "num_swapped_in_blocks",
    ),
    "by sdpa": ({"attention": "sdpa"}, "num_steps"),
}


def tokens(llm: LLM, params: Any) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_tokens_equal_those_of_the_cpu(
    make_llm: MakeLLM, family: str, settings: tuple[dict[str, Any], str], params: Any
) -> None:
    config, counter = settings
    expected = tokens(make_llm(family, block_size=4), params)
    on_gpu = make_llm(family, **{"block_size": 4, "device": "cuda", **config})
    assert tokens(on_gpu, params) == expected
    assert getattr(on_gpu.stats, counter) > 0
    assert on_gpu.stats.num_leaked_blocks == 0
    assert all(layer.keys.is_cuda for layer in on_gpu.engine.runner.cache.layers)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "fp8", "int8"])
def test_of_every_dtype_what_is_swapped_and_copied_comes_back(
    make_llm: MakeLLM, kv_dtype: str
) -> None:
    on_gpu = {"block_size": 4, "device": "cuda", "kv_dtype": kv_dtype}
    roomy = make_llm(**on_gpu, attention="sdpa")
    swapped = make_llm(
        **on_gpu, attention="sdpa", num_blocks=24, preemption="swap", prefix_caching=False
    )
    assert tokens(swapped, PARAMS["samples"]) == tokens(roomy, PARAMS["samples"])
    assert swapped.stats.num_swapped_in_blocks > 0
    assert swapped.stats.num_copies > 0
    assert all(
        part.is_pinned() for layer in swapped.engine.runner.host.layers for part in layer.parts
    )
