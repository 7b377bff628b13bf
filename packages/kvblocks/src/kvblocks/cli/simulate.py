"""`kvblocks simulate`: what a trace of requests would hit in caches of several sizes and policies.

Knows the options and how to show outcomes. The replays are in `kvblocks.simulate`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from textwrap import indent
from typing import Any

from kvblocks.cli.parser import (
    Subparsers,
    listed,
    page_path,
    refuse_as_page,
    terminal_width,
    typed,
    write_page,
)
from kvblocks.cli.progress import ProgressLine
from kvblocks.cli.tables import render_table
from kvblocks.cli.waste import add_waste_options, refuse_waste_options, run_waste
from kvblocks.errors import InvalidTrace, InvalidUsage
from kvblocks.report.simulation import simulation_page
from kvblocks.simulate import LruCurve, Outcome, Service, Simulation
from kvblocks.traces import AUTO, FORMATS, Trace, read_trace
from kvblocks.units import parse_count

_NUM_ROWS_NAMED = 5
_SHARE_OF_CEILING = 0.95

_FORMATS_HELP = "\n".join(
    f"  {found.name:9} {found.about}\n{indent(found.example.rstrip(), ' ' * 12)}"
    for found in FORMATS.values()
)


def add_parser(commands: "Subparsers[Any]") -> None:
    """Add `simulate`."""
    parser = commands.add_parser(
        "simulate",
        help="what a trace of requests would hit",
        description="Replay a trace against caches of several sizes and policies.",
        epilog=f"Formats:\n{_FORMATS_HELP}\n\nExample:\n  kvblocks simulate trace.jsonl "
        "--capacity 1000,10000 --policy lru,fifo,belady --measure-last 0.5\n"
        "  kvblocks simulate --waste --capacity 1024 --seed 1",
    )
    parser.add_argument("trace", nargs="*", metavar="TRACE", help="a file or a folder, gzip or not")
    parser.add_argument(
        "--format", choices=[AUTO, *FORMATS], default=AUTO, help="default: told by the file"
    )
    parser.add_argument(
        "--block-size", type=typed(parse_count), metavar="N", help="tokens a block, if not told"
    )
    parser.add_argument(
        "--capacity", type=listed(parse_count), metavar="N,N,...", help="blocks in the pool"
    )
    parser.add_argument(
        "--policy",
        type=lambda text: text.split(","),
        default=["lru"],
        metavar="NAME,...",
        help="lru (the default), fifo, slru, lfu, span, belady, or any other policy of kvblocks",
    )
    parser.add_argument(
        "--measure-last",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the requests; those before only fill the cache (default: 1.0, all)",
    )
    semantics = parser.add_argument_group("what a hit is")
    semantics.add_argument(
        "--semantics",
        choices=("index", "engine"),
        default="index",
        help="the prefix index alone (the default), or the real block manager",
    )
    semantics.add_argument(
        "--outputs",
        choices=("hold", "ignore"),
        default="ignore",
        help="engine: whether generated tokens take blocks (default: ignore)",
    )
    semantics.add_argument(
        "--arrivals",
        choices=("sequential", "timestamps"),
        default="sequential",
        help="engine: one request at a time (the default), or overlapping as they came",
    )
    semantics.add_argument(
        "--prefill-rate", type=float, metavar="N", help="timestamps: prompt tokens a second"
    )
    semantics.add_argument(
        "--decode-rate", type=float, metavar="N", help="timestamps: generated tokens a second"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html",
        type=page_path,
        metavar="FILE",
        help="also write a report with charts, in one file",
    )
    add_waste_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what was hit, or with `--waste`, what memory held."""
    refuse_as_page(options.html, options.trace)
    if options.waste:
        # The blocks that memory is paged in have nothing to do with those of the trace.
        run_waste(options, _read(options, None) if options.trace else None)
        return
    refuse_waste_options(options)
    if not options.trace:
        raise InvalidUsage("a TRACE is needed: a file, or with --waste none")
    if options.outputs == "hold" and options.semantics == "index":
        print("kvblocks: warning: no outputs are held in index semantics", file=sys.stderr)
    with ProgressLine() as progress:
        trace = _read(options, options.block_size)
        simulation = Simulation(
            trace, measure_last=options.measure_last, block_size=options.block_size
        )
        curve = None
        if trace.has_content:
            progress.begin("lru curve", len(trace.requests))
            curve = simulation.curve(progress)
        outcomes = _outcomes(options, simulation, curve, progress)
    if options.html:
        page = simulation_page(", ".join(options.trace), simulation, outcomes)
        write_page(options.html, page)
    if options.json:
        print(json.dumps(_as_json(simulation, curve, outcomes), indent=2))
    else:
        _show(options, simulation, curve, outcomes)


def _read(options: argparse.Namespace, block_size: int | None) -> Trace:
    """The trace; what was left out is named, the first few rows one by one, and what looks wrong."""
    trace = read_trace(*options.trace, format=options.format, block_size=block_size)
    for row in trace.malformed[:_NUM_ROWS_NAMED]:
        print(f"kvblocks: left out {row}", file=sys.stderr)
    if trace.malformed:
        number, read = len(trace.malformed), len(trace.requests)
        print(f"kvblocks: {number:,} malformed rows left out, {read:,} read", file=sys.stderr)
    for warning in trace.warnings:
        print(f"kvblocks: warning: {warning}", file=sys.stderr)
    return trace


