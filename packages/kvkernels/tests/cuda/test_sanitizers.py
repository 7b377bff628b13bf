"""The kernels under the address and the undefined-behaviour sanitizer, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .host_gpu import HostGPU

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


def _runtime(name: str) -> Path:
    command = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Path(found.strip())


def _run() -> subprocess.CompletedProcess[str]:
    libraries = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(library.is_absolute() for library in libraries):
        pytest.skip("needs the sanitizers of g++")
    environment = os.environ | {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "KVKERNELS_CUDA_FLAGS": FLAGS,
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.cuda.sanitized"]
    folder = Path(__file__).parents[2]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_no_access_out_of_bounds_and_no_undefined_behaviour(gpu: HostGPU) -> None:
    del gpu  # it skips where there is no compiler
    done = _run()
    assert done.stdout == "clean\n", done.stderr[-3000:]
