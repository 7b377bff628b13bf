"""`kvblocks simulate --waste`: how much of the memory holds tokens, paged and in one piece.

Knows the options and how to show shares. The experiment is in `kvblocks.waste`, what is compared in
`kvblocks.baselines`.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any, NamedTuple

from kvblocks.baselines import NAMES, make_baseline
from kvblocks.cli.parser import terminal_width, typed, write_page
from kvblocks.cli.progress import ProgressLine
from kvblocks.cli.tables import render_pairs, render_table, render_text
from kvblocks.contiguous import power_of_two
from kvblocks.errors import InvalidTrace, InvalidUsage
from kvblocks.report.waste import waste_page
from kvblocks.simulate import LENGTHS_BLOCK_SIZE
from kvblocks.sizing import require
from kvblocks.traces import Trace
from kvblocks.units import format_bytes, parse_bytes, parse_count
from kvblocks.waste import STATES, Lengths, Waste, measure_waste, sharegpt_like

_DEFAULT_STEPS = 10_000
_DEFAULT_GROWTH = 256
_SYNTHETIC_MAX_LENGTH = 2048
_NUM_LONGEST = 8  # as many of the longest requests as the default memory holds
_OF_HITS = (
    "policy",
    "measure_last",
    "semantics",
    "outputs",
    "arrivals",
    "prefill_rate",
    "decode_rate",
)
_OF_WASTE = ("baseline", "seed", "max_length", "steps", "growth", "bytes_per_token")
_ABOUT = (
    "Shares of the memory in per cent, while more requests wait than fit: slots that hold tokens; "
    "reserved, to be used later; over-allocated, asked for and never used; rounding, the rest of a "
    "chunk or block; external, free and enough for the next request, which was refused because no "
    "one piece does; idle, free and less than the next request asks for. At once: requests that run, "
    "on average. Not known here: time; a step of a larger batch takes longer, so these are no ratios "
    "of throughput."
)


def add_waste_options(parser: argparse.ArgumentParser) -> None:
    """Add `--waste` and what belongs to it, after the options that mean nothing beside it."""
    parser.set_defaults(of_hits={name: parser.get_default(name) for name in _OF_HITS})
    count = typed(parse_count)
    group = parser.add_argument_group(
        "waste", "how much of the memory holds tokens, of a trace or of ShareGPT-like lengths"
    )
    group.add_argument("--waste", action="store_true", help="measure that, and not hits")
    group.add_argument(
        "--baseline",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help=f"who hands out memory: {', '.join(NAMES)} (default: all)",
    )
    group.add_argument("--seed", type=count, metavar="N", help="of the lengths (default: 0)")
    group.add_argument(
        "--max-length",
        type=count,
        metavar="N",
        help="tokens of the longest request there may be (default: 2048, or that of the trace)",
    )
    group.add_argument(
        "--steps", type=count, metavar="N", help=f"of decoding (default: {_DEFAULT_STEPS:,})"
    )
    group.add_argument(
        "--growth",
        type=count,
        metavar="N",
        help="tokens that `grow` grows by (default: 256, less where every request is shorter)",
    )
    group.add_argument(
        "--bytes-per-token", type=typed(parse_bytes), metavar="SIZE", help="to show bytes too"
    )


class _Requests(NamedTuple):
    """Where lengths come from, as often as they are asked for, without end."""

    about: str
    as_json: dict[str, Any]
    max_length: int
    stream: Callable[[], Iterator[Lengths]]


class _Memory(NamedTuple):
    about: str
    num_slots: int
    block_size: int


def refuse_waste_options(options: argparse.Namespace) -> None:
    """Refuse what belongs to `--waste` and stands without it. `InvalidUsage`."""
    for name in _OF_WASTE:
        if getattr(options, name) is not None:
            raise InvalidUsage(f"{_option(name)} belongs to --waste")


def run_waste(options: argparse.Namespace, trace: Trace | None) -> None:
    """Print shares of the memory, as a table or as one JSON object. `InvalidUsage`, `InvalidSize`."""
    for name, default in options.of_hits.items():
        if getattr(options, name) != default:
            raise InvalidUsage(f"{_option(name)} says nothing beside --waste")
    for name in ("block_size", "max_length", "steps", "growth"):
        if getattr(options, name) is not None:
            require(_option(name), getattr(options, name))
    requests = _synthetic(options) if trace is None else _traced(options, trace)
    memory = _memory(options, requests.max_length)
    with ProgressLine() as progress:
        found = {
            name: _measured(name, options, requests, memory, progress)
            for name in options.baseline or NAMES
        }
    pairs, rows = _givens(requests, memory, found), _rows(options, found)
    if options.html:
        write_page(options.html, waste_page(found, pairs, _ABOUT, rows))
    if options.json:
        print(json.dumps(_as_json(options, requests, memory, found), indent=2))
    else:
        width = terminal_width()
        headers, *cells = rows
        parts = (
            render_pairs(pairs),
            render_table(headers, cells, width),
            render_text(_ABOUT, width),
        )
        print("\n\n".join(parts))


def _synthetic(options: argparse.Namespace) -> _Requests:
    seed = options.seed or 0
    max_length = options.max_length or _SYNTHETIC_MAX_LENGTH
    sharegpt_like(seed, max_length)
    return _Requests(
        f"ShareGPT-like lengths, seed {seed}, at most {max_length:,} tokens",
        {"source": "sharegpt-like", "seed": seed},
        max_length,
        lambda: sharegpt_like(seed, max_length),
    )


def _traced(options: argparse.Namespace, trace: Trace) -> _Requests:
    if options.seed is not None:
        raise InvalidUsage("--seed is for lengths that are drawn, and a trace has its own")
    # A prompt that asks for nothing holds its memory for a step too.
    lengths = [
        Lengths(request.num_input_tokens, max(1, request.num_output_tokens))
        for request in trace.requests
    ]
    longest = max(map(sum, lengths))
    max_length = options.max_length or longest
    kept = [each for each in lengths if sum(each) <= max_length]
    if not kept:
        raise InvalidTrace(f"no request of the trace is within --max-length {max_length:,}")
    about = f"{', '.join(options.trace)} ({trace.format}), {len(kept):,} requests in a circle"
    if len(kept) < len(lengths):
        about += f", {len(lengths) - len(kept):,} left out as longer than {max_length:,} tokens"
    return _Requests(
        about,
        {
            "source": trace.format,
            "requests": len(kept),
            "longer_requests_left_out": len(lengths) - len(kept),
            "malformed_rows": [row._asdict() for row in trace.malformed],
        },
        max_length,
        lambda: cycle(kept),
    )


def _memory(options: argparse.Namespace, max_length: int) -> _Memory:
    block_size = options.block_size or LENGTHS_BLOCK_SIZE
    if options.capacity is None:
        num_slots = _NUM_LONGEST * power_of_two(max_length)
        why = f" ({_NUM_LONGEST} of the longest requests)"
    elif len(options.capacity) > 1:
        raise InvalidUsage("--waste takes one --capacity")
    else:
        require("--capacity", options.capacity[0])
        num_slots, why = options.capacity[0] * block_size, ""
    about = f"{num_slots:,} slots{why}, paged in blocks of {block_size:,}"
    if options.bytes_per_token is not None:
        about = f"{format_bytes(num_slots * options.bytes_per_token)}: {about}"
    return _Memory(about, num_slots, block_size)


def _measured(
    name: str,
    options: argparse.Namespace,
    requests: _Requests,
    memory: _Memory,
    progress: ProgressLine,
) -> Waste:
    max_steps = options.steps or _DEFAULT_STEPS
    progress.begin(name, max_steps)
    baseline = make_baseline(
        name,
        memory.num_slots,
        max_length=requests.max_length,
        block_size=memory.block_size,
        step=options.growth or min(_DEFAULT_GROWTH, power_of_two(requests.max_length)),
    )
    return measure_waste(baseline, requests.stream(), max_steps=max_steps, progress=progress)


def _as_json(
    options: argparse.Namespace, requests: _Requests, memory: _Memory, found: Mapping[str, Waste]
) -> dict[str, Any]:
    return {
        "requests": requests.as_json,
        "max_length": requests.max_length,
        "num_slots": memory.num_slots,
        "block_size": memory.block_size,
        "bytes_per_token": options.bytes_per_token,
        "results": [
            {
                "baseline": name,
                **dataclasses.asdict(waste),
                "internal": waste.internal,
                "moved_bytes": options.bytes_per_token
                and options.bytes_per_token * waste.num_moved_tokens,
            }
            for name, waste in found.items()
        ],
    }


def _givens(
    requests: _Requests, memory: _Memory, found: Mapping[str, Waste]
) -> list[tuple[str, str]]:
    num_steps = max(waste.num_steps for waste in found.values())
    return [
        ("requests", requests.about),
        ("memory", memory.about),
        ("steps", f"{num_steps:,}, of which the first quarter is not counted"),
    ]


def _rows(options: argparse.Namespace, found: Mapping[str, Waste]) -> list[list[str]]:
    """The table: its headers, and a row for each way to hand out memory."""

    def moved(waste: Waste) -> str:
        if options.bytes_per_token is None:
            return f"{waste.num_moved_tokens:,} tokens"
        return format_bytes(options.bytes_per_token * waste.num_moved_tokens)

    headers = [
        "baseline",
        *(state.replace("_", "-") for state in STATES),
        "at once",
        "finished",
        "preempted",
        "moved",
    ]
    rows = [
        [
            name,
            *(f"{100 * getattr(waste, state):.1f}" for state in STATES),
            f"{waste.mean_batch:.1f}",
            f"{waste.num_finished:,}",
            f"{waste.num_preempted:,}",
            moved(waste),
        ]
        for name, waste in found.items()
    ]
    return [headers, *rows]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
