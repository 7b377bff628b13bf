"""Plans, workspaces, what is supported, and warming up."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvkernels
from kvkernels import (
    ArgumentError,
    AttentionPlan,
    PoolIndexError,
    ShapeError,
    cascade_attention,
    get_num_threads,
    paged_attention,
    set_num_threads,
    supports,
    warmup,
    workspace_size,
)
from kvkernels.arrays import Array
from kvkernels.cuda import launch
from kvkernels.dtypes import BFLOAT16, from_float32

MakeBatch = Callable[..., dict[str, Any]]

RED = 0xA5
RED_BYTES = 256


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def red_zoned(num_bytes: int, offset: int = 0) -> tuple[Array, Array]:
    """Bytes between two red zones, and all of them."""
    memory: Array = np.full(num_bytes + 2 * RED_BYTES + offset, RED, np.uint8)
    return memory[RED_BYTES + offset : RED_BYTES + offset + num_bytes], memory


def is_intact(memory: Array, num_bytes: int, offset: int = 0) -> bool:
    before, after = memory[: RED_BYTES + offset], memory[RED_BYTES + offset + num_bytes :]
    return bool((before == RED).all() and (after == RED).all())


def limits_of(batch: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sizes and limits of a batch, as `workspace_size` takes them."""
    _, num_kv_heads, block_size, head_dim = batch["k_cache"].shape
    return {
        "num_heads": batch["q"].shape[1],
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "max_num_rows": len(batch["q"]),
        "max_seq_len": max(1, int(batch["seq_lens"].max())),
    } | more


