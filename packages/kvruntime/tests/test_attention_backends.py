"""What keys and values are kept as, where, and by whom they are attended to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import kvkernels
from kvblocks import BlockCopy, BlockSwap
from kvruntime import LLM, EngineConfig, InvalidRequest, SamplingParams, model_runner
from kvruntime import attention as attention_module
from kvruntime.engine_config import KVDtype
from kvruntime.kv_cache import KVCache, block_bytes
from kvruntime.model_runner import StepLogits
from kvruntime.steps import SchedulerOutput
from kvruntime.weights import load_checkpoint

from .test_cli import kvruntime

MakeLLM = Callable[..., LLM]
KV_DTYPES = get_args(KVDtype)
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(n=3, max_tokens=12, seed=5, ignore_eos=True, logprobs=1)
PROMPTS = [[3 + (7 * i + j * (i + 2)) % 377 for j in range(9 + 4 * i)] for i in range(5)]
# The largest difference of a logit to that of a float32 cache; logits have a deviation of about 5.
TOLERANCE = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.2, "fp8": 1.5, "int8": 0.3}


def logits_of(llm: LLM, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """The logits behind the first tokens of these prompts, one prompt after the other."""
    found: list[torch.Tensor] = []
    execute = llm.engine.runner.execute

    def noted(output: SchedulerOutput) -> StepLogits:
        logits = execute(output)
        found.append(logits.last.clone())
        return logits

    llm.engine.runner.execute = noted  # type: ignore[method-assign]  # it keeps a copy
    for prompt in prompts:
        # In chunks, so that keys are read from the cache that were written before.
        llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    return torch.cat([rows for rows in found if len(rows)])


def answers(llm: LLM, params: SamplingParams = SEEDED) -> list[Any]:
    return [output.outputs for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_torch_on_gathered_blocks_attends_as_the_kernels_do(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, family: str, kv_dtype: str
) -> None:
    settings = {"kv_dtype": kv_dtype, "max_num_batched_tokens": 7, "block_size": 4}
    by_kernels = logits_of(make_llm(family, **settings))

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("the kernel was called")

    monkeypatch.setattr(attention_module, "paged_attention", refused)
    by_sdpa = logits_of(make_llm(family, attention="sdpa", **settings))
    assert torch.allclose(by_sdpa, by_kernels, atol=1e-3)


def test_what_a_batch_shares_is_read_once(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []

    def noted(*arguments: Any, num_shared_tokens: int, **others: Any) -> None:
        shared.append(num_shared_tokens)
        kvkernels.cascade_attention(*arguments, num_shared_tokens=num_shared_tokens, **others)

    prefix = [3 + 5 * j % 377 for j in range(22)]
    prompts = [[*prefix, 40 + i, 50, 60] for i in range(3)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    expected = make_llm(block_size=4).generate(prompts, params)
    monkeypatch.setattr(attention_module, "cascade_attention", noted)
    monkeypatch.setattr(model_runner, "FEWEST_SHARED_TOKENS", 8)
    llm = make_llm(block_size=4)
    found = llm.generate(prompts, params)
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    # Five whole blocks of the prefix, in every layer of every step that has all three.
    assert set(shared) == {20}
    shared.clear()
    llm.generate(prompts[:1], params)
    llm.generate([prompts[0], [9, *prompts[0][1:]]], params)
    assert shared == []


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_near_those_of_a_float32_cache(make_llm: MakeLLM, kv_dtype: str) -> None:
    expected = logits_of(make_llm(max_num_batched_tokens=7))
    found = logits_of(make_llm(max_num_batched_tokens=7, kv_dtype=kv_dtype))
    difference = float((found - expected).abs().max())
    assert difference <= TOLERANCE[kv_dtype]
    assert (difference > 0) == (kv_dtype != "float32")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_within_one_dtype_answers_do_not_depend_on_what_is_done_for_room(
    make_llm: MakeLLM, kv_dtype: str
) -> None:
    """Scales move with their blocks: by copies on write, to the host and back."""
    roomy = {"kv_dtype": kv_dtype, "block_size": 4}
    expected = [make_llm(**roomy).generate([prompt], SEEDED)[0].outputs for prompt in PROMPTS]
    forked = make_llm(**roomy)
    assert answers(forked) == expected
    assert forked.stats.num_copies > 0
    tiny = {**roomy, "num_blocks": 20}
    recomputed = make_llm(**tiny)
    assert answers(recomputed) == expected
    assert recomputed.stats.num_preemptions_recompute > 0
    # Without a prefix cache all blocks come from the host.
    swapped = make_llm(**tiny, preemption="swap", prefix_caching=False)
    assert answers(swapped) == expected
    assert swapped.stats.num_swapped_out_blocks > 0
    assert swapped.stats.num_swapped_in_blocks > 0


def test_fewer_bits_hold_more_blocks_in_the_same_memory(make_llm: MakeLLM) -> None:
    settings: dict[str, Any] = {"num_blocks": None, "kv_memory_bytes": 2**20}
    num_blocks = {
        kv_dtype: make_llm(kv_dtype=kv_dtype, **settings).engine.manager.num_blocks
        for kv_dtype in KV_DTYPES
    }
    assert num_blocks["float16"] == num_blocks["bfloat16"] == 2 * num_blocks["float32"]
    assert num_blocks["fp8"] == num_blocks["int8"] > 3 * num_blocks["float32"]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_block_has_the_bytes_of_its_arrays(
    tiny_checkpoint: Callable[[str], Path], kv_dtype: KVDtype
) -> None:
    config = load_checkpoint(tiny_checkpoint("llama")).config
    cache = KVCache(config, num_blocks=6, block_size=4, kv_dtype=kv_dtype)
    assert cache.num_bytes() == 6 * block_bytes(config, 4, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_and_swaps_move_every_byte_of_a_block(
    tiny_checkpoint: Callable[[str], Path], kv_dtype: KVDtype
) -> None:
    config = load_checkpoint(tiny_checkpoint("llama")).config
    ours, theirs = (KVCache(config, num_blocks=n, block_size=4, kv_dtype=kv_dtype) for n in (6, 3))
    chance = np.random.default_rng(0)
    for part in [part for layer in ours.layers for part in layer.parts]:
        drawn = part.view(torch.uint8).numpy()
        drawn[...] = chance.integers(0, 100, drawn.shape)
    ours.copy([BlockCopy(1, 2, 3)])
    ours.swap_to(theirs, [BlockSwap(2, 0), BlockSwap(5, 2)])
    for layer, swapped in zip(ours.layers, theirs.layers, strict=True):
        for part, there in zip(layer.parts, swapped.parts, strict=True):
            bits, moved = part.view(torch.uint8), there.view(torch.uint8)
            assert torch.equal(bits[2, :, :3], bits[1, :, :3])
            assert not torch.equal(bits[2, :, 3:], bits[1, :, 3:])
            assert torch.equal(moved[[0, 2]], bits[[2, 5]])
            assert not moved[1].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "float64"}, 'kv_dtype must be "float32" or "float16" or "bfloat16" or'),
        ({"attention": "flash"}, 'attention must be "kernels" or "sdpa", got \'flash\''),
        ({"device": "tpu"}, 'device must be "cpu" or "cuda", got \'tpu\''),
    ],
)
def test_what_there_is_not_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
class TestWithoutAGPU:
    """The device is refused in one sentence, before anything is loaded onto it."""

    def test_cuda_is_refused(self, make_llm: MakeLLM) -> None:
        with pytest.raises(InvalidRequest, match="needs an NVIDIA GPU and a torch that is built"):
            make_llm(device="cuda")

    def test_the_command_says_so(self, tiny_checkpoint: Callable[[str], Path]) -> None:
        arguments = ["generate", "--model", str(tiny_checkpoint("llama")), "--prompt", "a"]
        ended = kvruntime(*arguments, "--device", "cuda")
        assert ended.returncode == 2
        assert ended.stderr.startswith("kvruntime: device cuda needs an NVIDIA GPU")
        assert ended.stderr.count("\n") == 1


def test_cuda_without_its_kernels_is_refused(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'kvruntime\[cuda13\]'"):
        make_llm(device="cuda")
