"""Writing into a paged cache: new tokens, and the copies of copy-on-write.

It knows slots and blocks, and not which sequence owns them.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvkernels.arrays import INT64, Array, require, require_writable, view_bits
from kvkernels.cuda.arrays import is_on_device
from kvkernels.dtypes import FLOAT32, LARGEST, Dtype, from_float32, to_float32
from kvkernels.errors import ArgumentError, PoolIndexError, ShapeError
from kvkernels.layouts import CacheView, require_caches, require_rows, require_write_scale


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
        k: Float32, float16 or bfloat16 [T, Hkv, D], the keys of T tokens.
        v: Like k, the values.
        k_cache: A cache of any dtype and layout that `paged_attention` takes, written: numbers are
            rounded to nearest, ties to even, and 8-bit ones saturate. It overlaps neither k nor v.
        v_cache: Like k_cache; its strides may differ.
        slot_mapping: Int64 [T]; slot = block_id * block_size + offset. -1 writes nothing. When a
            slot comes twice, the later token stays; on a GPU, either.
        cos: Float32 [T, rotary_dim / 2]: keys are rotated by these angles, the first half of their
            rotated dimensions with the second.
        sin: Like cos.
        k_scale: What keys are divided by before they are rounded, or for 8-bit caches float32
            [num_blocks, Hkv, block_size], where each vector's own scale is written.
        v_scale: Like k_scale, for values.
        kv_dtype: As in `paged_attention`.
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
    if stream is not None:
        raise ArgumentError(f"stream needs arrays in GPU memory, got {type(k_cache).__qualname__}")
    new_keys, k_dtype = require_rows("k", k, "T, Hkv, D")
    new_values, v_dtype = require_rows("v", v, "T, Hkv, D")
    keys, values = require_caches(k_cache, v_cache, kv_dtype)
    slots = require("slot_mapping", slot_mapping, INT64, "T")
    require_writable("k_cache", keys.array)
    require_writable("v_cache", values.array)
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    shape = (slots.shape[0], num_kv_heads, head_dim)
    if new_keys.shape != shape or new_values.shape != shape:
        rule = f"k and v must have the shape [T, Hkv, D] of slot_mapping and caches, {list(shape)}"
        raise ShapeError(f"{rule}, got {list(new_keys.shape)} and {list(new_values.shape)}")
    scales = [
        require_write_scale("k_scale", k_scale, keys),
        require_write_scale("v_scale", v_scale, values),
    ]
    angles = _require_angles(cos, sin, slots.shape[0], head_dim)

    from kvkernels.cpu import cache as cpu  # noqa: PLC0415  # importing Numba is slow

    num_slots = num_blocks * block_size
    bad = cpu.find_bad_slot(slots, num_slots)
    if bad >= 0:
        rule = f"slots must be -1 or in [0, {num_slots}), the pool"
        raise PoolIndexError(f"{rule}, got {int(slots[bad])} for token {bad}")
    if angles is not None:
        new_keys, k_dtype = _rotate(to_float32(new_keys, k_dtype), *angles), FLOAT32
    cpu.write("k", _to_cache_dtype(new_keys, k_dtype, keys, scales[0], slots), keys, slots)
    cpu.write("v", _to_cache_dtype(new_values, v_dtype, values, scales[1], slots), values, slots)


def _require_angles(
    cos: Any, sin: Any, num_tokens: int, head_dim: int
) -> tuple[Array, Array] | None:
    """Check the angles of a rotation."""
    if (cos is None) != (sin is None):
        raise ArgumentError("cos and sin must be given together")
    if cos is None:
        return None
    axes = "T, rotary_dim / 2"
    angles = require("cos", cos, FLOAT32.bits, axes), require("sin", sin, FLOAT32.bits, axes)
    for name, given in zip(("cos", "sin"), angles, strict=True):
        if given.shape != (num_tokens, angles[0].shape[1]):
            rule = f"{name} must have the shape [{axes}] of k, [{num_tokens}, ...], and of cos"
            raise ShapeError(f"{rule}, got {list(given.shape)}")
    if not 1 <= angles[0].shape[1] <= head_dim // 2:
        rule = f"rotary_dim must be from 2 to head_dim, {head_dim}"
        raise ShapeError(f"{rule}, got {2 * angles[0].shape[1]}")
    return angles


def _rotate(keys: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first half of the rotated dimensions with the second, and copy the others."""
    half = cos.shape[1]
    first, second = keys[..., :half], keys[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin, keys[..., 2 * half :])
    return np.concatenate(rotated, axis=-1)


def _to_cache_dtype(
    rows: Array, dtype: Dtype, cache: CacheView, given: tuple[float, Array | None], slots: Array
) -> Array:
    """Return new tokens as a cache holds them; themselves if there is nothing to convert."""
    scale, scales = given
    if dtype is cache.dtype and scale == 1 and scales is None:
        return rows
    floats = to_float32(rows, dtype)
    if scales is not None:
        own = np.abs(floats).max(axis=-1) / np.float32(LARGEST[cache.dtype.name])
        written, block_size = slots >= 0, cache.shape[2]
        blocks, offsets = np.divmod(slots[written], block_size)
        scales[blocks, :, offsets] = own[written]
        # A vector of zeros has the scale 0.
        floats = floats / np.where(own == 0, np.float32(1), own)[..., None]
    elif scale != 1:
        floats = floats / np.float32(scale)
    return from_float32(floats, cache.dtype)


def copy_blocks(caches: Sequence[Any], copies: Iterable[Any], *, stream: Any = None) -> None:
    """Do a step's copy-on-write copies in every cache given, in one call for all layers.

    Args:
        caches: The key and value caches of all layers in any order, for example
            `[*k_caches, *v_caches]`: arrays [num_blocks, Hkv, block_size, D] of one pool, so equal
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
    arrays = [
        cache if on_gpu else view_bits(f"caches[{n}]", cache)[0] for n, cache in enumerate(caches)
    ]
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
