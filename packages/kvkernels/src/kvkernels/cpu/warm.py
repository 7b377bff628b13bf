"""Kernels compiled before they are needed. It knows which kernels there are, and not what they do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm

from kvkernels.cpu import attention, cache, merge, values, work
from kvkernels.cpu.compiled import PREPARE, SUFFIX, cache_folder, is_current
from kvkernels.dtypes import Dtype

# Importing them fills PREPARE.
_MODULES = (attention, cache, merge, values, work)


def jobs(dtypes: tuple[Dtype, ...]) -> list[tuple[str, Callable[[], object]]]:
    """Return what compiles or loads all that calls with caches of these dtypes need, by name."""
    moves = [
        (f"moves of {8 * size} bits", partial(cache.prepare, size))
        for size in sorted({dtype.bits.itemsize for dtype in dtypes})
    ]
    attend = [
        (f"attention over {dtype.name}", partial(attention.attend_for, dtype.kernel))
        for dtype in dtypes
    ]
    return [*PREPARE.items(), *moves, *attend]


def cached() -> tuple[Path | None, list[Path], int]:
    """Return the folder of compiled kernels, the files that this version loads, and how many others."""
    folder = cache_folder(attention.attend)
    files = [] if folder is None else sorted(folder.glob(f"kvkernels-*{SUFFIX}"))
    current = [path for path in files if is_current(path)]
    return folder, current, len(files) - len(current)


def processor() -> str:
    """Return for which processor kernels are compiled, as LLVM calls it."""
    return str(llvm.get_host_cpu_name())