def _outcomes(
    options: argparse.Namespace,
    simulation: Simulation,
    curve: LruCurve | None,
    progress: ProgressLine,
) -> list[Outcome]:
    capacities = options.capacity
    if capacities is None:
        if curve is None:
            raise InvalidTrace("a trace of lengths only needs a --capacity")
        if not curve.num_distinct_blocks:
            raise InvalidTrace(
                f"no prompt fills a block of {simulation.block_size} tokens: "
                "nothing can be found at any capacity"
            )
        capacities = round_capacities(curve.num_distinct_blocks)
    service = _service(options)
    found = []
    for policy in options.policy:
        for capacity in capacities:
            progress.begin(f"{policy}, {capacity:,} blocks", len(simulation.trace.requests))
            if options.semantics == "index":
                found.append(simulation.index(policy, capacity, progress))
            else:
                found.append(
                    simulation.engine(
                        policy,
                        capacity,
                        holds_outputs=options.outputs == "hold",
                        service=service,
                        progress=progress,
                    )
                )
    return found


def _service(options: argparse.Namespace) -> Service | None:
    rates = {name: rate for name in Service._fields if (rate := getattr(options, name)) is not None}
    if options.arrivals == "sequential":
        if rates:
            raise InvalidTrace("rates are for requests that overlap: --arrivals timestamps")
        return None
    if options.semantics == "index":
        raise InvalidTrace("requests overlap in an engine: --arrivals needs --semantics engine")
    return Service(**rates)


def round_capacities(num_distinct: int) -> list[int]:
    """1, 2, 5, 10, ... up to all distinct blocks, over three powers of ten.

    >>> round_capacities(1200)
    [2, 5, 10, 20, 50, 100, 200, 500, 1000, 1200]
    """
    series = [digit * 10**power for power in range(len(str(num_distinct))) for digit in (1, 2, 5)]
    chosen = [size for size in series if num_distinct <= 1000 * size < 1000 * num_distinct]
    return [*chosen, num_distinct]


def _as_json(
    simulation: Simulation, curve: LruCurve | None, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    trace = simulation.trace
    return {
        "trace": {
            "format": trace.format,
            "requests": len(trace.requests),
            "first_measured_request": simulation.window.first,
            "block_size": simulation.block_size,
            "input_tokens": sum(request.num_input_tokens for request in trace.requests),
            "output_tokens": sum(request.num_output_tokens for request in trace.requests),
            "malformed_rows": [row._asdict() for row in trace.malformed],
            "warnings": trace.warnings,
        },
        "results": [outcome.as_json() for outcome in outcomes],
        "ceiling": None
        if curve is None
        else {
            "semantics": "index",
            "distinct_blocks": curve.num_distinct_blocks,
            "hit_blocks": curve.ceiling_blocks,
            "total_blocks": curve.total_blocks,
            "hit_tokens": curve.ceiling_tokens,
            "total_tokens": curve.total_tokens,
            "requests_found_whole": curve.num_whole_requests,
            "blocks_for_95_percent": curve.capacity_for(_SHARE_OF_CEILING),
        },
    }


def _show(
    options: argparse.Namespace,
    simulation: Simulation,
    curve: LruCurve | None,
    outcomes: Sequence[Outcome],
) -> None:
    trace, first = simulation.trace, simulation.window.first
    requests = f"{len(trace.requests):,} requests"
    if first:
        requests += f", measured from request {first + 1:,} on"
    print(f"trace    {', '.join(options.trace)} ({trace.format}): {requests}")
    if curve is not None:
        share = curve.ceiling_tokens / curve.total_tokens
        print(
            f"blocks   of {simulation.block_size} tokens, {curve.num_distinct_blocks:,} distinct\n"
            f"ceiling  {100 * share:.3f} % of the tokens are found by a cache that never evicts "
            f"(index)\n         lru needs {curve.capacity_for(_SHARE_OF_CEILING):,} blocks for "
            f"95 % of that"
        )
    print()
    headers = [
        "policy",
        "semantics",
        "capacity",
        "hit rate",
        "hit blocks",
        "of",
        "hit tokens",
        "of",
    ]
    print(render_table([*headers, "evictions"], list(map(_row, outcomes)), terminal_width()))
    refused = max((outcome.refused_requests for outcome in outcomes), default=0)
    if refused:
        print(f"\n{refused:,} measured requests do not fit the smallest pool, and are not served")
    loads = [
        [f"{outcome.capacity:,}", *_load_cells(outcome)] for outcome in outcomes if outcome.load
    ]
    if loads:
        headers = ["capacity", "requests at once", "blocks held", "waited", "mean wait", "longest"]
        print(f"\n{render_table(headers, loads, terminal_width())}")


def _row(outcome: Outcome) -> list[str]:
    return [
        outcome.policy,
        outcome.semantics,
        f"{outcome.capacity:,}",
        f"{100 * outcome.hit_rate:.3f} %",
        f"{outcome.hit_blocks:,}",
        f"{outcome.total_blocks:,}",
        f"{outcome.hit_tokens:,}",
        f"{outcome.total_tokens:,}",
        f"{outcome.evictions:,}",
    ]


def _load_cells(outcome: Outcome) -> list[str]:
    load = outcome.load
    assert load is not None, "the caller has looked"
    return [
        f"{load.peak_running_requests:,}",
        f"{load.peak_held_blocks:,}",
        f"{load.num_waited:,}",
        f"{load.mean_wait_seconds:.2f} s",
        f"{load.longest_wait_seconds:.2f} s",
    ]
