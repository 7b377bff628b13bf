"""Writes, copies, swaps and merges on the fiber GPU, beside plain NumPy."""

from typing import Any

import numpy as np
import pytest

from kvkernels.cuda import cache
from kvkernels.errors import ArgumentError, DtypeError, KVKernelsError, ShapeError

from .cases import Array, Case, decode, encode, on_device
from .host_gpu import HostGPU

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE = 6, 3, 4
SLOTS = np.array([9, -1, 0, 23, 14, -1, 7])


def _pool(dtype: str, head_dim: int, layout: str = "HND") -> Array:
    pool = encode(np.full((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, head_dim), 3.0), dtype)
    return pool if layout == "HND" else np.ascontiguousarray(pool.swapaxes(1, 2)).swapaxes(1, 2)


def _at(pool: Array) -> Array:
    """The rows of a pool [num_slots, num_kv_heads, ...]."""
    return pool.swapaxes(1, 2).reshape(-1, *pool.shape[1:2], *pool.shape[3:])


def _new(dtype: str, head_dim: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    shape = (len(SLOTS), NUM_KV_HEADS, head_dim)
    return encode(rng.standard_normal(shape), dtype), encode(rng.standard_normal(shape), dtype)


def _views(arrays: dict[str, Any]) -> dict[str, Any]:
    """Take the NumPy arrays among arguments for arrays on the device."""
    return {n: on_device(n, a) if isinstance(a, np.ndarray) else a for n, a in arrays.items()}


def _write(gpu: HostGPU, new: str, kept: str, caches: list[Array], **options: Any) -> list[Array]:
    """Write the new tokens; returns them in float64 as they were drawn."""
    k, v = _new(new, caches[0].shape[3])
    write = cache.Write(
        *(on_device("k", k, new), on_device("v", v, new)),
        *(on_device("k_cache", caches[0], kept), on_device("v_cache", caches[1], kept)),
        on_device("slots", SLOTS),
        **_views(options),
    )
    write.check()
    write.run(gpu, 0)
    return [decode(k, new), decode(v, new)]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("new", "kept", "head_dim"),
    [
        ("bfloat16", "bfloat16", 64),
        ("float16", "float16", 46),
        ("float32", "bfloat16", 256),
        ("float32", "float32", 8),
        ("bfloat16", "float8_e4m3", 128),
        ("float32", "int8", 80),
    ],
)
def test_tokens_are_rounded_into_their_slots_and_minus_1_writes_nothing(
    gpu: HostGPU, new: str, kept: str, head_dim: int, layout: str
) -> None:
    caches = [_pool(kept, head_dim, layout), _pool(kept, head_dim, layout)]
    before = [pool.copy() for pool in caches]
    scale = {"float8_e4m3": 0.5, "int8": 0.04}.get(kept, 1.0)
    drawn = _write(gpu, new, kept, caches, k_scale=scale, v_scale=scale)
    for pool, old, rows in zip(caches, before, drawn, strict=True):
        inverse = np.float32(1 / scale)
        expected = _at(old).copy()
        expected[SLOTS[SLOTS >= 0]] = encode(rows.astype(np.float32) * inverse, kept)[SLOTS >= 0]
        assert np.array_equal(_at(pool), expected)


@pytest.mark.parametrize("rotary_dim", [2, 32, 64])
def test_keys_are_rotated_as_halves_and_values_are_not(gpu: HostGPU, rotary_dim: int) -> None:
    caches = [_pool("float32", 64), _pool("float32", 64)]
    half = rotary_dim // 2
    angles = np.random.default_rng(1).uniform(0, 6, (len(SLOTS), half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v = _write(gpu, "float32", "float32", caches, cos=cos, sin=sin)
    first, second = k[..., :half], k[..., half:rotary_dim]
    c, s = cos[:, None], sin[:, None]
    k = np.concatenate([first * c - second * s, second * c + first * s, k[..., rotary_dim:]], -1)
    live = SLOTS >= 0
    assert np.abs(_at(caches[0])[SLOTS[live]] - k[live]).max() < 1e-6
    assert np.array_equal(_at(caches[1])[SLOTS[live]], v[live])


@pytest.mark.parametrize(("kept", "step"), [("int8", 0.5 / 127), ("float8_e4m3", 1 / 16)])
def test_own_scales_make_the_largest_item_the_largest_number(
    gpu: HostGPU, kept: str, step: float
) -> None:
    caches = [_pool(kept, 96), _pool(kept, 96)]
    scales = [np.full((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE), 7.0, np.float32) for _ in "kv"]
    drawn = _write(gpu, "bfloat16", kept, caches, k_scales=scales[0], v_scales=scales[1])
    live = SLOTS >= 0
    for pool, scale, rows in zip(caches, scales, drawn, strict=True):
        largest = np.abs(rows[live]).max(-1, keepdims=True)
        limit = {"int8": 127.0, "float8_e4m3": 448.0}[kept]
        found = scale.swapaxes(1, 2).reshape(-1, NUM_KV_HEADS)
        assert np.allclose(found[SLOTS[live]], largest[..., 0] / limit, rtol=1e-6)
        untouched = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), SLOTS)
        assert (found[untouched] == 7).all()
        back = decode(_at(pool)[SLOTS[live]], kept) * found[SLOTS[live]][..., None]
        assert (np.abs(back - rows[live]) <= step * largest * 1.001).all()


