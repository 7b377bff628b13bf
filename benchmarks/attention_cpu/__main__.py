"""The command line: `nox -s bench -- attention-cpu` measures decode attention as a share of a read.

Each row is one pool of random blocks, and its rounds alternate between a read in one line, a read of the
same blocks in the same order, attention, and torch where it is asked. Medians are shown. The pools, the
reads and the clock are those of `kvkernels bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvkernels
from benchmarks.environment import system
from kvkernels.bandwidth import Pool, Reading, Shape, measure
from kvkernels.cpu.vectors import WIDTH

BLOCK_SIZES = (8, 16, 32, 64, 128)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = (*TORCH, "float8_e4m3", "int8")


def torch_calls(pool: Pool) -> dict[str, Callable[[int], object]]:
    """SDPA on keys and values that lie one after another already, and after a gather."""
    shape, kind = pool.shape, TORCH[pool.shape.dtype]
    torch.set_num_threads(kvkernels.get_num_threads())
    q = torch.from_numpy(pool.q).to(kind)[:, :, None]
    caches = [torch.from_numpy(c).view(kind) for c in (pool.keys, pool.values)]
    sizes = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)

    def gather(n: int) -> list[torch.Tensor]:
        blocks = torch.from_numpy(pool.tables[n % 2]).long()
        return [c[blocks].transpose(1, 2).reshape(sizes) for c in caches]

    ready = gather(0)

    def attend(arrays: list[torch.Tensor]) -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, *arrays, enable_gqa=True)

    return {
        "sdpa_contiguous": lambda _: attend(ready),
        "gather_and_sdpa": lambda n: attend(gather(n)),
    }


def _cases(*, quick: bool) -> list[tuple[Shape, bool]]:
    """(what is computed, whether torch stands beside it)."""
    if quick:
        return [(Shape(dtype=dtype), False) for dtype in ("float32", "bfloat16")]
    dtypes = [(Shape(dtype=dtype), dtype in TORCH) for dtype in DTYPES]
    sizes = [
        (Shape(dtype=dtype, block_size=size), False)
        for dtype in TORCH
        for size in BLOCK_SIZES
        if size != 16
    ]
    # Without torch in between, which leaves nothing of a call in the processor's caches.
    single = [(Shape(dtype=dtype, batch=1, context=512), False) for dtype in TORCH]
    return [*dtypes, *sizes, *single]


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": system(),
        "processor": models[0] if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "floats_in_a_vector": WIDTH,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": sys.version.split()[0],
    }


def _share(reading: Reading, name: str) -> str:
    shares = f"{reading.fraction_of(name):.2f}, {reading.least_fraction_of(name):.2f}"
    return f"{shares} ({reading.gb_per_s(name):.1f})"


def _table(readings: list[Reading]) -> str:
    lines = [
        (
            "| dtype | block | batch x context | threads | us | over the read, us | GB/s "
            "| of same-order read: median, of least times (GB/s) "
            "| of linear read: median, of least times (GB/s) | tail waste | x SDPA "
            "| x gather + SDPA |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for reading in readings:
        shape, seconds = reading.shape, reading.seconds
        beside = [
            f"{reading.fraction_of(name):.1f}" if name in seconds else ""
            for name in ("sdpa_contiguous", "gather_and_sdpa")
        ]
        cells = [
            shape.dtype,
            str(shape.block_size),
            f"{shape.batch} x {shape.context}",
            str(reading.num_threads),
            f"{seconds['attend'] * 1e6:.0f}",
            f"{(seconds['attend'] - seconds['in_order']) * 1e6:.0f}",
            f"{reading.gb_per_s():.1f}",
            _share(reading, "in_order"),
            _share(reading, "linear"),
            f"{reading.tail_waste:.2%}",
            *beside,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure, show, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="nox -s bench -- attention-cpu",
        description="Measure decode attention as a share of what memory can be read at.",
        epilog="example: nox -s bench -- attention-cpu --threads 1,2 --rounds 9",
    )
    parser.add_argument("--quick", action="store_true", help="two rows for each number of threads")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: 7)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    arguments = parser.parse_args()
    readings = []
    for shape, with_torch in _cases(quick=arguments.quick):
        pool = Pool(shape)
        for num_threads in map(int, arguments.threads.split(",")):
            kvkernels.set_num_threads(num_threads)
            others = torch_calls(pool) if with_torch else {}
            # Short calls, and those that torch does not slow down, have more rounds.
            more = 20 if shape.batch == 1 else 1 if with_torch else 3
            rounds = more * arguments.rounds
            readings.append(measure(pool, rounds, others))
            sys.stderr.write(f"{shape.dtype} block {shape.block_size} threads {num_threads}\n")
    sys.stdout.write(_table(readings) + "\n")
    if arguments.json:
        told = {
            "benchmark": "attention-cpu",
            "machine": _machine(),
            "versions": {
                n: version(n) for n in ("kvkernels", "numba", "llvmlite", "numpy", "torch")
            },
            "command": " ".join(["nox -s bench -- attention-cpu", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": [reading.as_json() for reading in readings],
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
