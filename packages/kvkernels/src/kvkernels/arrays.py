"""Views of callers' arrays: who made them, their dtype, shape and strides. It knows no attention.

Nothing here copies. torch tensors are told by their module's name, so that torch is not imported.
"""

import sys
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvkernels.errors import ArrayError, DtypeError, ShapeError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)

_DLPACK_CPU = 1
# What NumPy lacks, or has only by a package, and the dtype of its bits.
_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
_RULE = "must be an array in CPU memory that NumPy can view without a copy"


def view(name: str, array: Any) -> Array:
    """View an array of NumPy, torch, DLPack or the buffer protocol as a NumPy array, no copy.

    Raises ArrayError for anything else, for arrays on another device and for tensors that
    require grad.
    """
    try:
        # A subclass, such as memmap, would only slow the calls below.
        found = array.view(np.ndarray) if isinstance(array, np.ndarray) else _view_foreign(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name} {_RULE}, got {type(array).__qualname__} ({error})"
        raise ArrayError(message) from error
    if not found.dtype.isnative:
        rule = f"{name} must have the byte order of this machine"
        raise DtypeError(f"{rule}, got {found.dtype.name} in the other ({found.dtype.str})")
    return found


def _view_foreign(array: Any) -> Array:
    # Tensor.numpy() is twice as fast as DLPack and gives a writable view with every NumPy.
    if type(array).__module__.partition(".")[0] == "torch":
        found: Array = array.numpy()
        return found
    if hasattr(array, "__dlpack__"):
        device, _ = array.__dlpack_device__()
        if device != _DLPACK_CPU:
            raise TypeError(f"it is on DLPack device type {device}, the CPU is {_DLPACK_CPU}")
        return np.from_dlpack(array)
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    return np.asarray(memoryview(array))


def require(name: str, array: Any, dtype: "np.dtype[Any]", axes: str) -> Array:
    """View an array and check its dtype and its number of axes; `axes` names them: "T, Hq, D"."""
    try:
        found = view(name, array)
    except ArrayError as error:
        # NumPy lacks some dtypes of others, bfloat16 for one.
        given = str(getattr(array, "dtype", dtype)).rpartition(".")[2]
        if given == dtype.name:
            raise
        raise _wrong_dtype(name, dtype, given) from error
    if found.dtype != dtype:
        raise _wrong_dtype(name, dtype, found.dtype.name)
    if found.ndim != axes.count(",") + 1:
        raise ShapeError(f"{name} must have the shape [{axes}], got {list(found.shape)}")
    require_aligned(name, found)
    return found


def view_bits(name: str, array: Any) -> tuple[Array, str]:
    """View an array whose dtype NumPy may lack as one of bits; returns that and the dtype's name."""
    dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
    bits = _BITS.get(dtype)
    if bits is None:
        found = view(name, array)
        return found, name_of(found.dtype)
    if isinstance(array, np.ndarray):
        return view(name, array).view(bits), dtype
    if type(array).__module__.partition(".")[0] == "torch":
        # torch.int16 and torch.uint8 are those that every NumPy takes.
        same_size = {2: "int16", 1: "uint8"}[np.dtype(bits).itemsize]
        if array.device.type == "cpu":
            return view(name, array.view(getattr(sys.modules["torch"], same_size))).view(
                bits
            ), dtype
    return view(name, array), dtype


@cache
def name_of(dtype: "np.dtype[Any]") -> str:
    """Return a dtype's name, which NumPy makes anew each time."""
    return dtype.name


def _wrong_dtype(name: str, dtype: "np.dtype[Any]", given: str) -> DtypeError:
    return DtypeError(f"{name} must have dtype {dtype.name}, the only one supported, got {given}")


def require_writable(name: str, array: Array) -> None:
    """Check that an array may be written."""
    if not array.flags.writeable:
        raise ArrayError(f"{name} is written, so it must not be read-only")


def require_strides(name: str, array: Array) -> None:
    """Check that strides are positive and whole items, so that no two items overlap by accident."""
    for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        if length > 1 and (stride <= 0 or stride % array.itemsize):
            rule = (
                f"strides of {name} must be positive multiples of its {array.itemsize}-byte items"
            )
            raise ShapeError(f"{rule}, got {stride} bytes for axis {axis}")


def require_aligned(name: str, array: Array) -> None:
    """Check that items lie at multiples of their size."""
    if not array.flags.aligned:
        raise ShapeError(f"{name} must be aligned to its {array.itemsize}-byte items")


def flatten(name: str, array: Array) -> tuple[Array, tuple[int, ...]]:
    """View the memory from an array's first to its last item as one dense axis.

    Returns that view and the strides, in items, of all axes but the last, which must be dense.
    One compiled kernel so serves every layout.
    """
    if array.flags.c_contiguous:
        # Axes of length 1 may carry any stride, so strides are derived from the shape.
        strides = [1]
        for length in array.shape[:0:-1]:
            strides.append(strides[-1] * length)
        return array.reshape(-1), tuple(strides[:0:-1])
    itemsize = array.itemsize
    require_strides(name, array)
    if array.shape[-1] > 1 and array.strides[-1] != itemsize:
        rule = f"the last axis of {name} must be dense (stride {itemsize} bytes)"
        raise ShapeError(f"{rule}, got {array.strides[-1]} bytes")
    steps = tuple(stride // itemsize for stride in array.strides)
    span = 1 + sum((length - 1) * step for length, step in zip(array.shape, steps, strict=True))
    return as_strided(array, (span,), (itemsize,)), steps[:-1]
