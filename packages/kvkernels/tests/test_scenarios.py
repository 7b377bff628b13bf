"""What went wrong in public engines and kernels, on the CPU. The same on the fiber GPU: cuda/test_scenarios.py.

| what went wrong there | right outcome | tested by |
|---|---|---|
| NaN of unwritten slots, by 0 * NaN or NaN - inf | the bits of a pool of zeros | `test_nan_and_infinity_in_unowned_slots_change_no_bit`, test_invariance.py: `test_junk_*` |
| block_id * stride in 32 bits | as in a small pool | test_large_pool.py |
| groups of 5, 7, 16 or more heads | float64's result | test_attention.py: `test_every_group_size`, `test_one_kv_head_for_71_query_heads` |
| padding rows: NaN, stale results, tables read | 0 and -inf, the others' bits unchanged | `test_padding_of_every_kind_leaves_the_other_rows_alone`, test_invariance.py: `test_padding_*` |
| one NaN row spoils the scale of a tensor | it spoils itself: scales are given | `test_nan_in_a_new_token_spoils_no_other` |
| replayed graphs run over plans of larger batches | a plan's step is its own | test_plans.py: `test_plan_gives_the_bits_of_a_call_in_every_step` (graphs need a GPU) |
| workspaces too small, or 16 times too large | enough, and at most twice what is needed | test_plans.py: `test_workspace_*`, `test_stated_size_*` |
| a sink counted for each split, or dropped | once, whatever the splits and the dtype | `test_sink_is_counted_once_whatever_the_splits` |
| k_scale not applied to what float64 sees | the dequantised cache's result | the same |
| rows that change with their batch mates | equal bits | test_invariance.py, test_threads.py, test_states.py |
| streams, capture, staging buffers | needs a GPU | cuda/test_calls.py: `test_launches_follow_the_stream_of_the_caller` |
| a table changed right after the call | the result stands | `test_arrays_belong_to_the_caller_when_a_call_returns` |
| misaligned stores for head dim 46 | float64's result | `test_head_dims_that_fill_no_vector` |
| ALiBi's distance off by one | by hand | `test_alibi_counts_from_the_row_itself` |
| kernels of one head dim called for another | float64's result | test_attention.py: `test_every_head_dim` |
| slot -1 and block -1 taken for each other | one skips, the other is refused | `test_minus_1_skips_as_a_slot_and_is_refused_as_a_block` |
| NaN for a number of splits that a heuristic chose | float64's result for every number | `test_every_number_of_splits` |
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import (
    PoolIndexError,
    copy_blocks,
    merge_states,
    paged_attention,
    paged_attention_reference,
    swap_blocks,
    write_kv,
)
from kvkernels.arrays import Array
from kvkernels.dtypes import BFLOAT16, BY_NAME, from_float32, to_float32
from kvkernels.selftest import TOLERANCES, error_of
from kvkernels.selftest import make_batch as make_any_batch

MakeBatch = Callable[..., dict[str, Any]]

CACHES = pytest.mark.parametrize(
    "kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3", "int8"]
)
RED_BYTES = 128
RED = 0xA5


def encode(batch: dict[str, Any], kv_dtype: str) -> dict[str, Any]:
    """A batch with its caches in another dtype; junk that is no number is 0 in int8."""
    dtype = BY_NAME[kv_dtype]
    names = ("k_cache", "v_cache")
    floats = {n: np.nan_to_num(batch[n]) if kv_dtype == "int8" else batch[n] for n in names}
    caches = {name: from_float32(floats[name], dtype) for name in names}
    return batch | caches | {"kv_dtype": kv_dtype}


JUNK = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "largest": 3e38}


@pytest.mark.parametrize(
    ("kv_dtype", "junk"),
    # int8 has numbers only.
    [("int8", "largest"), *((name, j) for name in BY_NAME if name != "int8" for j in JUNK)],
)
@pytest.mark.parametrize("block_size", [8, 16])
def test_nan_and_infinity_in_unowned_slots_change_no_bit(
    make_batch: MakeBatch, kv_dtype: str, junk: str, block_size: int
) -> None:
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1]
    rows = [1, 1, 3, 1, 5, 2]
    clean = encode(make_batch(edges, rows, block_size=block_size, unowned=0.0), kv_dtype)
    marked = make_batch(edges, rows, block_size=block_size, unowned=np.nan)
    bits = from_float32(np.array([JUNK[junk]], np.float32), BY_NAME[kv_dtype])
    spoiled = dict(clean)
    for name in ("k_cache", "v_cache"):
        spoiled[name] = np.where(np.isnan(marked[name]), bits[0], clean[name])
    found = paged_attention(**spoiled, return_lse=True)
    expected = paged_attention(**clean, return_lse=True)
    assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


@CACHES
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31)])
def test_padding_of_every_kind_leaves_the_other_rows_alone(
    make_batch: MakeBatch, kv_dtype: str, garbage: int
) -> None:
    batch = encode(make_batch([17, 0, 40, 0, 1], [2, 1, 7, 3, 1]), kv_dtype)
    batch["block_table"][[1, 3]] = garbage
    out, lse = np.full_like(batch["q"], np.nan), np.full(batch["q"].shape[:2], np.nan, np.float32)
    paged_attention(**batch, out=out, lse=lse, return_lse=True)
    padding, kept = [2, 10, 11, 12], [0, 1, 3, 4, 5, 6, 7, 8, 9, 13]
    assert (out[padding] == 0).all()
    assert (lse[padding] == -np.inf).all()
    sequences = [0, 2, 4]
    unpadded = batch | {name: batch[name][sequences] for name in ("block_table", "seq_lens")}
    unpadded |= {"q": batch["q"][kept], "cu_seqlens_q": np.array([0, 2, 9, 10], np.int32)}
    assert paged_attention(**unpadded).tobytes() == out[kept].tobytes()


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "int8"])
@pytest.mark.parametrize("has_own_scales", [False, True])
def test_nan_in_a_new_token_spoils_no_other(kv_dtype: str, *, has_own_scales: bool) -> None:
    new = np.random.default_rng(0).standard_normal((3, 2, 16), dtype=np.float32)
    caches, scales = [], []
    for value in (new[1, 0, 0], np.float32(np.nan)):
        new[1, 0, 0] = value
        cache = np.zeros((2, 2, 2, 8, 16), BY_NAME[kv_dtype].bits)
        own = np.zeros((2, 2, 2, 8), np.float32)
        given_scales: Any = tuple(own) if has_own_scales else (0.02, 0.02)
        with np.errstate(invalid="ignore"):
            write_kv(
                *(new, new, cache[0], cache[1], np.array([0, 5, 9])),
                k_scale=given_scales[0],
                v_scale=given_scales[1],
                kv_dtype=kv_dtype,
            )
        caches.append(cache)
        scales.append(own)
    for one, other in ((caches[0], caches[1]), (scales[0], scales[1])):
        one[:, 0, :, 5] = other[:, 0, :, 5] = 0
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("num_splits", range(9))
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_sink_is_counted_once_whatever_the_splits(
    make_batch: MakeBatch, kv_dtype: str, num_splits: int
) -> None:
    batch = encode(make_batch([130, 40], head_dim=32), kv_dtype)
    options: dict[str, Any] = {
        "k_scale": 0.25,
        "v_scale": 0.5,
        "sinks": np.array([1, -2, 3, 0], np.float32),
    }
    out, lse = paged_attention(**batch, **options, num_splits=num_splits, return_lse=True)
    expected, expected_lse = paged_attention_reference(**batch, **options)
    assert np.linalg.norm(out - expected) <= 2e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("seq_len", [1, 16, 17, 64, 130])
def test_every_number_of_splits(make_batch: MakeBatch, seq_len: int) -> None:
    batch = make_batch([seq_len, 33])
    expected, _ = paged_attention_reference(**batch)
    for num_splits in range(14):
        out = paged_attention(**batch, num_splits=num_splits)
        assert np.linalg.norm(out - expected) <= 2e-6 * np.linalg.norm(expected)


def test_arrays_belong_to_the_caller_when_a_call_returns(make_batch: MakeBatch) -> None:
    batch = make_batch([40, 17])
    out = paged_attention(**batch)
    before = out.copy()
    for array in batch.values():
        array[...] = 0
    assert np.array_equal(out, before)


@CACHES
@pytest.mark.parametrize("head_dim", [1, 7, 46, 130])
def test_head_dims_that_fill_no_vector(kv_dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    for layout in ("HND", "NHD"):
        batch = make_any_batch(rng, kv_dtype, head_dim=head_dim, layout=layout)
        assert error_of(batch) <= TOLERANCES["float32"]


def test_alibi_counts_from_the_row_itself() -> None:
    # Equal scores, a slope of ln 2: each step back halves a weight, and one's own is 1.
    cache = np.zeros((1, 1, 4, 8), np.float32)
    values = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1) * np.ones(8, np.float32)
    out, lse = paged_attention(
        *(np.zeros((2, 1, 8), np.float32), cache, values),
        *(np.zeros((1, 1), np.int32), np.array([3], np.int32)),
        cu_seqlens_q=np.array([0, 2], np.int32),
        alibi_slopes=np.array([np.log(2)], np.float32),
        return_lse=True,
    )
    np.testing.assert_allclose(out[:, 0, 0], [1 / 1.5, (0.5 + 2) / 1.75], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log([1.5, 1.75]), rtol=1e-6)


def test_minus_1_skips_as_a_slot_and_is_refused_as_a_block(make_batch: MakeBatch) -> None:
    batch = make_batch([17])
    before = batch["k_cache"].copy()
    new = np.ones((1, 2, 16), np.float32)
    write_kv(new, new, batch["k_cache"], batch["v_cache"], np.array([-1]))
    np.testing.assert_array_equal(batch["k_cache"], before)
    batch["block_table"][0, 1] = -1
    with pytest.raises(PoolIndexError, match="got -1 for block 1 of sequence 0"):
        paged_attention(**batch)


def red_zoned(array: Array) -> tuple[Array, Array]:
    """A copy of an array between two red zones, and the bytes of all three."""
    memory: Array = np.full(array.nbytes + 2 * RED_BYTES, RED, np.uint8)
    inner = memory[RED_BYTES : RED_BYTES + array.nbytes].view(array.dtype).reshape(array.shape)
    inner[...] = array
    return inner, memory


def is_intact(memory: Array) -> bool:
    return bool((memory[:RED_BYTES] == RED).all() and (memory[-RED_BYTES:] == RED).all())


@pytest.mark.parametrize("head_dim", [8, 40, 46, 64])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
def test_nothing_beside_the_results_is_written(
    make_batch: MakeBatch, q_dtype: str, head_dim: int
) -> None:
    batch = make_batch([40, 1, 17, 0], [5, 1, 17, 1], head_dim=head_dim, group=3)
    batch["q"] = from_float32(batch["q"], BY_NAME[q_dtype])
    out, around_out = red_zoned(np.zeros_like(batch["q"]))
    lse, around_lse = red_zoned(np.zeros(out.shape[:2], np.float32))
    paged_attention(**batch, out=out, lse=lse, return_lse=True)
    assert is_intact(around_out)
    assert is_intact(around_lse)
    merged, around_merged = red_zoned(np.zeros_like(out))
    merge_states([out, out], [lse, lse], out=merged, lse=lse)
    assert is_intact(around_merged)
    assert is_intact(around_lse)


@CACHES
def test_nothing_beside_a_cache_is_written(kv_dtype: str) -> None:
    bits = BY_NAME[kv_dtype].bits
    pools = [red_zoned(np.zeros((3, 2, 5, 7), bits)) for _ in range(4)]
    k_cache, v_cache, *hosts = (pool for pool, _ in pools)
    new = np.ones((15, 2, 7), np.float32)
    write_kv(new, new, k_cache, v_cache, np.arange(15), kv_dtype=kv_dtype)
    copy_blocks([k_cache, v_cache], [(0, 2, 5)])
    swap_blocks([k_cache, v_cache], hosts, [(0, 2, 5), (2, 0, 5)])
    assert all(is_intact(memory) for _, memory in pools)
    assert all(hosts[0][block].any() for block in (0, 2))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_call_agrees_with_float64(data: st.DataObject) -> None:
    draw = data.draw
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1]
    lengths = tuple(draw(st.lists(st.sampled_from([*edges, 100, 1100]), min_size=1, max_size=4)))
    rows = tuple(draw(st.integers(1, max(1, min(20, length)))) for length in lengths)
    group, num_kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    q_dtype = draw(st.sampled_from(list(TOLERANCES)))
    num_heads, rng = group * num_kv_heads, np.random.default_rng(draw(st.integers(0, 99)))
    batch = make_any_batch(
        *(rng, draw(st.sampled_from(list(BY_NAME))), q_dtype),
        lengths=lengths,
        rows=draw(st.sampled_from([None, rows])),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=draw(st.sampled_from([16, 24, 64, 128])),
        block_size=block_size,
        layout=draw(st.sampled_from(["HND", "NHD"])),
    )
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, 0, 7, 64])),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "num_splits": draw(st.sampled_from([0, 1, 3])),
    }
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.uniform(0, 0.5, num_heads).astype(np.float32)
    if draw(st.booleans()):
        options["sinks"] = rng.uniform(-3, 3, num_heads).astype(np.float32)
    assert error_of(batch, q_dtype, **options) <= TOLERANCES[q_dtype]


def test_bits_that_torch_calls_bfloat16_are_what_we_call_so() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).standard_normal(999).astype(np.float32)
    expected = torch.from_numpy(numbers).to(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(from_float32(numbers, BFLOAT16), BFLOAT16), expected)
