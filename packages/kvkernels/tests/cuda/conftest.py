"""The GPU of the tests: one made of fibers, where there is a compiler, or with KVKERNELS_GPU=1 this machine's."""

import os
import platform
from collections.abc import Iterator

import pytest

from .device_gpu import DeviceGPU
from .host_gpu import HostGPU, compiler, place_arrays


@pytest.fixture(scope="session")
def gpu() -> Iterator[HostGPU]:
    """The fiber GPU, with the order of its threads shuffled; or a real one, whose absence is a failure."""
    if os.environ.get("KVKERNELS_GPU") == "1":
        device = DeviceGPU.of_this_machine()
        before = place_arrays(device.address_of)
        yield device
        place_arrays(before)
        return
    if compiler() is None:
        pytest.skip("the kernels run on a CPU only where there is g++")
    if platform.machine() not in {"x86_64", "AMD64"}:
        pytest.skip(f"fibers are switched on x86-64 only, not on {platform.machine()}")
    yield HostGPU(seed=1)