@pytest.mark.parametrize("seed", range(12))
def test_workspace_of_the_stated_size_is_enough_and_nothing_beside_it_is_touched(
    make_batch: MakeBatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    set_num_threads(int(rng.integers(1, 4)))
    seq_lens = rng.integers(0, [3000, 40][seed % 2], int(rng.integers(1, 5))).tolist()
    num_queries = [int(rng.integers(1, 1 + min(n, 40))) if n else 1 for n in seq_lens]
    batch = make_batch(seq_lens, num_queries, head_dim=8, group=int(rng.integers(1, 5)))
    num_splits = int(rng.integers(0, 3))
    expected = paged_attention(**batch, num_splits=num_splits, return_lse=True)
    dtype = "float32"
    if seed % 3 == 0:
        dtype = "bfloat16"
        batch["q"] = from_float32(batch["q"], BFLOAT16)
        expected = paged_attention(**batch, num_splits=num_splits, return_lse=True)
    num_bytes = workspace_size(**limits_of(batch), q_dtype=dtype, num_splits=num_splits)
    workspace, memory = red_zoned(num_bytes, offset=seed)
    found = paged_attention(**batch, num_splits=num_splits, workspace=workspace, return_lse=True)
    assert is_intact(memory, num_bytes, offset=seed)
    assert all(map(np.array_equal, found, expected))
    assert not np.shares_memory(found[1], memory)


def test_cascade_finds_room_in_a_workspace_of_the_stated_size(make_batch: MakeBatch) -> None:
    set_num_threads(2)
    batch = make_batch([2100, 2500], head_dim=8)
    batch["block_table"][:, :128] = batch["block_table"][0, :128]
    num_bytes = workspace_size(**limits_of(batch), num_shared_tokens=2048)
    workspace, memory = red_zoned(num_bytes)
    found = cascade_attention(**batch, num_shared_tokens=2048, workspace=workspace)
    assert is_intact(memory, num_bytes)
    assert np.array_equal(found, paged_attention(**batch))


def test_stated_size_is_at_most_twice_what_the_largest_batch_needs(make_batch: MakeBatch) -> None:
    # As many long sequences as can all be split: one less than shares of work for two threads.
    set_num_threads(2)
    batch = make_batch([2048] * 7, head_dim=8)
    stated = workspace_size(**limits_of(batch))
    needed = stated
    while needed > 64:
        needed -= 64
        try:
            paged_attention(**batch, workspace=np.empty(needed, np.uint8))
        except ShapeError:
            break
    assert stated <= 2 * (needed + 64)


def test_workspace_that_is_too_small_is_refused_before_anything_is_written(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch([20])
    out = np.full_like(batch["q"], 7)
    with pytest.raises(ShapeError, match=r"^workspace must be 128 dense bytes .*, got 100 with"):
        paged_attention(**batch, out=out, workspace=np.empty(100, np.uint8))
    with pytest.raises(TypeError, match="workspace must have dtype uint8"):
        paged_attention(**batch, out=out, workspace=np.empty(100, np.float32))
    assert (out == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_plan_gives_the_bits_of_a_call_in_every_step(
    make_batch: MakeBatch, q_dtype: str, num_threads: int
) -> None:
    set_num_threads(num_threads)
    batch = make_batch([2100, 70, 1], head_dim=8)
    plan = AttentionPlan(
        **limits_of(batch, max_num_rows=40), num_blocks=len(batch["k_cache"]), q_dtype=q_dtype
    )
    caches = {name: batch[name] for name in ("k_cache", "v_cache")}
    for lengths, counts in (([2100, 70, 1], [1, 1, 1]), ([5, 60, 0], [5, 30, 1]), ([2099], [3])):
        num_rows = sum(counts)
        q = np.random.default_rng(num_rows).standard_normal((num_rows, 4, 8)).astype(np.float32)
        q = from_float32(q, BFLOAT16) if q_dtype == "bfloat16" else q
        step = {
            "block_table": batch["block_table"][: len(lengths)].copy(),
            "seq_lens": np.array(lengths, np.int32),
            "cu_seqlens_q": np.cumsum([0, *counts], dtype=np.int32),
        }
        expected = paged_attention(q, **caches, **step, return_lse=True)
        plan.update(**step)
        # What was passed belongs to the caller again.
        for array in step.values():
            array[...] = -9
        for _ in range(2):
            found = plan.attend(q, **caches, return_lse=True)
            assert all(map(np.array_equal, found, expected))


def test_plan_of_a_window_gives_the_bits_of_a_call(make_batch: MakeBatch) -> None:
    batch = make_batch([300, 70])
    plan = AttentionPlan(
        **limits_of(batch), num_blocks=len(batch["k_cache"]), window_left=20, causal=True
    )
    plan.update(batch["block_table"], batch["seq_lens"])
    arrays = {name: batch[name] for name in ("q", "k_cache", "v_cache")}
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    found = plan.attend(**arrays, softcap=2.0, sinks=sinks)
    assert np.array_equal(found, paged_attention(**batch, window_left=20, softcap=2.0, sinks=sinks))


def test_plan_refuses_what_it_was_not_made_for(make_batch: MakeBatch) -> None:
    batch = make_batch([30, 70])
    plan = AttentionPlan(**limits_of(batch), num_blocks=len(batch["k_cache"]))
    arrays = [batch[name] for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(ArgumentError, match=r"^a plan must be updated before it attends"):
        plan.attend(*arrays)
    lengths = batch["seq_lens"].copy()
    plan.update(batch["block_table"], lengths)
    with pytest.raises(ShapeError, match=r"have the shapes \[2, 4, 16\] and .*got \[1, 4, 16\]"):
        plan.attend(arrays[0][:1], *arrays[1:])
    with pytest.raises(ArgumentError, match=r"at most 2 rows and 70 tokens .* got 2 and 71$"):
        plan.update(batch["block_table"], lengths + 1)
    with pytest.raises(PoolIndexError):
        plan.update(batch["block_table"] + 100, lengths)
    # A refused step leaves none.
    with pytest.raises(ArgumentError, match="got no step"):
        plan.attend(*arrays)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, ""),
        ({"kv_dtype": "bf16", "q_dtype": "float16", "head_dim": 33, "block_size": 5}, ""),
        ({"layout": "x-packed", "has_token_scales": True, "num_splits": 3}, ""),
        ({"q_dtype": "int8"}, "q_dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of float32, float16, bfloat16, float8_e4m3, int8, got 'int4'"),
        ({"num_heads": 5, "num_kv_heads": 2}, "num_heads must be a positive multiple of num_kv_heads, got 5 and 2"),
        ({"block_size": 0}, "head_dim and block_size must be positive, got 128 and 0"),
        ({"layout": "CHW"}, "layout must be HND, NHD, x-packed, got 'CHW'"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"device": "cuda", "head_dim": 512}, "head_dim must be at most 256, got 512"),
        ({"device": "cuda", "layout": "x-packed"}, "x-packed keys are taken on a CPU only, got layout 'x-packed'"),
        ({"device": "cuda", "has_token_scales": True}, "scales for each token need a cache of float8_e4m3 or int8, got float32"),
    ],
)  # fmt: skip
def test_support_is_told_with_the_rule_that_is_broken(asked: dict[str, Any], reason: str) -> None:
    found = supports(**asked)
    assert bool(found) is not bool(reason)
    assert found.reason == reason


