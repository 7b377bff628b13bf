"""write_kv and copy_blocks write what they say, and nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvkernels import (
    ArgumentError,
    ArrayError,
    PoolIndexError,
    ShapeError,
    copy_blocks,
    paged_attention,
    write_kv,
)
from kvkernels.arrays import Array

MakeBatch = Callable[..., dict[str, Any]]

SHAPE = (5, 2, 4, 8)  # num_blocks, num_kv_heads, block_size, head_dim


def new_cache(layout: str = "HND", seed: int = 0) -> Array:
    pool = np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)
    if layout == "HND":
        return pool
    return pool.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


def new_tokens(num_tokens: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).standard_normal((num_tokens, 2, 8), dtype=np.float32)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_write_kv_writes_each_token_to_its_slot_and_nothing_else(layout: str) -> None:
    k_cache, v_cache = new_cache(layout), new_cache(layout, seed=1)
    expected_k, expected_v = k_cache.copy(), v_cache.copy()
    k, v = new_tokens(4), new_tokens(4, seed=8)
    slots = [19, 0, 6, 5]
    for t, slot in enumerate(slots):
        expected_k[slot // 4, :, slot % 4] = k[t]
        expected_v[slot // 4, :, slot % 4] = v[t]
    write_kv(k, v, k_cache, v_cache, np.array(slots))
    assert np.array_equal(k_cache, expected_k)
    assert np.array_equal(v_cache, expected_v)


def test_write_kv_takes_caches_of_different_strides() -> None:
    k_cache, v_cache = new_cache("HND"), new_cache("NHD")
    write_kv(new_tokens(20), new_tokens(20), k_cache, v_cache, np.arange(20))
    assert np.array_equal(k_cache, v_cache)


def test_write_kv_skips_slots_of_minus_1() -> None:
    k_cache, v_cache = new_cache(), new_cache()
    before = k_cache.copy()
    write_kv(new_tokens(3), new_tokens(3), k_cache, v_cache, np.array([-1, -1, -1]))
    assert np.array_equal(k_cache, before)
    assert np.array_equal(v_cache, before)


def test_write_kv_keeps_the_later_token_of_a_slot() -> None:
    k_cache, v_cache, k = new_cache(), new_cache(), new_tokens(2)
    write_kv(k, k, k_cache, v_cache, np.array([6, 6]))
    assert np.array_equal(k_cache[1, :, 2], k[1])


def test_write_kv_takes_tokens_sliced_from_a_fused_projection() -> None:
    fused = np.random.default_rng(3).standard_normal((4, 6, 8), dtype=np.float32)
    k_cache, v_cache = new_cache(), new_cache()
    write_kv(fused[:, 2:4], fused[:, 4:], k_cache, v_cache, np.arange(4))
    assert np.array_equal(k_cache[0], fused[:, 2:4].transpose(1, 0, 2))
    assert np.array_equal(v_cache[0], fused[:, 4:].transpose(1, 0, 2))


def test_write_kv_of_no_tokens_does_nothing() -> None:
    k_cache, v_cache = new_cache(), new_cache()
    write_kv(new_tokens(0), new_tokens(0), k_cache, v_cache, np.array([], np.int64))
    assert np.array_equal(k_cache, new_cache())


@pytest.mark.parametrize("slot", [20, -2, 2**40])
def test_write_kv_refuses_a_slot_outside_the_pool_before_it_writes(slot: int) -> None:
    k_cache, v_cache = new_cache(), new_cache()
    with pytest.raises(PoolIndexError, match=rf"-1 or in \[0, 20\).*got {slot} for token 1$"):
        write_kv(new_tokens(2), new_tokens(2), k_cache, v_cache, np.array([3, slot]))
    assert np.array_equal(k_cache, new_cache())
    assert np.array_equal(v_cache, new_cache())


def test_write_kv_refuses_tokens_that_do_not_fit_slots_and_caches() -> None:
    with pytest.raises(ShapeError, match=r"\[3, 2, 8\], got \[3, 2, 8\] and \[2, 2, 8\]$"):
        write_kv(new_tokens(3), new_tokens(2), new_cache(), new_cache(), np.arange(3))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_write_kv_refuses_a_read_only_cache(name: str) -> None:
    caches: dict[str, Any] = {"k_cache": new_cache(), "v_cache": new_cache()}
    caches[name].flags.writeable = False
    with pytest.raises(ArrayError, match=f"^{name} is written, so it must not be read-only$"):
        write_kv(new_tokens(1), new_tokens(1), caches["k_cache"], caches["v_cache"], np.arange(1))
    assert np.array_equal(caches["k_cache"], new_cache())


class Copy(NamedTuple):
    """A copy as a block manager may hand it out."""

    source: int
    destination: int
    num_tokens: int


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 4, 3), (0, 2, 1)],
        [Copy(0, 4, 3), Copy(0, 2, 1)],
        np.array([[0, 4, 3], [0, 2, 1]], np.int32),
        iter([(0, 4, 3), (0, 2, 1)]),
    ],
    ids=["tuples", "objects", "array", "iterator"],
)
def test_copy_blocks_copies_the_first_tokens_in_every_cache(copies: Any) -> None:
    caches = [new_cache(), new_cache("NHD", seed=1), new_cache(seed=2)[:, :1].astype(np.float16)]
    expected = [cache.copy() for cache in caches]
    for cache in expected:
        cache[4, :, :3] = cache[0, :, :3]
        cache[2, :, :1] = cache[0, :, :1]
    copy_blocks(caches, copies)
    assert all(map(np.array_equal, caches, expected))


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_copy_blocks_copies_nothing_and_whole_blocks_alike(num_tokens: int) -> None:
    cache = new_cache()
    copy_blocks([cache], [(1, 3, num_tokens)])
    assert np.array_equal(cache[3, :, :num_tokens], cache[1, :, :num_tokens])
    assert np.array_equal(cache[3, :, num_tokens:], new_cache()[3, :, num_tokens:])


def test_copy_blocks_of_no_copies_does_nothing() -> None:
    cache = new_cache()
    copy_blocks([cache], [])
    assert np.array_equal(cache, new_cache())


@pytest.mark.parametrize(
    ("copies", "error", "message"),
    [
        ([(0, 1, 2), (1, 2, 2)], ArgumentError, "must not be a source, got block 1 as both"),
        ([(1, 1, 2)], ArgumentError, "must not be a source, got block 1 as both"),
        ([(0, 2, 2), (1, 2, 2)], ArgumentError, "of one copy only, got block 2 twice"),
        ([(0, 2, 5)], ArgumentError, r"in \[0, 4\], the block size, got 5 in \(0, 2\)"),
        ([(0, 2, -1)], ArgumentError, r"in \[0, 4\], the block size, got -1 in \(0, 2\)"),
        ([(5, 2, 1)], PoolIndexError, r"in \[0, 5\), the pool, got 5 in \(5, 2\)"),
        ([(0, -1, 1)], PoolIndexError, r"in \[0, 5\), the pool, got -1 in \(0, -1\)"),
        ([(0, 1)], ArgumentError, r"triples of integers, got \(0, 1\)"),
        ([(0, 1, 1.5)], ArgumentError, r"triples of integers, got \(0, 1, 1.5\)"),
        ([7], ArgumentError, r"triples of integers, got 7"),
    ],
)
def test_copy_blocks_refuses_wrong_copies_before_it_writes(
    copies: Any, error: type[Exception], message: str
) -> None:
    cache = new_cache()
    with pytest.raises(error, match=rf"{message}$"):
        copy_blocks([cache], [(4, 3, 4), *copies])
    assert np.array_equal(cache, new_cache())


def test_copy_blocks_refuses_caches_of_two_pools_before_it_writes() -> None:
    first, second = new_cache(), new_cache()[:4]
    with pytest.raises(
        ShapeError, match=r"got \[5, 4\] for caches\[0\] and \[4, 4\] for caches\[1\]$"
    ):
        copy_blocks([first, second], [(0, 1, 4)])
    assert np.array_equal(first, new_cache())


def test_copy_blocks_refuses_no_caches_and_caches_without_blocks() -> None:
    with pytest.raises(ShapeError, match=r"at least one array, got none$"):
        copy_blocks([], [(0, 1, 4)])
    with pytest.raises(ShapeError, match=r"caches\[1\] must have the shape .*, got \[5, 2\]$"):
        copy_blocks([new_cache(), new_cache()[:, :, 0, 0]], [(0, 1, 4)])


def test_copy_blocks_refuses_a_read_only_cache_before_it_writes() -> None:
    first, second = new_cache(), new_cache()
    second.flags.writeable = False
    with pytest.raises(ArrayError, match=r"^caches\[1\] is written, so"):
        copy_blocks([first, second], [(0, 1, 4)])
    assert np.array_equal(first, new_cache())


def test_what_write_kv_wrote_is_what_attention_reads(make_batch: MakeBatch) -> None:
    batch = make_batch([9, 4], block_size=4, head_dim=8)
    expected = paged_attention(**batch)
    names = ("k_cache", "v_cache")
    k_cache, v_cache = (np.full_like(batch[name], np.nan) for name in names)
    slots = [batch["block_table"][0, i // 4] * 4 + i % 4 for i in range(9)]
    slots += [batch["block_table"][1, 0] * 4 + i for i in range(4)]
    k, v = (np.stack([batch[name][slot // 4, :, slot % 4] for slot in slots]) for name in names)
    write_kv(k, v, k_cache, v_cache, np.array(slots, np.int64))
    rebuilt = batch | {"k_cache": k_cache, "v_cache": v_cache}
    assert np.array_equal(paged_attention(**rebuilt), expected)


def test_copy_on_write_isolates_two_branches(make_batch: MakeBatch) -> None:
    """A prompt of 6 tokens forks; each branch appends its own seventh token."""
    batch = make_batch([6, 7], block_size=4, head_dim=8)
    k_cache, v_cache = batch["k_cache"], batch["v_cache"]
    shared, tail = batch["block_table"][0, :2].tolist()
    own = batch["block_table"][1, 1].item()
    copy_blocks([k_cache, v_cache], [(tail, own, 2)])
    batch["block_table"][1] = [shared, own, -1]
    first, second = new_tokens(1, seed=20), new_tokens(1, seed=21)
    both = np.concatenate([first, second])
    write_kv(both, both, k_cache, v_cache, np.array([tail * 4 + 2, own * 4 + 2]))
    for cache in (k_cache, v_cache):
        assert np.array_equal(cache[tail, :, :2], cache[own, :, :2])
        assert np.array_equal(cache[tail, :, 2], first[0])
        assert np.array_equal(cache[own, :, 2], second[0])
