"""The kernels under the address and the undefined-behaviour sanitizer, in a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkernels.cuda import source

from .host_gpu import HostGPU

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


def _runtime(name: str) -> Path:
    command = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Path(found.strip())


def _run(sources: Path) -> subprocess.CompletedProcess[str]:
    libraries = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(library.is_absolute() for library in libraries):
        pytest.skip("needs the sanitizers of g++")
    environment = os.environ | {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "KVKERNELS_CUDA_FLAGS": FLAGS,
        "KVKERNELS_CUDA_SOURCES": str(sources),
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
    done = _run(source.FOLDER)
    assert done.stdout == "clean\n", done.stderr[-3000:]


def test_a_table_read_past_its_end_is_found(gpu: HostGPU, tmp_path: Path) -> None:
    del gpu
    sources = tmp_path / "source"
    shutil.copytree(source.FOLDER, sources, ignore=shutil.ignore_patterns("*.py"))
    good = "return {table[index], token - index * block_size};"
    bad = "return {table[index] ^ (table[index + 16] == 12345), token - index * block_size};"
    text = (sources / "split.cuh").read_text("utf-8")
    assert good in text
    (sources / "split.cuh").write_text(text.replace(good, bad), "utf-8")
    assert "AddressSanitizer" in _run(sources).stderr