def test_cuda_is_supported_only_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "why_no_gpu", lambda: "CUDA is not available: no")
    assert supports(device="cuda").reason == "CUDA is not available: no"
    monkeypatch.setattr(launch, "why_no_gpu", lambda: "")
    assert supports(device="cuda")
    assert supports(device="cuda", num_splits=2).reason.startswith("num_splits and num_shared")


def test_workspaces_of_other_devices_are_told_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    limits |= {"max_num_rows": 4, "max_seq_len": 1024}
    with pytest.raises(ArgumentError, match=r"^device must be 'cpu' or 'cuda', got 'tpu'$"):
        workspace_size(**limits, device="tpu")
    monkeypatch.setattr(launch, "why_no_gpu", lambda: "CUDA is not available: no")
    with pytest.raises(ArgumentError, match=r"^CUDA is not available: no$"):
        workspace_size(**limits, device="cuda")
    with pytest.raises(ArgumentError, match=r"must be positive, got 0, 16, 4, 1024$"):
        workspace_size(**limits | {"head_dim": 0})

    class OneDevice:
        num_multiprocessors = 132

    monkeypatch.setattr(launch, "why_no_gpu", lambda: "")
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "launcher_of", lambda _: OneDevice())
    few, many = (workspace_size(**limits | {"max_num_rows": n}, device="cuda") for n in (4, 400))
    assert 0 < few < many


def test_warmup_says_what_it_does_and_leaves_nothing_to_compile() -> None:
    told: list[tuple[int, int, str]] = []
    warmed = warmup(["float32", "bf16"], progress=lambda *step: told.append(step))
    names = [kernel.name for kernel in warmed]
    assert "attention over bfloat16" in names
    assert "moves of 16 bits" in names
    assert [name for _, _, name in told] == [*names, ""]
    assert told[-1][:2] == (len(names), len(names))
    with pytest.raises(ArgumentError, match=r"^kv_dtypes must be one of .*, got 'int4'$"):
        warmup(["int4"])


@pytest.mark.parametrize("name", ["out", "lse", "workspace"])
def test_debugging_refuses_outputs_that_overlap_inputs(
    make_batch: MakeBatch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch([20, 40])
    given: dict[str, Any] = {"return_lse": True}
    shapes = {"out": batch["q"], "lse": batch["q"][0, :2]}
    given[name] = batch["q"].view(np.uint8).ravel() if name == "workspace" else shapes[name]
    if name == "lse":
        given[name] = batch["q"].ravel()[:8].reshape(2, 4)
    with pytest.raises(TypeError, match=rf"^{name} is written, so it must not overlap q$"):
        paged_attention(**batch, **given, debug=True)
    monkeypatch.setenv("KVKERNELS_DEBUG", "1")
    with pytest.raises(TypeError, match="must not overlap q"):
        paged_attention(**batch, **given)
    monkeypatch.setenv("KVKERNELS_DEBUG", "0")
    if name == "out":
        paged_attention(**batch, **given)


def test_debugging_refuses_a_slot_that_is_written_twice() -> None:
    caches = np.zeros((2, 3, 1, 4, 8), np.float32)
    new = np.ones((3, 1, 8), np.float32)
    with pytest.raises(ArgumentError, match=r"^a slot must be written once, got 5 twice$"):
        kvkernels.write_kv(new, new, caches[0], caches[1], np.array([5, -1, 5]), debug=True)
    assert not caches.any()
