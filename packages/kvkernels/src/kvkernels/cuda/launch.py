"""The GPU behind a launch: CuPy compiles, loads and launches. It knows no attention.

CuPy is imported at the first launch. It keeps compiled kernels on disk, keyed by their whole text.
"""

import sys
from functools import cache
from typing import Any

import numpy as np

from kvkernels.cuda import source
from kvkernels.cuda.kernels import ITEMSIZE, Kernel
from kvkernels.cuda.plan import Launcher
from kvkernels.errors import ArrayError

_OPTIONS = ("-std=c++17",)
# More dynamic shared memory than this has to be asked for.
_FREE_SHARED_BYTES = 48 * 1024


_NEEDS_CUPY = "arrays in GPU memory need CuPy: pip install 'kvkernels[cuda13]' or '[cuda12]'"


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415  # only calls with arrays on a GPU need it
    except ImportError as error:
        raise ArrayError(f"{_NEEDS_CUPY}, got {error}") from error
    return cupy


def why_no_gpu() -> str:
    """Say why nothing can be computed on a GPU; empty where it can."""
    try:
        num_devices = int(_cupy().cuda.runtime.getDeviceCount())
    except ArrayError:
        return f"{_NEEDS_CUPY}, got none"
    except Exception as error:  # noqa: BLE001  # drivers fail in many ways, and all mean no
        return f"CUDA is not available: {error}"
    return "" if num_devices else "CUDA is not available: there is no device"


class CupyLauncher:
    """Launches on one CUDA device; every kernel is a module of its own, compiled when first used."""

    def __init__(self, device: int) -> None:
        self._cupy = _cupy()
        self._device = self._cupy.cuda.Device(device)
        self._functions: dict[Kernel, Any] = {}
        self.num_multiprocessors = int(self._device.attributes["MultiProcessorCount"])

    def launch(
        self, kernel: Kernel, grid: int, params: "np.ndarray[Any, Any]", stream: int
    ) -> None:
        """Launch a kernel with its parameters by value on a stream, asynchronously."""
        with self._device:
            function = self._functions.get(kernel)
            if function is None:
                function = self._functions[kernel] = self._load(kernel)
            external = self._cupy.cuda.ExternalStream(stream, self._device.id)
            function(
                *((grid,), (kernel.threads,), (params,)),
                shared_mem=kernel.shared_bytes,
                stream=external,
            )

    def _load(self, kernel: Kernel) -> Any:
        text = source.module_text(("device.cuh", *kernel.files))
        module = self._cupy.RawModule(
            code=text, options=_OPTIONS, name_expressions=(kernel.expression,)
        )
        function = module.get_function(kernel.expression)
        if kernel.shared_bytes > _FREE_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = kernel.shared_bytes
        return function


@cache
def launcher_of(device: int) -> Launcher:
    """The launcher of a device."""
    return CupyLauncher(device)


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Make an array by the framework of another, on its device; what NumPy lacks comes as bits."""
    if type(like).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    kind = {"bfloat16": "uint16"}.get(dtype, dtype)
    assert kind in {"uint16", "uint8"} or kind in ITEMSIZE
    return _cupy().empty(shape, kind)


def to_host(array: Any) -> "np.ndarray[Any, Any]":
    """Copy an array to the host, when its framework's current stream has got there."""
    if type(array).__module__.partition(".")[0] == "torch":
        return np.asarray(array.cpu())
    return np.asarray(_cupy().asnumpy(_cupy().asarray(array)))


def is_pinned(pointer: int) -> bool:
    """Whether an address of the host is pinned memory, which a GPU reaches."""
    runtime = _cupy().cuda.runtime
    return bool(runtime.pointerGetAttributes(pointer).type == runtime.memoryTypeHost)