def test_a_vector_of_zeros_with_its_own_scale_is_zeros(gpu: HostGPU) -> None:
    caches = [_pool("int8", 16), _pool("int8", 16)]
    scales = np.ones((2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE), np.float32)
    zeros = np.zeros((1, NUM_KV_HEADS, 16), np.float32)
    arrays = {"k": zeros, "v": zeros, "k_cache": caches[0], "v_cache": caches[1]}
    arrays |= {"slots": np.array([5]), "k_scales": scales[0], "v_scales": scales[1]}
    cache.Write(**_views(arrays)).run(gpu, 0)
    assert (_at(caches[0])[5] == 0).all()
    assert (scales[0, 1, :, 1] == 0).all()


COPIES = np.array([[0, 5, 4], [0, 1, 3], [2, 3, 0], [4, 2, 1]], np.int32)


def _drawn_pools(dtype: str, head_dim: int, count: int, layout: str) -> list[Array]:
    rng = np.random.default_rng(2)
    pools = []
    for _ in range(count):
        pool = _pool(dtype, head_dim, layout)
        pool[...] = encode(np.asarray(rng.standard_normal(pool.shape) * 9), dtype)
        pools.append(pool)
    return pools


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 46), ("int8", 33), ("float32", 8)]
)
def test_the_first_tokens_of_blocks_are_copied_in_all_caches_by_one_launch(
    gpu: HostGPU, dtype: str, head_dim: int, layout: str
) -> None:
    pools = _drawn_pools(dtype, head_dim, 4, layout)
    expected = [pool.copy() for pool in pools]
    copies = COPIES[:2]
    for pool in expected:
        for source, destination, num_tokens in copies:
            pool[destination, :, :num_tokens] = pool[source, :, :num_tokens]
    views = [on_device("cache", pool, dtype) for pool in pools]
    before = len(gpu.launches)
    cache.copy_blocks(views, views, copies, gpu, 0)
    assert len(gpu.launches) == before + 1
    assert all(np.array_equal(a, b) for a, b in zip(pools, expected, strict=True))


def test_scales_move_with_their_blocks(gpu: HostGPU) -> None:
    count = NUM_BLOCKS * NUM_KV_HEADS * BLOCK_SIZE
    scales: Array = np.arange(count, dtype=np.float32).reshape(-1, NUM_KV_HEADS, BLOCK_SIZE)
    expected = scales.copy()
    expected[5], expected[1, :, :3] = scales[0], scales[0, :, :3]
    view = on_device("k_scales", scales)
    cache.copy_blocks([view], [view], COPIES[:2], gpu, 0)
    assert np.array_equal(scales, expected)


def test_more_caches_and_copies_than_a_launch_takes_are_several_launches(gpu: HostGPU) -> None:
    pools = np.random.default_rng(0).standard_normal((130, 300, 1, 2, 4)).astype(np.float32)
    expected = pools.copy()
    copies = np.array([[n, n + 150, 1 + n % 2] for n in range(150)], np.int32)
    for source, destination, num_tokens in copies:
        expected[:, destination, :, :num_tokens] = expected[:, source, :, :num_tokens]
    views = [on_device("cache", pool) for pool in pools]
    before = len(gpu.launches)
    cache.copy_blocks(views, views, copies, gpu, 0)
    assert len(gpu.launches) == before + 4
    assert np.array_equal(pools, expected)


def test_a_swap_moves_blocks_to_another_pool_and_back(gpu: HostGPU) -> None:
    device = _drawn_pools("bfloat16", 64, 2, "NHD")
    host = [_pool("bfloat16", 64, "HND") for _ in device]
    kept = [pool.copy() for pool in device]
    views = [on_device("device", pool, "bfloat16") for pool in device]
    host_views = [on_device("host", pool, "bfloat16") for pool in host]
    out, back = np.array([[2, 0, 4], [4, 5, 3]], np.int32), np.array([[0, 1, 4]], np.int32)
    cache.copy_blocks(views, host_views, out, gpu, 0, is_swap=True)
    assert np.array_equal(host[1][5, :, :3], kept[1][4, :, :3])
    cache.copy_blocks(host_views, views, back, gpu, 0, is_swap=True)
    assert np.array_equal(device[0][1], kept[0][2])


