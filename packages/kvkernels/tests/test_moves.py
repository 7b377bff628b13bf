"""Blocks move between pools, scales and packed keys with them, and tokens are read out again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkernels import (
    ArgumentError,
    DtypeError,
    PoolIndexError,
    ShapeError,
    copy_blocks,
    gather_kv,
    swap_blocks,
    write_kv,
)
from kvkernels.arrays import Array
from kvkernels.dtypes import BY_NAME, from_float32, to_float32

MakeBatch = Callable[..., dict[str, Any]]

# num_blocks, num_kv_heads, block_size, head_dim; and the shapes of what moves with such a cache.
SHAPE = (5, 2, 4, 8)
KINDS = {"HND": SHAPE, "x-packed": (5, 2, 2, 4, 4), "scales": SHAPE[:3]}


def new_pool(kind: str, num_blocks: int = 5, seed: int = 0) -> Array:
    shape = (num_blocks, *KINDS[kind][1:])
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def positions(cache: Array, block: int, tokens: slice) -> Array:
    """The items of some positions of a block, of every kind of cache."""
    return cache[block, :, :, tokens] if cache.ndim == 5 else cache[block, :, tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_swap_copies_the_first_positions_to_the_other_pool_and_nothing_else(kind: str) -> None:
    device, host = new_pool(kind), new_pool(kind, 3, seed=1)
    before, expected = device.copy(), host.copy()
    positions(expected, 2, slice(3))[...] = positions(device, 4, slice(3))
    positions(expected, 0, slice(4))[...] = positions(device, 1, slice(4))
    swap_blocks([device], [host], [(4, 2, 3), (1, 0, 4)])
    assert np.array_equal(device, before)
    assert np.array_equal(host, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_take_packed_keys_and_scales_along(kind: str) -> None:
    cache = new_pool(kind)
    expected = cache.copy()
    positions(expected, 2, slice(3))[...] = positions(cache, 4, slice(3))
    copy_blocks([cache], [(4, 2, 3)])
    assert np.array_equal(cache, expected)


def test_swap_there_and_back_restores_all_layers_of_any_stride() -> None:
    layers = [new_pool("HND", seed=n) for n in range(3)]
    layers.append(np.asfortranarray(new_pool("HND", seed=3)))
    hosts = [np.full((2, *SHAPE[1:]), np.nan, np.float32) for _ in layers]
    expected = [layer.copy() for layer in layers]
    swap_blocks(layers, hosts, [(0, 1, 4), (3, 0, 2)])
    for layer in layers:
        layer[0], layer[3, :, :2] = 0, 0
    swap_blocks(hosts, layers, [(1, 0, 4), (0, 3, 2)])
    assert all(map(np.array_equal, layers, expected))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sources": []}, ShapeError, "sources must hold at least one array, got none"),
        ({"sources": [new_pool("HND")] * 2}, ArgumentError, "sources and destinations must be as many, got 2 and 1"),
        ({"copies": [(5, 0, 1)]}, PoolIndexError, "blocks to copy from must be in [0, 5), the sources, got 5 in (5, 0)"),
        ({"copies": [(4, 3, 1)]}, PoolIndexError, "blocks to copy to must be in [0, 3), the destinations, got 3 in (4, 3)"),
        ({"copies": [(4, 1, 1), (3, 1, 1)]}, ArgumentError, "a block must be the destination of one copy only, got block 1 twice"),
        ({"copies": [(4, 1, 5)]}, ArgumentError, "num_tokens must be in [0, 4], the block size, got 5 in (4, 1)"),
        ({"destinations": [new_pool("HND")[:, :1]]}, ShapeError, "sources[0] and destinations[0] must have one shape but for num_blocks, got [5, 2, 4, 8] and [5, 1, 4, 8]"),
        ({"destinations": [np.zeros(SHAPE, np.float16)]}, DtypeError, "sources[0] and destinations[0] must have one dtype, got float32 and float16"),
        ({"stream": 3}, ArgumentError, "stream needs arrays in GPU memory, got ndarray"),
    ],
)  # fmt: skip
def test_swap_refuses_what_does_not_fit_before_it_writes(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    host = np.zeros((3, *SHAPE[1:]), np.float32)
    given: dict[str, Any] = {
        "sources": [new_pool("HND")],
        "destinations": [host],
        "copies": [(0, 0, 4)],
    }
    with pytest.raises(error) as caught:
        swap_blocks(**given | change)
    assert str(caught.value) == message
    assert not host.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gather_reads_what_write_kv_wrote(dtype: str, *, packed: bool) -> None:
    rng = np.random.default_rng(0)
    k, v = from_float32(rng.standard_normal((2, 9, 2, 8), dtype=np.float32), BY_NAME[dtype])
    shape = KINDS["x-packed"] if packed else SHAPE
    k_cache, v_cache = np.zeros(shape, k.dtype), np.zeros(SHAPE, k.dtype)
    table = np.array([[3, 0], [1, 4]], np.int32)
    slots = [int(table[s, i // 4]) * 4 + i % 4 for s, n in enumerate((6, 3)) for i in range(n)]
    name = "bfloat16" if dtype == "bfloat16" else None
    write_kv(k, v, k_cache, v_cache, np.array(slots), kv_dtype=name)
    found = gather_kv(k_cache, v_cache, table, np.array([6, 3], np.int32), kv_dtype=name)
    assert np.array_equal(found[0], k)
    assert np.array_equal(found[1], v)


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3", "int8"])
def test_gather_multiplies_8_bits_by_their_scales(dtype: str, *, has_scales: bool) -> None:
    rng = np.random.default_rng(0)
    kind = BY_NAME[dtype]
    keys = from_float32(rng.uniform(-100, 100, SHAPE).astype(np.float32), kind)
    scales = rng.uniform(0.1, 1, SHAPE[:3]).astype(np.float32)
    found, _ = gather_kv(
        *(keys, keys, np.array([[2, 0]], np.int32), np.array([7], np.int32)),
        k_scale=scales if has_scales else 0.5,
        kv_dtype=dtype,
    )
    whole = to_float32(keys, kind) * (scales[..., None] if has_scales else np.float32(0.5))
    expected = np.concatenate([whole[2], whole[0]], axis=1).transpose(1, 0, 2)[:7]
    assert np.array_equal(found, expected)


def test_gather_reads_no_entry_past_the_last_block_and_refuses_ids_outside_the_pool() -> None:
    cache, lengths = new_pool("HND"), np.array([4, 0], np.int32)
    found, _ = gather_kv(cache, cache, np.array([[1, -9], [99, 99]], np.int32), lengths)
    assert np.array_equal(found, cache[1].swapaxes(0, 1))
    with pytest.raises(PoolIndexError, match="got 9 for block 0 of sequence 0"):
        gather_kv(cache, cache, np.array([[9], [0]], np.int32), lengths)
