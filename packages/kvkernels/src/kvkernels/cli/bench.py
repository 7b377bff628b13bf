"""`kvkernels bench`: how near attention comes to the speed at which this machine reads its memory."""

import argparse
import json
from typing import TYPE_CHECKING

from kvkernels.cli.info import gather
from kvkernels.cli.parser import Parser, Progress, Subparsers, listed, positive, render_table
from kvkernels.dtypes import ALIASES, BY_NAME

if TYPE_CHECKING:
    from kvkernels.bandwidth import Reading


def add_parser(commands: "Subparsers[Parser]") -> None:
    """Add `bench`."""
    parser = commands.add_parser(
        "bench",
        help="a table of bandwidths",
        description=(
            "Measure attention of one decode step (32 query heads, 8 KV heads, head dim 128) over\n"
            "blocks in random order, beside a read of the same blocks in the same order and a read\n"
            "in one line, in alternating rounds. Medians are shown, and in brackets shares of the\n"
            "least times. On one thread time is processor time. Compare within a run: machines\n"
            "change their speed."
        ),
        epilog="Example:\n  kvkernels bench --dtypes float32 --block-sizes 16,64 --threads 1",
    )
    parser.add_argument(
        "--dtypes",
        type=listed(_dtype),
        default=["float32", "bfloat16"],
        metavar="NAME,...",
        help=f"of caches: {', '.join(BY_NAME)} (default: float32,bfloat16)",
    )
    parser.add_argument(
        "--block-sizes", type=listed(positive), default=[16], metavar="N,...", help="default: 16"
    )
    parser.add_argument(
        "--threads", type=listed(positive), metavar="N,...", help="default: as many as calls use"
    )
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--context", type=positive, default=4096, metavar="N", help="default: 4096")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="default: 7")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _dtype(text: str) -> str:
    name = ALIASES.get(text, text)
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(BY_NAME)}, got {text!r}")
    return name


def run(options: argparse.Namespace) -> None:
    """Measure and show."""
    from kvkernels import bandwidth  # noqa: PLC0415  # importing Numba is slow
    from kvkernels.cpu import threads  # noqa: PLC0415  # likewise

    progress = Progress()
    before = threads.get_num_threads()
    counts = options.threads or [before]
    readings: list[Reading] = []
    cases = [(dtype, size) for dtype in options.dtypes for size in options.block_sizes]
    for dtype, block_size in cases:
        shape = bandwidth.Shape(
            dtype=dtype, block_size=block_size, batch=options.batch, context=options.context
        )
        try:
            pool = bandwidth.Pool(shape)
        except ValueError as error:  # NumPy's word for more than any memory
            raise MemoryError(str(error)) from error
        for count in counts:
            name = f"{dtype}, block {block_size}, threads {count}"
            progress(len(readings), len(cases) * len(counts), name)
            threads.set_num_threads(count)
            readings.append(bandwidth.measure(pool, options.rounds))
    progress(0, 0, "")
    threads.set_num_threads(before)
    if options.json:
        machine = {name: value for name, value in gather().items() if "compiled" not in name}
        rows = [reading.as_json() for reading in readings]
        print(json.dumps({"machine": machine, "rows": rows}, indent=2))
    else:
        print(render_table(_HEADERS, [_cells(reading) for reading in readings]))


_HEADERS = (
    *("dtype", "block", "batch x context", "threads", "GB/s", "of same-order read"),
    *("GB/s", "of linear read", "GB/s", "tail waste", "us"),
)


def _cells(reading: "Reading") -> list[str]:
    shape = reading.shape
    return [
        shape.dtype,
        str(shape.block_size),
        f"{shape.batch} x {shape.context}",
        str(reading.num_threads),
        f"{reading.gb_per_s():.1f}",
        f"{reading.fraction_of('in_order'):.2f} ({reading.least_fraction_of('in_order'):.2f})",
        f"{reading.gb_per_s('in_order'):.1f}",
        f"{reading.fraction_of('linear'):.2f} ({reading.least_fraction_of('linear'):.2f})",
        f"{reading.gb_per_s('linear'):.1f}",
        f"{reading.tail_waste:.2%}",
        f"{reading.seconds['attend'] * 1e6:.0f}",
    ]
