"""A GPU of this machine in the place of the fiber GPU: KVKERNELS_GPU=1 runs the same tests on it.

The tests keep their arrays in NumPy. Each one that a launch may reach has a mirror in the memory of the GPU:
before a launch all mirrors get what the arrays hold, and afterwards the arrays what the mirrors hold.
"""

from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kvkernels.cuda import launch
from kvkernels.cuda.arrays import import_cupy
from kvkernels.cuda.kernels import Kernel
from kvkernels.cuda.plan import Launcher

from .host_gpu import HostGPU

Array = np.ndarray[Any, Any]
# Mirrors are as far from multiples of this as their arrays, so that both are equally aligned.
_ALIGNMENT = 256


class Memory(Protocol):
    """Memory of a device."""

    def allocate(self, num_bytes: int) -> tuple[Any, int]:
        """Return what keeps the memory, and its address, a multiple of 256."""

    def upload(self, address: int, host: int, num_bytes: int) -> None:
        """Copy from the host."""

    def download(self, host: int, address: int, num_bytes: int) -> None:
        """Copy to the host, when all launches are done."""


class CupyMemory:
    """The memory of device 0, by CuPy."""

    def __init__(self) -> None:
        self._cuda = import_cupy().cuda

    def allocate(self, num_bytes: int) -> tuple[Any, int]:
        """Return what keeps the memory, and its address."""
        memory = self._cuda.alloc(num_bytes)
        return memory, memory.ptr

    def upload(self, address: int, host: int, num_bytes: int) -> None:
        """Copy from the host."""
        runtime = self._cuda.runtime
        runtime.memcpy(address, host, num_bytes, runtime.memcpyHostToDevice)

    def download(self, host: int, address: int, num_bytes: int) -> None:
        """Copy to the host; a fault of a launch is raised here."""
        runtime = self._cuda.runtime
        runtime.deviceSynchronize()
        runtime.memcpy(host, address, num_bytes, runtime.memcpyDeviceToHost)


class _Mirror:
    """The whole memory of an array on the device, with all that its views do not show."""

    def __init__(self, root: Array, memory: Memory) -> None:
        self.root = root
        self.begin, end = byte_bounds(root)
        self.num_bytes = end - self.begin
        skipped = self.begin % _ALIGNMENT
        self.kept, address = memory.allocate(skipped + self.num_bytes)
        self.address = address + skipped


class DeviceGPU(HostGPU):
    """Launches on a device what tests launch on fibers."""

    def __init__(self, launcher: Launcher, memory: Memory) -> None:
        super().__init__()
        self.num_multiprocessors = launcher.num_multiprocessors
        self._launcher, self._memory = launcher, memory
        self._mirrors: WeakValueDictionary[int, _Mirror] = WeakValueDictionary()

    @classmethod
    def of_this_machine(cls) -> "DeviceGPU":
        """Device 0; raises where there is none."""
        return cls(launch.launcher_of(0), CupyMemory())

    def address_of(self, array: Array) -> tuple[int, Any]:
        """Where an array lies on the device, and what keeps it there."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        mirror = self._mirrors.get(id(root))
        if mirror is None:
            mirror = self._mirrors[id(root)] = _Mirror(root, self._memory)
        return mirror.address + array.ctypes.data - mirror.begin, mirror

    def reseeded(self, seed: int) -> "DeviceGPU":
        """Return itself: a GPU has its own order of threads, each time."""
        del seed
        return self

    def launch(
        self, kernel: Kernel, grid: int, params: "np.ndarray[Any, Any]", stream: int
    ) -> None:
        """Launch, and wait until the arrays hold what it wrote."""
        self.launches.append(kernel.expression)
        mirrors = list(self._mirrors.values())
        for one in mirrors:
            self._memory.upload(one.address, one.begin, one.num_bytes)
        self._launcher.launch(kernel, grid, params, stream)
        for one in mirrors:
            self._memory.download(one.begin, one.address, one.num_bytes)
