"""Caches as callers lay them out, viewed in one way. It knows shapes, strides and dtypes.

HND        [num_blocks, num_kv_heads, block_size, head_dim], any strides: NHD and values with
           dense tokens are transposed views
x-packed   keys [num_blocks, num_kv_heads, head_dim / x, block_size, x]
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvkernels.arguments import CACHE_AXES, SCALE_AXES, number_of
from kvkernels.arrays import (
    Array,
    require_aligned,
    require_strides,
    require_writable,
    view_bits,
)
from kvkernels.dtypes import ALIASES, BFLOAT16, BY_NAME, CACHE_DTYPES, LARGEST, QUERY_DTYPES, Dtype
from kvkernels.errors import ArgumentError, DtypeError, ShapeError

_PACKED_AXES = "num_blocks, num_kv_heads, head_dim / x, block_size, x"
_PACKED_NDIM = 5
_BFLOAT16_BITS = BFLOAT16.bits.name


@dataclass(frozen=True, slots=True)
class CacheView:
    """The keys or the values of a layer: bits, and where an item (block, head, token, d) is."""

    name: str  # of the argument, for messages
    array: Array  # as it was passed, HND or x-packed
    dtype: Dtype
    shape: tuple[int, int, int, int]  # logical: HND

    def flatten(self) -> tuple[Array, tuple[int, int, int, int], int]:
        """Return all items as one dense axis, their steps by (block, head, token, part), and part.

        Of head_dim, `part` items at a time are dense.
        """
        array = self.array.view(self.dtype.kernel)
        size = array.itemsize
        steps = [stride // size for stride in array.strides]
        for axis, length in enumerate(array.shape):
            if length == 1:
                steps[axis] = 0
        if array.flags.c_contiguous:
            items = array.reshape(-1)
        else:
            span = 1 + sum((n - 1) * step for n, step in zip(array.shape, steps, strict=True))
            items = as_strided(array, (span,), (size,), writeable=array.flags.writeable)
        if array.ndim == _PACKED_NDIM:
            part = array.shape[-1]
            return items, (steps[0], steps[1], steps[3], steps[2]), part
        part = array.shape[-1] if array.shape[-1] == 1 or steps[3] == 1 else 1
        return items, (steps[0], steps[1], steps[2], steps[3]), part


def require_dtype(
    name: str, array: Any, allowed: tuple[Dtype, ...], given: str | None = None
) -> tuple[Array, Dtype]:
    """View an array as bits and find its dtype, which `given` names where NumPy cannot."""
    bits, found = view_bits(name, array)
    found = ALIASES.get(found, found)
    if found == _BFLOAT16_BITS and allowed is not CACHE_DTYPES and BFLOAT16 in allowed:
        return bits, BFLOAT16
    if given is not None:
        wanted = BY_NAME.get(ALIASES.get(given, given))
        if wanted is None:
            rule = f"kv_dtype must be {_either(CACHE_DTYPES)}"
            raise ArgumentError(f"{rule}, got {given!r}")
        if wanted in allowed and bits.dtype == wanted.bits:
            return bits, wanted
    dtype = BY_NAME.get(found)
    if dtype is None or dtype not in allowed:
        raise DtypeError(f"{name} must have dtype {_either(allowed)}, got {found}{_hint(found)}")
    return bits, dtype


def _either(dtypes: tuple[Dtype, ...]) -> str:
    names = [dtype.name for dtype in dtypes]
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " or " + names[-1]


def _hint(found: str) -> str:
    return " without kv_dtype" if found in {"uint16", "uint8"} else ""


def require_rows(name: str, array: Any, axes: str) -> tuple[Array, Dtype]:
    """View rows of heads, [T, H, D], of a dtype that queries may have; 16 bits are bfloat16."""
    found, dtype = require_dtype(name, array, QUERY_DTYPES)
    if found.ndim != axes.count(",") + 1:
        raise ShapeError(f"{name} must have the shape [{axes}], got {list(found.shape)}")
    require_aligned(name, found)
    return found, dtype


def require_cache(name: str, array: Any, kv_dtype: str | None = None) -> CacheView:
    """View one cache and check its shape, strides and dtype."""
    found, dtype = require_dtype(name, array, CACHE_DTYPES, kv_dtype)
    require_aligned(name, found)
    shape = found.shape
    if len(shape) == _PACKED_NDIM:
        num_blocks, num_kv_heads, num_parts, block_size, part = shape
        if part > 1 and found.strides[-1] != found.itemsize:
            rule = f"the last axis of {name} must be dense (stride {found.itemsize} bytes)"
            raise ShapeError(f"{rule}, got {found.strides[-1]} bytes")
        logical = (num_blocks, num_kv_heads, block_size, num_parts * part)
    elif len(shape) == 4:  # HND
        logical = shape
    else:
        axes = f"[{CACHE_AXES}] or [{_PACKED_AXES}]" if name == "k_cache" else f"[{CACHE_AXES}]"
        raise ShapeError(f"{name} must have the shape {axes}, got {list(shape)}")
    require_strides(name, found)
    if 0 in logical[1:]:
        raise ShapeError(f"[{CACHE_AXES[12:]}] must be positive, got {list(logical[1:])}")
    return CacheView(name, found, dtype, logical)


def require_caches(
    k_cache: Any, v_cache: Any, kv_dtype: str | None = None
) -> tuple[CacheView, CacheView]:
    """View the key and the value cache of a layer and check that they are of one pool."""
    keys = require_cache("k_cache", k_cache, kv_dtype)
    values = require_cache("v_cache", v_cache, kv_dtype)
    if keys.shape != values.shape:
        rule = "k_cache and v_cache must have one shape"
        raise ShapeError(f"{rule}, got {list(keys.shape)} and {list(values.shape)}")
    if keys.dtype is not values.dtype:
        rule = "k_cache and v_cache must have one dtype"
        raise DtypeError(f"{rule}, got {keys.dtype.name} and {values.dtype.name}")
    return keys, values


def require_scale(name: str, scale: Any, cache: CacheView) -> tuple[float, Array | None]:
    """Check a scale: a number for the whole cache, or float32 for each block, head and token.

    Returns (number, None), or (1, array).
    """
    number = number_of(name, scale)
    if number is not None:
        return number, None
    found, _ = view_bits(name, scale)
    if found.dtype != np.float32:
        raise DtypeError(f"{name} must be a number or have dtype float32, got {found.dtype.name}")
    if found.shape != cache.shape[:3]:
        rule = f"{name} must have the shape [{SCALE_AXES}] of the caches, {list(cache.shape[:3])}"
        raise ShapeError(f"{rule}, got {list(found.shape)}")
    require_aligned(name, found)
    require_strides(name, found)
    return 1.0, found


def require_write_scale(name: str, scale: Any, cache: CacheView) -> tuple[float, Array | None]:
    """Check a scale for a write: a positive number, or an array where those of tokens are written."""
    number, scales = require_scale(name, scale, cache)
    if number <= 0:
        raise ArgumentError(f"{name} must be a positive number or an array, got {number}")
    if scales is not None:
        require_writable(name, scales)
        if cache.dtype.name not in LARGEST:
            rule = f"scales for each token need a cache of {' or '.join(LARGEST)}"
            raise DtypeError(f"{rule}, got {cache.dtype.name}")
    return number, scales
