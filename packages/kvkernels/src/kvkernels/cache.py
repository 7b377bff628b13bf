"""Writing into a paged cache: new tokens, and the copies of copy-on-write.

It knows slots and blocks, and not which sequence owns them.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from kvkernels.arrays import (
    FLOAT32,
    INT64,
    flatten,
    require,
    require_caches,
    require_writable,
    view,
)
from kvkernels.cuda.arrays import is_on_device
from kvkernels.errors import ArgumentError, PoolIndexError, ShapeError


def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    cos: Any = None,
    sin: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    stream: Any = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a layer's cache.

    Args:
        k: Float32 [T, Hkv, D], the keys of T tokens; only the last axis must be dense.
        v: Like k, the values.
        k_cache: Float32 [num_blocks, Hkv, block_size, D], written; only the last axis must be
            dense. It overlaps neither k nor v.
        v_cache: Like k_cache; its strides may differ.
        slot_mapping: Int64 [T]; slot = block_id * block_size + offset. -1 writes nothing. When a
            slot comes twice, the later token stays; on a GPU, either.
        cos: On a GPU; float32 [T, rotary_dim / 2]: keys are rotated by these angles, the first
            half of their rotated dimensions with the second.
        sin: Like cos.
        k_scale: On a GPU; what keys are divided by before they are rounded, or for 8-bit caches
            float32 [num_blocks, Hkv, block_size], where each vector's own scale is written.
        v_scale: Like k_scale, for values.
        kv_dtype: On a GPU; what the bits of integer caches mean, "bfloat16" or "float8_e4m3".
        stream: On a GPU; where to launch. None means the current one of the caches' framework.

    Raises:
        ArrayError, DtypeError, ShapeError, PoolIndexError: before anything is written.

    Cost: one copy of k and v; on one thread, without the GIL.

    >>> import numpy as np
    >>> keys, values = np.zeros((2, 3, 1, 4, 8), np.float32)  # 3 blocks of 4 tokens, one head
    >>> k = v = np.ones((2, 1, 8), np.float32)
    >>> write_kv(k, v, keys, values, np.array([9, -1]))  # block 2, offset 1; and nowhere
    >>> keys[2, 0, :, 0]
    array([0., 1., 0., 0.], dtype=float32)
    """
    if is_on_device(k_cache):
        from kvkernels.cuda import calls as cuda  # noqa: PLC0415  # most callers have no GPU

        cuda.write_kv(
            *(k, v, k_cache, v_cache, slot_mapping),
            cos=cos,
            sin=sin,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=kv_dtype,
            stream=stream,
        )
        return
    gpu_only = (cos, sin, kv_dtype, stream)
    if any(value is not None for value in gpu_only) or k_scale != 1 or v_scale != 1:
        rule = "cos, sin, k_scale, v_scale, kv_dtype and stream need arrays in GPU memory"
        raise ArgumentError(f"{rule}, got {type(k_cache).__qualname__}")
    new_keys = require("k", k, FLOAT32, "T, Hkv, D")
    new_values = require("v", v, FLOAT32, "T, Hkv, D")
    keys, values = require_caches(k_cache, v_cache)
    slots = require("slot_mapping", slot_mapping, INT64, "T")
    require_writable("k_cache", keys)
    require_writable("v_cache", values)
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    shape = (slots.shape[0], num_kv_heads, head_dim)
    if new_keys.shape != shape or new_values.shape != shape:
        rule = f"k and v must have the shape [T, Hkv, D] of slot_mapping and caches, {list(shape)}"
        raise ShapeError(f"{rule}, got {list(new_keys.shape)} and {list(new_values.shape)}")

    from kvkernels.cpu import cache as cpu  # noqa: PLC0415  # importing Numba is slow

    num_slots = num_blocks * block_size
    bad = cpu.find_bad_slot(slots, num_slots)
    if bad >= 0:
        rule = f"slots must be -1 or in [0, {num_slots}), the pool"
        raise PoolIndexError(f"{rule}, got {int(slots[bad])} for token {bad}")
    geometry = (slots, num_kv_heads, block_size, head_dim)
    sources = flatten("k", new_keys), flatten("v", new_values)
    targets = flatten("k_cache", keys), flatten("v_cache", values)
    for source, target in zip(sources, targets, strict=True):
        cpu.write(*source, *target, *geometry)


