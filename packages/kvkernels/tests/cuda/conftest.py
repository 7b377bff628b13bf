"""A GPU made of fibers, where there is a compiler for it."""

import platform

import pytest

from .host_gpu import HostGPU, compiler


@pytest.fixture(scope="session")
def gpu() -> HostGPU:
    """The fiber GPU, with the order of its threads shuffled."""
    if compiler() is None:
        pytest.skip("the kernels run on a CPU only where there is g++")
    if platform.machine() not in {"x86_64", "AMD64"}:
        pytest.skip(f"fibers are switched on x86-64 only, not on {platform.machine()}")
    return HostGPU(seed=1)
