"""Moving keys and values into a paged cache and out of it, for one thread.

It knows no rule about shapes and slots.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numba import from_dtype

from kvkernels.arrays import Array, flatten
from kvkernels.cpu.compiled import compiled, kernel
from kvkernels.cpu.signatures import INT, INT64_1D, ints, items
from kvkernels.layouts import CacheView

# Scalars are Numba's int64.
Int: TypeAlias = Any


@compiled(INT64_1D, INT)
def find_bad_slot(slot_mapping: Array, num_slots: Int) -> Int:
    """Return the index of the first slot that is neither -1 nor in the pool, or -1."""
    for t in range(slot_mapping.shape[0]):
        if slot_mapping[t] < -1 or slot_mapping[t] >= num_slots:
            return t
    return -1


def _write(
    tokens: Array,
    token_steps: tuple[int, ...],
    cache: Array,
    cache_steps: tuple[int, ...],
    part: Int,
    slot_mapping: Array,
    num_kv_heads: Int,
    block_size: Int,
    head_dim: Int,
) -> None:
    """Copy each token's heads to its slot of a cache; both arrays are flattened."""
    for t in range(slot_mapping.shape[0]):
        slot = slot_mapping[t]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            source = t * token_steps[0] + head * token_steps[1]
            target = block * cache_steps[0] + head * cache_steps[1] + offset * cache_steps[2]
            for d in range(0, head_dim, part):
                cache[target : target + part] = tokens[source + d : source + d + part]
                target += cache_steps[3]


def _read(
    tokens: Array,
    cache: Array,
    cache_steps: tuple[int, ...],
    part: Int,
    slot_mapping: Array,
    num_kv_heads: Int,
    block_size: Int,
    head_dim: Int,
) -> None:
    """Copy each slot's heads to its place among dense tokens; both arrays are flattened."""
    target = 0
    for t in range(slot_mapping.shape[0]):
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        for head in range(num_kv_heads):
            source = block * cache_steps[0] + head * cache_steps[1] + offset * cache_steps[2]
            for _ in range(0, head_dim, part):
                tokens[target : target + part] = cache[source : source + part]
                source += cache_steps[3]
                target += part


@cache
def _writer(num_bytes: int) -> Callable[..., Any]:
    """Return `_write` for items of so many bytes; the first call compiles or loads it."""
    item = from_dtype(_bits(num_bytes))
    arguments = (
        *(items(item), ints(2), items(item, writable=True), ints(4)),
        *(INT, INT64_1D, INT, INT, INT),
    )
    return kernel(_write, arguments)


@cache
def _reader(num_bytes: int) -> Callable[..., Any]:
    """Return `_read` likewise."""
    item = from_dtype(_bits(num_bytes))
    arguments = (
        *(items(item, writable=True), items(item), ints(4)),
        *(INT, INT64_1D, INT, INT, INT),
    )
    return kernel(_read, arguments)


def prepare(num_bytes: int) -> None:
    """Compile or load what moves items of so many bytes."""
    _writer(num_bytes)
    _reader(num_bytes)


@cache
def _bits(num_bytes: int) -> "np.dtype[Any]":
    """The dtype that items of so many bytes are moved as, whatever they stand for."""
    return np.dtype(f"u{num_bytes}")


def write(name: str, tokens: Array, cache: CacheView, slot_mapping: Array) -> None:
    """Copy tokens [T, Hkv, D], of the cache's dtype, to their slots."""
    bits = _bits(tokens.itemsize)
    source, source_steps = flatten(name, tokens.view(bits))
    target, target_steps, part = cache.flatten()
    _, num_kv_heads, block_size, head_dim = cache.shape
    _writer(tokens.itemsize)(
        *(source, source_steps, target.view(bits), target_steps, part),
        *(slot_mapping, num_kv_heads, block_size, head_dim),
    )


def read(cache: CacheView, slot_mapping: Array, tokens: Array) -> None:
    """Copy slots, none of them -1, to tokens [T, Hkv, D], C-contiguous and of the cache's dtype."""
    bits = _bits(tokens.itemsize)
    source, source_steps, part = cache.flatten()
    _, num_kv_heads, block_size, head_dim = cache.shape
    _reader(tokens.itemsize)(
        *(tokens.view(bits).reshape(-1), source.view(bits), source_steps, part),
        *(slot_mapping, num_kv_heads, block_size, head_dim),
    )
