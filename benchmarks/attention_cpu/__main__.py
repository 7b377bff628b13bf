"""The command line: `nox -s bench -- attention-cpu` measures decode attention as a share of a read.

Each row is one pool of random blocks, and its rounds alternate between a read in one line, a read of the
same blocks in the same order, attention, and torch where it is asked. Medians are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvkernels
from benchmarks.attention_cpu import probe
from kvkernels.cpu import threads
from kvkernels.cpu.vectors import WIDTH

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BATCH, CONTEXT = 8, 4096
BLOCK_SIZES = (8, 16, 32, 64, 128)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
BITS |= {"float8_e4m3": np.uint8, "int8": np.int8}


class Pool:
    """Caches of one dtype and block size, four times what a call reads, and random blocks."""

    def __init__(self, dtype: str, block_size: int, batch: int, context: int) -> None:
        rng = np.random.default_rng(0)
        per_sequence = context // block_size
        num_blocks = 2 * batch * per_sequence
        shape = (num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM)
        self.dtype, self.batch, self.context = dtype, batch, context
        # Small integers: normal numbers in every dtype, and none that slows arithmetic.
        self.keys, self.values = (np.empty(shape, BITS[dtype]) for _ in "kv")
        for cache in (self.keys, self.values):
            cache[...] = 0x3C00 if dtype == "bfloat16" else 1
        order = rng.permutation(num_blocks).astype(np.int32)
        self.tables = [
            order[n * batch * per_sequence :][: batch * per_sequence].reshape(batch, -1)
            for n in range(2)
        ]
        self.lengths = np.full(batch, context, np.int32)
        self.q = rng.standard_normal((batch, NUM_HEADS, HEAD_DIM), dtype=np.float32)
        self.out = np.empty_like(self.q)
        self.kv_dtype = dtype if dtype in {"bfloat16", "float8_e4m3"} else None
        self.num_bytes = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * self.keys.itemsize
        self.run_bytes = block_size * HEAD_DIM * self.keys.itemsize

    def attend(self, n: int) -> None:
        """Compute what is measured."""
        arrays = (self.q, self.keys, self.values, self.tables[n % 2], self.lengths)
        kvkernels.paged_attention(*arrays, kv_dtype=self.kv_dtype, out=self.out)

    def read_in_order(self, n: int) -> None:
        """Read the same blocks in the same order."""
        block_bytes = self.run_bytes * NUM_KV_HEADS
        addresses = (self.keys.ctypes.data, self.values.ctypes.data, self.tables[n % 2])
        arguments = (*addresses, block_bytes, self.run_bytes, np.zeros(1, np.int64))
        threads.run(probe.in_order, arguments, kvkernels.get_num_threads())

    def read_in_line(self, n: int) -> None:
        """Read as much of one cache as it has, from the start on."""
        cache = (self.keys, self.values)[n % 2]
        size = min(cache.nbytes, self.num_bytes)
        arguments = (cache.ctypes.data, size, 16, np.zeros(1, np.int64))
        threads.run(probe.linear, arguments, kvkernels.get_num_threads())

    def torch_calls(self) -> dict[str, Callable[[int], None]]:
        """SDPA on keys and values that lie one after another already, and after a gather."""
        kind = TORCH[self.dtype]
        q = torch.from_numpy(self.q).to(kind)[:, :, None]
        caches = [torch.from_numpy(c).view(kind) for c in (self.keys, self.values)]

        def gather(n: int) -> list[torch.Tensor]:
            blocks = torch.from_numpy(self.tables[n % 2]).long()
            shape = (self.batch, NUM_KV_HEADS, self.context, HEAD_DIM)
            return [c[blocks].transpose(1, 2).reshape(shape) for c in caches]

        ready = gather(0)

        def attend(arrays: list[torch.Tensor]) -> None:
            torch.nn.functional.scaled_dot_product_attention(q, *arrays, enable_gqa=True)

        return {
            "sdpa_contiguous": lambda _: attend(ready),
            "gather_and_sdpa": lambda n: attend(gather(n)),
        }


def measure(calls: dict[str, Callable[[int], None]], rounds: int) -> dict[str, float]:
    """The median seconds of each call; rounds alternate, and the first of each is thrown away.

    One thread's time is its processor time, which other processes do not lengthen.
    """
    clock = time.thread_time if kvkernels.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call(n)
            if n:
                seconds[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def row_of(pool: Pool, block_size: int, rounds: int, *, with_torch: bool) -> dict[str, Any]:
    """One row of the report."""
    num_threads = kvkernels.get_num_threads()
    torch.set_num_threads(num_threads)
    calls = {"linear": pool.read_in_line, "in_order": pool.read_in_order, "attend": pool.attend}
    if with_torch:
        calls |= pool.torch_calls()
    times = measure(calls, rounds)
    line_bytes = min(pool.keys.nbytes, pool.num_bytes)
    speeds = {
        "in_order": pool.num_bytes / times["in_order"],
        "linear": line_bytes / times["linear"],
    }
    speed = pool.num_bytes / times["attend"]
    row = {
        "dtype": pool.dtype,
        "block_size": block_size,
        "batch": pool.batch,
        "context": pool.context,
        "num_threads": num_threads,
        "attention_gb_per_s": speed / 1e9,
        "in_order_gb_per_s": speeds["in_order"] / 1e9,
        "linear_gb_per_s": speeds["linear"] / 1e9,
        "fraction_of_in_order": speed / speeds["in_order"],
        "fraction_of_linear": speed / speeds["linear"],
        # Half a block of each sequence stays empty on average.
        "tail_waste": (block_size - 1) / 2 / pool.context,
        "microseconds": times["attend"] * 1e6,
        "microseconds_in_order": times["in_order"] * 1e6,
    }
    for name in set(times) - set(speeds) - {"attend"}:
        row[f"times_{name}"] = times[name] / times["attend"]
    return row


def _cases(*, quick: bool) -> list[tuple[str, int, int, int, bool]]:
    """(dtype, block_size, batch, context, beside torch)."""
    if quick:
        return [("float32", 16, BATCH, CONTEXT, False), ("bfloat16", 16, BATCH, CONTEXT, False)]
    dtypes = [(dtype, 16, BATCH, CONTEXT, dtype in TORCH) for dtype in BITS]
    sizes = [
        (dtype, size, BATCH, CONTEXT, False)
        for dtype in ("float32", "bfloat16")
        for size in BLOCK_SIZES
        if size != 16
    ]
    return [*dtypes, *sizes, ("float32", 16, 1, 512, False), ("bfloat16", 16, 1, 512, False)]


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": models[0] if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "floats_in_a_vector": WIDTH,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": sys.version.split()[0],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| dtype | block | batch x context | threads | GB/s | of same-order read (GB/s) "
            "| of linear read (GB/s) | tail waste | x SDPA | x gather + SDPA |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside = [row.get(f"times_{name}") for name in ("sdpa_contiguous", "gather_and_sdpa")]
        cells = [
            row["dtype"],
            str(row["block_size"]),
            f"{row['batch']} x {row['context']}",
            str(row["num_threads"]),
            f"{row['attention_gb_per_s']:.1f}",
            f"{row['fraction_of_in_order']:.2f} ({row['in_order_gb_per_s']:.1f})",
            f"{row['fraction_of_linear']:.2f} ({row['linear_gb_per_s']:.1f})",
            f"{row['tail_waste']:.2%}",
            *("" if ratio is None else f"{ratio:.1f}" for ratio in beside),
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
    rows = []
    for dtype, block_size, batch, context, with_torch in _cases(quick=arguments.quick):
        pool = Pool(dtype, block_size, batch, context)
        for num_threads in map(int, arguments.threads.split(",")):
            kvkernels.set_num_threads(num_threads)
            row = row_of(pool, block_size, arguments.rounds, with_torch=with_torch)
            rows.append(row)
            sys.stderr.write(f"{dtype} block {block_size} threads {num_threads}\n")
    sys.stdout.write(_table(rows) + "\n")
    if arguments.json:
        told = {
            "benchmark": "attention-cpu",
            "machine": _machine(),
            "versions": {
                n: version(n) for n in ("kvkernels", "numba", "llvmlite", "numpy", "torch")
            },
            "command": " ".join(["nox -s bench -- attention-cpu", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_heads": NUM_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
