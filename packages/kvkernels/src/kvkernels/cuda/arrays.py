"""Views of callers' arrays in GPU memory: where they lie, their dtype, shape, strides and stream.

It knows torch, CuPy, `__cuda_array_interface__` and DLPack by their protocols, imports none of them unless
an array comes from there, and copies nothing.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkernels.cuda.kernels import ITEMSIZE
from kvkernels.errors import ArgumentError, ArrayError, DtypeError, ShapeError

_DLPACK_CUDA = 2
_NAMES = {"float8_e4m3fn": "float8_e4m3"}
_NEEDS_CUPY = "arrays in GPU memory need CuPy: pip install 'kvkernels[cuda13]' or '[cuda12]'"
# What has no NumPy dtype comes as bits, with its name beside it.
_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float16": "uint16"}


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in GPU memory, as a kernel sees it."""

    name: str  # of the argument, for messages
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items
    dtype: str
    device: int
    owner: Any  # keeps the memory alive

    def require(self, dtypes: Sequence[str], axes: str, shape: Sequence[int | None]) -> None:
        """Check the dtype and the shape; `axes` names the axes, None leaves a length open."""
        if self.dtype not in dtypes:
            raise DtypeError(f"{self.name} must have dtype {' or '.join(dtypes)}, got {self.dtype}")
        fits = len(shape) == len(self.shape) and all(
            wanted is None or wanted == length
            for wanted, length in zip(shape, self.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(
                axes.split(", ")[i] if n is None else str(n) for i, n in enumerate(shape)
            )
            raise ShapeError(
                f"{self.name} must have the shape [{wanted}] ({axes}), got {list(self.shape)}"
            )

    def require_dense_rows(self) -> None:
        """Check that the last axis is dense."""
        if self.shape[-1] > 1 and self.strides[-1] != 1:
            rule = f"the last axis of {self.name} must be dense (a stride of 1 item)"
            raise ShapeError(f"{rule}, got {self.strides[-1]}")

    def require_contiguous(self) -> None:
        """Check that the array is C-contiguous."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != expected:
                raise ShapeError(
                    f"{self.name} must be C-contiguous, got the strides {self.strides}"
                )
            expected *= length

    def is_aligned(self, num_bytes: int) -> bool:
        """Whether the array and all of its rows begin at multiples of `num_bytes`."""
        itemsize = ITEMSIZE.get(self.dtype) or np.dtype(self.dtype).itemsize
        steps = [stride for n, stride in zip(self.shape[:-1], self.strides, strict=False) if n > 1]
        return self.pointer % num_bytes == 0 and all(s * itemsize % num_bytes == 0 for s in steps)


def import_cupy() -> Any:
    """Import CuPy; raises ArrayError with the command to install it."""
    try:
        import cupy  # noqa: PLC0415  # only calls with arrays on a GPU need it
    except ImportError as error:
        raise ArrayError(f"{_NEEDS_CUPY}, got {error}") from error
    return cupy


def require_one_device(arrays: Iterable[DeviceArray | None]) -> None:
    """Check that all arrays are on the device of the first one; None is none."""
    first, *others = (array for array in arrays if array is not None)
    for other in others:
        if other.device != first.device:
            rule = f"{other.name} must be on the device of {first.name}, {first.device}"
            raise ArgumentError(f"{rule}, got {other.device}")


def is_on_device(array: Any) -> bool:
    """Whether an array says that it lies in the memory of a CUDA device."""
    if type(array) is np.ndarray:
        return False
    if type(array).__module__.partition(".")[0] == "torch":
        return bool(array.is_cuda)
    if hasattr(array, "__cuda_array_interface__"):
        return True
    if hasattr(array, "__dlpack_device__"):
        return bool(array.__dlpack_device__()[0] == _DLPACK_CUDA)
    return False


def view(name: str, array: Any, dtype: str | None = None) -> DeviceArray:
    """View an array of torch, CuPy, DLPack or `__cuda_array_interface__`, no copy.

    `dtype` names what the bits of an unsigned array mean ("bfloat16", "float8_e4m3").
    """
    if type(array).__module__.partition(".")[0] == "torch":
        found = _view_torch(name, array)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _view_interface(name, array)
    elif hasattr(array, "__dlpack__"):
        found = _view_dlpack(name, array)
    else:
        rule = f"{name} must be an array in GPU memory: torch, CuPy, DLPack or CUDA array interface"
        raise ArrayError(f"{rule}, got {type(array).__qualname__}")
    if dtype is None or found.dtype == dtype:
        return found
    if _BITS.get(dtype) != found.dtype:
        raise DtypeError(
            f"{name} must hold {dtype} as {_BITS.get(dtype, dtype)}, got {found.dtype}"
        )
    return DeviceArray(
        name, found.pointer, found.shape, found.strides, dtype, found.device, found.owner
    )


def _view_torch(name: str, tensor: Any) -> DeviceArray:
    if not tensor.is_cuda:
        raise ArrayError(f"{name} must be in GPU memory as the others, got {tensor.device}")
    dtype = str(tensor.dtype).rpartition(".")[2]
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    device = tensor.device.index
    dtype = _NAMES.get(dtype, dtype)
    return DeviceArray(name, tensor.data_ptr(), shape, strides, dtype, device, tensor)


def _view_dlpack(name: str, array: Any) -> DeviceArray:
    cupy = import_cupy()
    try:
        found = cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        rule = f"{name} must be an array that CuPy takes by DLPack"
        raise ArrayError(f"{rule}, got {type(array).__qualname__} ({error})") from error
    return _view_interface(name, found)


def _view_interface(name: str, array: Any) -> DeviceArray:
    interface = array.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    given = interface.get("strides")
    if given is None:
        given = tuple(dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if any(stride % dtype.itemsize for stride in given):
        rule = f"strides of {name} must be multiples of its {dtype.itemsize}-byte items"
        raise ShapeError(f"{rule}, got {given} bytes")
    strides = tuple(stride // dtype.itemsize for stride in given)
    device = getattr(getattr(array, "device", None), "id", 0)
    pointer = interface["data"][0]
    # The protocol has no bfloat16 and no float8: their items are bytes without a meaning.
    kind = np.dtype(array.dtype).name if dtype.kind == "V" else dtype.name
    return DeviceArray(name, pointer, shape, strides, _NAMES.get(kind, kind), device, array)


def current_stream(array: Any, device: int) -> int:
    """The stream on which the framework of an array works now, as CUDA's handle.

    What speaks nothing but DLPack has none: CuPy, which viewed it, has waited for it on its own.
    """
    if type(array).__module__.partition(".")[0] == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    is_cupy = type(array).__module__.partition(".")[0] == "cupy"
    if is_cupy or not hasattr(array, "__cuda_array_interface__"):
        return int(import_cupy().cuda.get_current_stream(device).ptr)
    return int(array.__cuda_array_interface__.get("stream") or 0)
