"""The GPU behind a launch: CuPy compiles, loads and launches. It knows no attention.

CuPy is imported at the first launch. It keeps compiled kernels on disk, keyed by their whole text.
"""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvkernels.cuda import source
from kvkernels.cuda.arrays import import_cupy
from kvkernels.cuda.kernels import ITEMSIZE, Kernel
from kvkernels.cuda.plan import Launcher
from kvkernels.errors import ArgumentError, ArrayError

_OPTIONS = ("-std=c++17",)
_LEGACY_STREAM = 1
# More than 48 KB of shared memory has to be asked for; 2 KB of it are what kernels have beside the dynamic.
_FREE_SHARED_BYTES = 46 * 1024


@dataclass(frozen=True, slots=True)
class _Handle:
    """A stream's handle, with the protocol by which CuPy takes other libraries' streams."""

    value: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


def why_no_gpu() -> str:
    """Say why nothing can be computed on a GPU; empty where it can."""
    try:
        num_devices = int(import_cupy().cuda.runtime.getDeviceCount())
    except ArrayError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # drivers fail in many ways, and all mean no
        return f"CUDA is not available: {error}"
    return "" if num_devices else "CUDA is not available: there is no device"


class CupyLauncher:
    """Launches on one CUDA device; every kernel is a module of its own, compiled when first used."""

    def __init__(self, device: int) -> None:
        self._cupy = import_cupy()
        self._device = self._cupy.cuda.Device(device)
        self._functions: dict[Kernel, Any] = {}
        self.num_multiprocessors = int(self._device.attributes["MultiProcessorCount"])

    def launch(
        self, kernel: Kernel, grid: int, params: "np.ndarray[Any, Any]", stream: int
    ) -> None:
        """Launch a kernel with its parameters by value on a stream, asynchronously."""
        with self._device:
            external = self._cupy.cuda.Stream.from_external(_Handle(stream))
            function = self._functions.get(kernel)
            if function is None:
                if external.is_capturing():
                    rule = "a call must run once before it is captured in a graph"
                    raise ArgumentError(
                        f"{rule}, so that its kernels are loaded, got {kernel.expression}"
                    )
                function = self._functions[kernel] = self._load(kernel)
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


def current_device() -> int:
    """The device that is current for CUDA, and so for every framework."""
    return int(import_cupy().cuda.runtime.getDevice())


def empty(like: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
    """Make an array by the framework of another, for work on a stream of a device.

    Its memory belongs to that stream: once freed it is not used again before the work is done. What
    NumPy lacks comes as bits.
    """
    if type(like).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        options = {"dtype": getattr(torch, dtype), "device": like.device}
        if stream == int(torch.cuda.current_stream(device).cuda_stream):
            return torch.empty(shape, **options)
        # torch knows the legacy default stream, whose handle is 0 or 1, by 0 only.
        handle = 0 if stream == _LEGACY_STREAM else stream
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device)):
            return torch.empty(shape, **options)
    kind = {"bfloat16": "uint16"}.get(dtype, dtype)
    assert kind in {"uint16", "uint8"} or kind in ITEMSIZE
    cupy = import_cupy()
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Handle(stream)):
        return cupy.empty(shape, kind)


def to_host(array: Any) -> "np.ndarray[Any, Any]":
    """Copy an array to the host, when its framework's current stream has got there."""
    if type(array).__module__.partition(".")[0] == "torch":
        return np.asarray(array.cpu())
    return np.asarray(import_cupy().asnumpy(import_cupy().asarray(array)))


def is_pinned(pointer: int) -> bool:
    """Whether an address of the host is pinned memory, which a GPU reaches."""
    runtime = import_cupy().cuda.runtime
    return bool(runtime.pointerGetAttributes(pointer).type == runtime.memoryTypeHost)
