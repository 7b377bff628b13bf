"""A GPU made of fibers, where there is a compiler for it."""

import platform
from importlib.util import find_spec
from pathlib import Path

import pytest

from .host_gpu import HostGPU, compiler

# Those whose cases torch makes are left out where it is not installed.
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if find_spec("torch") is None and "from .cases import" in path.read_text("utf-8")
]


@pytest.fixture(scope="session")
def gpu() -> HostGPU:
    """The fiber GPU, with the order of its threads shuffled."""
    if compiler() is None:
        pytest.skip("the kernels run on a CPU only where there is g++")
    if platform.machine() not in {"x86_64", "AMD64"}:
        pytest.skip(f"fibers are switched on x86-64 only, not on {platform.machine()}")
    return HostGPU(seed=1)
