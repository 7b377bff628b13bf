"""The dtypes of queries, caches and results: their names, their bits, and what these stand for.

NumPy has no bfloat16 and no float8, so the arrays in here hold bits: uint16 and uint8. It knows single
numbers, and neither caches nor attention.
"""

from typing import Any, NamedTuple

import numpy as np

from kvkernels.arrays import Array


class Dtype(NamedTuple):
    """A dtype by the name that torch gives it, and the NumPy dtypes that carry it."""

    name: str
    bits: "np.dtype[Any]"  # of the arrays that callers pass
    kernel: "np.dtype[Any]"  # by which the CPU kernels tell it from others


FLOAT32 = Dtype("float32", np.dtype(np.float32), np.dtype(np.float32))
FLOAT16 = Dtype("float16", np.dtype(np.float16), np.dtype(np.int16))
BFLOAT16 = Dtype("bfloat16", np.dtype(np.uint16), np.dtype(np.uint16))
FLOAT8 = Dtype("float8_e4m3", np.dtype(np.uint8), np.dtype(np.uint8))
INT8 = Dtype("int8", np.dtype(np.int8), np.dtype(np.int8))

QUERY_DTYPES = (FLOAT32, FLOAT16, BFLOAT16)
CACHE_DTYPES = (*QUERY_DTYPES, FLOAT8, INT8)
# What other packages call them.
ALIASES = {"float8_e4m3fn": FLOAT8.name, "bf16": BFLOAT16.name, "fp8": FLOAT8.name}
BY_NAME = {dtype.name: dtype for dtype in CACHE_DTYPES}

# The largest numbers of 8-bit dtypes.
LARGEST = {FLOAT8.name: 448, INT8.name: 127}
_FLOAT8_NAN = 0x7F
_FLOAT8_SIGN = 0x80


def _float8_values() -> Array:
    """The 127 finite numbers of float8-e4m3 that are not negative, by their bits."""
    bits = np.arange(_FLOAT8_NAN)
    exponent, mantissa = bits >> 3, bits & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


_FLOAT8_VALUES = _float8_values()
_FLOAT8_ALL = np.concatenate([_FLOAT8_VALUES, [np.nan], -_FLOAT8_VALUES, [np.nan]]).astype("f4")
_FLOAT8_MIDDLES = ((_FLOAT8_VALUES[1:] + _FLOAT8_VALUES[:-1]) / 2).astype(np.float32)


def to_float32(array: Array, dtype: Dtype, out: Array | None = None) -> Array:
    """Return what the bits of an array stand for, exactly; a float32 array itself.

    `out`, if it is given, takes what is not float32 already.

    >>> to_float32(np.array([0x3FC0], np.uint16), BFLOAT16)
    array([1.5], dtype=float32)
    """
    if dtype is FLOAT32:
        return array
    if out is not None:
        out[...] = to_float32(array, dtype)
        return out
    if dtype is BFLOAT16:
        wide: Array = array.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if dtype is FLOAT8:
        return np.asarray(_FLOAT8_ALL[array])
    return array.astype(np.float32)


def from_float32(array: Array, dtype: Dtype) -> Array:
    """Return the bits nearest to float32 numbers, ties to even.

    8-bit dtypes saturate: float8-e4m3 at 448 and int8 at 127.

    >>> hex(from_float32(np.array([1.5], np.float32), BFLOAT16).item())
    '0x3fc0'
    """
    if dtype is BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # Rounding must not carry a NaN over into another number.
        rounded = np.where(np.isnan(array), bits | np.uint32(0x400000), rounded)
        upper: Array = rounded >> np.uint32(16)
        return upper.astype(np.uint16)
    if dtype is FLOAT8:
        return _to_float8(array)
    if dtype is INT8:
        whole: Array = np.rint(np.clip(array, -LARGEST[INT8.name], LARGEST[INT8.name]))
        return whole.astype(np.int8)
    with np.errstate(over="ignore"):
        return array.astype(dtype.bits, copy=False)


def _to_float8(array: Array) -> Array:
    size = np.abs(array)
    found = np.searchsorted(_FLOAT8_MIDDLES, size)
    nearest = np.minimum(found, len(_FLOAT8_MIDDLES) - 1)
    is_tie = (_FLOAT8_MIDDLES[nearest] == size) & (found == nearest)
    found += is_tie & (found % 2 == 1)
    bits = np.where(np.isnan(array), _FLOAT8_NAN, found)
    return (bits | np.where(np.signbit(array), _FLOAT8_SIGN, 0)).astype(np.uint8)