def copy_blocks(caches: Sequence[Any], copies: Iterable[Any], *, stream: Any = None) -> None:
    """Do a step's copy-on-write copies in every cache given, in one call for all layers.

    Args:
        caches: The key and value caches of all layers in any order, for example
            [*k_caches, *v_caches]: arrays [num_blocks, Hkv, block_size, D] of one pool, so equal
            in num_blocks and block_size; Hkv, D, the dtype and the strides may differ.
        copies: (source, destination, num_tokens) triples, or an integer array [N, 3]. The first
            num_tokens positions of block `source` are copied to block `destination`, and no other
            position is written. A destination is neither a source nor another's destination, so
            their order does not matter.
        stream: Of caches in GPU memory, where to launch; None means the current stream.

    Raises:
        ArrayError, ShapeError, ArgumentError, PoolIndexError: before anything is written.

    Cost: the bytes copied, and about a microsecond for each cache and copy.

    >>> import numpy as np
    >>> keys = np.arange(3, dtype=np.float32).repeat(4).reshape(3, 1, 4, 1)
    >>> copy_blocks([keys], [(1, 2, 3)])
    >>> keys[2, 0, :, 0]
    array([1., 1., 1., 2.], dtype=float32)
    """
    on_gpu = bool(len(caches)) and is_on_device(caches[0])
    arrays = [cache if on_gpu else view(f"caches[{n}]", cache) for n, cache in enumerate(caches)]
    for n, array in enumerate(arrays):
        if not on_gpu:
            require_writable(f"caches[{n}]", array)
        if len(array.shape) != 4:
            axes = "num_blocks, num_kv_heads, block_size, head_dim"
            raise ShapeError(f"caches[{n}] must have the shape [{axes}], got {list(array.shape)}")
        if array.shape[::2] != arrays[0].shape[::2]:
            rule = "caches must agree on num_blocks and block_size"
            first, other = list(arrays[0].shape[::2]), list(array.shape[::2])
            raise ShapeError(f"{rule}, got {first} for caches[0] and {other} for caches[{n}]")
    if not arrays:
        raise ShapeError("caches must hold at least one array, got none")
    triples = [_triple(copy) for copy in copies]
    _check_copies(triples, *arrays[0].shape[::2])
    if on_gpu:
        from kvkernels.cuda import calls as cuda  # noqa: PLC0415  # most callers have no GPU

        cuda.copy_blocks(caches, triples, stream)
        return
    for array in arrays:
        for source, destination, num_tokens in triples:
            array[destination, :, :num_tokens] = array[source, :, :num_tokens]


def _triple(copy: Any) -> tuple[int, int, int]:
    try:
        source, destination, num_tokens = map(operator.index, copy)
    except (TypeError, ValueError) as error:
        rule = "copies must be (source, destination, num_tokens) triples of integers"
        raise ArgumentError(f"{rule}, got {copy!r}") from error
    return source, destination, num_tokens


def _check_copies(triples: list[tuple[int, int, int]], num_blocks: int, block_size: int) -> None:
    """Check ids, lengths, and that the copies do not depend on their order."""
    sources = {source for source, _, _ in triples}
    destinations: set[int] = set()
    for source, destination, num_tokens in triples:
        for block in (source, destination):
            if not 0 <= block < num_blocks:
                rule = f"blocks to copy must be in [0, {num_blocks}), the pool"
                raise PoolIndexError(f"{rule}, got {block} in ({source}, {destination})")
        if not 0 <= num_tokens <= block_size:
            rule = f"num_tokens must be in [0, {block_size}], the block size"
            raise ArgumentError(f"{rule}, got {num_tokens} in ({source}, {destination})")
        if destination in sources:
            rule = "the destination of a copy must not be a source"
            raise ArgumentError(f"{rule}, got block {destination} as both")
        if destination in destinations:
            rule = "a block must be the destination of one copy only"
            raise ArgumentError(f"{rule}, got block {destination} twice")
        destinations.add(destination)