def _merge(gpu: HostGPU, dtype: str, outs: Any, lses: Any, sinks: Any = None) -> Any:
    out = encode(np.full(outs[0].shape, np.nan), dtype)
    lse = np.full(lses[0].shape, np.nan, np.float32)
    cache.merge_states(
        [on_device("out", one, dtype) for one in outs],
        [on_device("lse", one) for one in lses],
        *(gpu, 0),
        out=on_device("out", out, dtype),
        lse=on_device("lse", lse),
        sinks=None if sinks is None else on_device("sinks", sinks),
    )
    return decode(out, dtype), lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_results_are_merged_to_that_of_float64(
    gpu: HostGPU, dtype: str, *, has_sinks: bool
) -> None:
    rng = np.random.default_rng(3)
    outs = [encode(rng.standard_normal((5, 4, 72)), dtype) for _ in range(3)]
    lses = [rng.standard_normal((5, 4)).astype(np.float32) * 5 for _ in outs]
    lses[1][2], outs[1][2] = -np.inf, encode(np.full((4, 72), np.nan), dtype)
    sinks = rng.standard_normal(4).astype(np.float32) if has_sinks else None
    out, lse = _merge(gpu, dtype, outs, lses, sinks)
    weights = np.exp(np.array(lses, np.float64))
    total = weights.sum(0)
    below = total + (np.exp(sinks.astype(np.float64)) if sinks is not None else 0)
    values = [np.nan_to_num(decode(one, dtype)) for one in outs]
    expected = sum(w[..., None] * v for w, v in zip(weights, values, strict=True))
    expected = expected / below[..., None]
    tolerance = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}[dtype]
    assert np.linalg.norm(out - expected) < tolerance * np.linalg.norm(expected)
    assert np.allclose(lse, np.log(total), rtol=1e-5, atol=1e-5)


def test_a_merge_of_rows_without_keys_is_zero_with_an_lse_of_minus_infinity(gpu: HostGPU) -> None:
    nothing = np.full((1, 2, 16), np.nan, np.float32)
    none = np.full((1, 2), -np.inf, np.float32)
    out, lse = _merge(gpu, "float32", [nothing, nothing], [none, none], np.ones(2, np.float32))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_a_shared_prefix_attended_once_and_merged_is_attention_to_all(gpu: HostGPU) -> None:
    whole = Case([80, 80], block_size=16)
    whole.arrays["block_table"][1, :4] = whole.arrays["block_table"][0, :4]
    expected, expected_lse = whole.reference()
    # Both rows see the prefix of 64 tokens as two rows of one sequence, then each its own tokens.
    prefix = Case([64], [2], causal=False)
    own = Case([16, 16])
    for part in (prefix, own):
        part.arrays |= {name: whole.arrays[name] for name in ("q", "k_cache", "v_cache")}
    prefix.arrays["block_table"] = whole.arrays["block_table"][:1]
    own.arrays["block_table"] = np.ascontiguousarray(whole.arrays["block_table"][:, 4:])
    results = [prefix.run(gpu), own.run(gpu)]
    outs = [encode(out, "bfloat16") for out, _ in results]
    out, lse = _merge(gpu, "bfloat16", outs, [lse for _, lse in results])
    assert np.linalg.norm(out - expected) < 1e-2 * np.linalg.norm(expected)
    assert np.allclose(lse, expected_lse, atol=2e-2)


REFUSED: dict[str, tuple[type[KVKernelsError], str, dict[str, Any]]] = {
    "dtype": (DtypeError, "k must have dtype float32 or", {"k": np.zeros((7, 3, 64), np.int16)}),
    "shape": (ShapeError, "v must have the shape", {"v": np.zeros((7, 2, 64), np.float32)}),
    "one-angle": (ArgumentError, "cos and sin", {"cos": np.zeros((7, 8), np.float32)}),
    "scale": (ArgumentError, "must be positive, got 0.0 and 1.0", {"k_scale": 0.0}),
    "slots": (DtypeError, "slots must have dtype int64", {"slots": np.zeros(7, np.int32)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_does_not_fit_is_refused_in_one_sentence(name: str) -> None:
    error, message, changed = REFUSED[name]
    given: dict[str, Any] = {
        "k": np.zeros((7, 3, 64), np.float32),
        "v": np.zeros((7, 3, 64), np.float32),
        "k_cache": np.zeros((6, 3, 4, 64), np.float32),
        "v_cache": np.zeros((6, 3, 4, 64), np.float32),
        "slots": SLOTS,
    } | changed
    with pytest.raises(error, match=message):
        cache.Write(**_views(given)).check()
