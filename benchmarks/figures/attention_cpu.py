"""Tables of attention on the CPU beside reading."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.tables import Figures, command, result, table


def _attention_cpu(*, batch: int, block_size: int | None = None) -> list[dict[str, Any]]:
    """The rows of steps of a batch, of one block size or of all."""
    return [
        row
        for row in result("attention-cpu")["rows"]
        if row["batch"] == batch and block_size in {None, row["block_size"]}
    ]


def attention_cpu_shares() -> str:
    """Decode attention as a share of what the memory can be read at."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            *(
                f"{row[name]:.2f} ({row[f'{name}_least']:.2f})"
                for name in ("fraction_of_in_order", "fraction_of_linear")
            ),
            f"{row['attention_gb_per_s']:.1f} GB/s",
        ]
        for row in _attention_cpu(batch=8, block_size=16)
    ]
    head = ["cache", "threads", "of a same-order read", "of a linear read", "attention"]
    return table(head, rows)


def attention_cpu_blocks() -> str:
    """The same for each block size, on one thread, beside the slots that stay empty."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in _attention_cpu(batch=8):
        if row["num_threads"] == 1:
            found.setdefault(row["block_size"], {})[row["dtype"]] = row
    dtypes = ["float32", "bfloat16", "float16"]
    rows = [
        [
            str(size),
            *(
                f"{by_dtype[dtype]['fraction_of_in_order']:.2f}, "
                f"{by_dtype[dtype]['fraction_of_linear']:.2f}"
                for dtype in dtypes
            ),
            f"{by_dtype['float32']['tail_waste']:.2%}",
        ]
        for size, by_dtype in sorted(found.items())
    ]
    return table(["block", *dtypes, "tail waste"], rows)


def attention_cpu_beside() -> str:
    """How many times as long torch takes, with keys that are contiguous already and after a gather."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            *(f"{row[f'times_{name}']:.1f}x" for name in ("sdpa_contiguous", "gather_and_sdpa")),
        ]
        for row in _attention_cpu(batch=8, block_size=16)
        if "times_sdpa_contiguous" in row
    ]
    return table(["dtype", "threads", "SDPA", "gather + SDPA"], rows)


def attention_cpu_single() -> str:
    """What a call costs beyond the read, for one sequence of 512 tokens."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            f"{row['microseconds_least']:.0f}",
            f"{row['microseconds_in_order_least']:.0f}",
            f"{row['microseconds_least'] - row['microseconds_in_order_least']:.0f}",
            f"{row['microseconds']:.0f}",
        ]
        for row in _attention_cpu(batch=1)
    ]
    head = ["dtype", "threads", "least, microseconds", "same-order read", "more", "median"]
    return table(head, rows)


def speed_by_block_size() -> dict[str, dict[int, float]]:
    """How fast decode attention reads blocks of each size, as a share of a linear read, by dtype."""
    speeds: dict[str, dict[int, float]] = {}
    for row in result("attention-cpu")["rows"]:
        if (row["batch"], row["context"], row["num_threads"]) == (8, 4096, 1):
            of_dtype = speeds.setdefault(row["dtype"], {})
            of_dtype[row["block_size"]] = row["fraction_of_linear"]
    return {dtype: of_dtype for dtype, of_dtype in speeds.items() if len(of_dtype) > 1}


def attention_cpu_block_sizes() -> str:
    """The same as a table."""
    speeds = speed_by_block_size()
    sizes = sorted({size for of_dtype in speeds.values() for size in of_dtype})
    rows = [
        [dtype, *(f"{of_dtype[size]:.2f}" for size in sizes)] for dtype, of_dtype in speeds.items()
    ]
    return table(["block size", *map(str, sizes)], rows)


FIGURES: Figures = {
    "attention-cpu/shares": attention_cpu_shares,
    "attention-cpu/block-sizes": attention_cpu_block_sizes,
    "attention-cpu/beside": attention_cpu_beside,
    "attention-cpu/blocks": attention_cpu_blocks,
    "attention-cpu/single": attention_cpu_single,
    "attention-cpu/command": command("attention-cpu"),
}
