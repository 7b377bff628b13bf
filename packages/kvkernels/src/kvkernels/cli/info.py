"""`kvkernels info`: versions, the processor, threads, what is compiled, and whether there is a GPU."""

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvkernels._version import __version__
from kvkernels.cli.parser import Parser, Subparsers
from kvkernels.cuda import launch

_PACKAGES = ("numpy", "numba", "llvmlite", "cupy-cuda12x", "cupy-cuda13x")


def add_parser(commands: "Subparsers[Parser]") -> None:
    """Add `info`."""
    parser = commands.add_parser(
        "info",
        help="versions, the processor, threads, compiled code, GPU",
        description=(
            "Say what the kernels run on and with: what a report of a problem needs.\n"
            "Compiled code is listed from where this process keeps it; NUMBA_CACHE_DIR moves it."
        ),
        epilog="Example:\n  kvkernels info --json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what is known."""
    found = gather()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    pairs = [
        ("kvkernels", found["kvkernels"]),
        ("python", found["python"]),
        *found["packages"].items(),
        ("system", found["system"]),
        ("processor", found["processor"]),
        ("processors", f"{found['num_processors']} for this process"),
        ("threads", f"{found['num_threads']} (KVKERNELS_NUM_THREADS, OMP_NUM_THREADS)"),
        ("vectors", f"{found['vector_floats']} float32, {found['vector_bits']} bits"),
        ("GPU", found["gpu"] or "CUDA is available"),
        ("compiled code", _summary(found)),
    ]
    label = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name.ljust(label)}  {value}")
    for kernel in found["compiled"]:
        print(f"  {kernel['written']}  {kernel['bytes'] / 1024:7.0f} KiB  {kernel['file']}")


def _summary(found: dict[str, Any]) -> str:
    folder = found["compiled_folder"]
    if folder is None:
        return "nothing is kept: no folder can be written to"
    size = sum(kernel["bytes"] for kernel in found["compiled"]) / 2**20
    others = found["num_compiled_by_other_versions"]
    return f"{len(found['compiled'])} kernels, {size:.1f} MiB, in {folder}" + (
        f" (and {others} of other versions)" if others else ""
    )


def gather() -> dict[str, Any]:
    """Return what is known, as JSON."""
    from kvkernels.cpu import threads, vectors, warm  # noqa: PLC0415  # importing Numba is slow

    folder, files, num_others = warm.cached()
    return {
        "kvkernels": __version__,
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version_of(name))},
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {warm.processor()}",
        "num_processors": threads.num_processors(),
        "num_threads": threads.get_num_threads(),
        "vector_floats": vectors.WIDTH,
        "vector_bits": 32 * vectors.WIDTH,
        "gpu": launch.why_no_gpu() or None,
        "compiled_folder": None if folder is None else os.fspath(folder),
        "num_compiled_by_other_versions": num_others,
        "compiled": [
            {
                "file": path.name,
                "bytes": path.stat().st_size,
                "written": datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime(
                    "%Y-%m-%d %H:%M"
                ),
            }
            for path in files
        ],
    }


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
