"""The tests' way to a GPU, with memory of its own on the host and fibers as the device."""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvkernels.cuda import cache, launch
from kvkernels.errors import ArrayError

from .cases import Array, Case, on_device
from .device_gpu import DeviceGPU
from .host_gpu import HostGPU, place_arrays


class HostMemory:
    """Memory of a device that is not where the arrays are."""

    def allocate(self, num_bytes: int) -> tuple[Any, int]:
        kept: Array = np.full(num_bytes + 256, 0xAB, np.uint8)
        return kept, kept.ctypes.data + -kept.ctypes.data % 256

    def upload(self, address: int, host: int, num_bytes: int) -> None:
        ctypes.memmove(address, host, num_bytes)

    def download(self, host: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(host, address, num_bytes)


@pytest.fixture
def device(gpu: HostGPU) -> Iterator[DeviceGPU]:
    if isinstance(gpu, DeviceGPU):
        pytest.skip("the tests run on a GPU already")
    made = DeviceGPU(gpu, HostMemory())
    before = place_arrays(made.address_of)
    yield made
    place_arrays(before)


def test_a_batch_is_attended_in_the_memory_of_the_device(device: DeviceGPU) -> None:
    for case in (Case([40, 0, 17]), Case([40, 30], [20, 1])):
        case.check(device)
    assert "plan_batch" in device.launches


def test_what_lies_around_a_view_is_on_the_device_and_comes_back(device: DeviceGPU) -> None:
    pools = np.random.default_rng(0).standard_normal((2, 4, 2, 4, 8)).astype(np.float32)
    expected = pools.copy()
    expected[:, 3, :, :2] = expected[:, 1, :, :2]
    views = [on_device("cache", pool) for pool in pools]
    assert views[1].pointer - views[0].pointer == pools[0].nbytes
    assert views[0].pointer % 256 == pools.ctypes.data % 256
    assert views[0].pointer != pools.ctypes.data
    cache.copy_blocks(views, views, np.array([[1, 3, 2]], np.int32), device, 0)
    assert np.array_equal(pools, expected)


def test_a_machine_without_cupy_fails_and_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    launch.launcher_of.cache_clear()
    with pytest.raises(ArrayError, match="need CuPy"):
        DeviceGPU.of_this_machine()
