"""`kvblocks replay`: repeat a log of operations, show what became of the blocks, compare two logs.

Knows the options and how to show a replay. The replay is in `kvblocks.replay`.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvblocks.block_map import History, observe
from kvblocks.cli.parser import (
    Subparsers,
    page_path,
    refuse_as_page,
    terminal_width,
    typed,
    write_page,
)
from kvblocks.cli.progress import ProgressLine
from kvblocks.cli.tables import render_table
from kvblocks.errors import InvalidUsage
from kvblocks.files import read_text
from kvblocks.replay import Applied, Replay, find_difference
from kvblocks.report.replay import replay_page
from kvblocks.units import parse_count

_NUM_FRAMES = 400


def add_parser(commands: "Subparsers[Any]") -> None:
    """Add `replay`."""
    parser = commands.add_parser(
        "replay",
        help="repeat a log of operations",
        description="Repeat a log that kvblocks.recording wrote, call by call, on a manager of its own.",
        epilog="Example:\n  kvblocks replay operations.jsonl --policy lfu --html blocks.html",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="one JSON object a line")
    parser.add_argument(
        "--until", type=typed(parse_count), metavar="N", help="stop after this call"
    )
    parser.add_argument("--policy", metavar="NAME", help="instead of the recorded one")
    parser.add_argument(
        "--num-blocks", type=typed(parse_count), metavar="N", help="instead of the recorded number"
    )
    parser.add_argument(
        "--check", action="store_true", help="prove the manager's invariants after every call"
    )
    parser.add_argument(
        "--diff", type=Path, metavar="OTHER", help="tell where this log and another part; exit 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html",
        type=page_path,
        metavar="FILE",
        help="also write a picture of all blocks over time",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what became of the calls."""
    refuse_as_page(options.html, [options.log])
    lines = _lines(options.log, options.until)
    if options.diff:
        if options.policy or options.num_blocks or options.check or options.html:
            raise InvalidUsage(
                "--diff compares two logs as they are: it goes with --until and --json"
            )
        _compare(options, lines)
        return
    changes = {
        name: value
        for name in ("policy", "num_blocks")
        if (value := getattr(options, name)) is not None
    }
    replay = Replay(lines, **changes)
    with ProgressLine() as progress:
        progress.begin(str(options.log), len(lines))
        calls = _Calls(replay, progress, check=options.check)
        history = observe(replay, len(lines) - 1, _NUM_FRAMES if options.html else 1, calls)
    if options.html:
        page = replay_page(str(options.log), history, _facts(replay, history), calls.rows())
        write_page(options.html, page)
    if options.json:
        print(json.dumps(_as_json(replay, history, calls), indent=2))
    else:
        for name, value in _facts(replay, history):
            print(f"{name:<16} {value}")
        headers = ["call", "carried out", "refused"]
        print(f"\n{render_table(headers, calls.rows(), terminal_width())}")


class _Calls:
    """Counts calls as they go by."""

    def __init__(self, replay: Replay, progress: ProgressLine, *, check: bool) -> None:
        self.made: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._progress = progress
        self._manager = replay.manager
        self._check = check

    def __call__(self, applied: Applied) -> None:
        self.made[applied.op] += 1
        self.refused[applied.op] += applied.error is not None
        if self._check:
            self._manager.check()
        self._progress(applied.number)

    def rows(self) -> list[list[str]]:
        return [
            [op, f"{number - self.refused[op]:,}", f"{self.refused[op]:,}"]
            for op, number in self.made.most_common()
        ]


def _lines(path: Path, until: int | None) -> list[str]:
    lines = read_text(str(path)).split("\n")  # empty ones too: they count where a line is named
    return lines if until is None else _up_to(lines, until)


def _up_to(lines: list[str], until: int) -> list[str]:
    """The header and so many calls, with the digests between them."""
    number = -1
    for index, line in enumerate(lines):
        number += bool(line.strip()) and not line.startswith('{"digest"')
        if number > until:
            return lines[:index]
    return lines


def _compare(options: argparse.Namespace, lines: Sequence[str]) -> None:
    found = find_difference(lines, _lines(options.diff, options.until))
    if options.json:
        what = None if found is None else {"call": found.number, "what": found.what}
        print(json.dumps({"difference": what}, indent=2))
    elif found is None:
        print(f"{options.log} and {options.diff} do the same to the same state, in every call")
    else:
        print(f"{options.log} and {options.diff} part at call {found.number:,}")
        for line in found.what:
            print(f"  {line}")
    if found is not None:
        raise SystemExit(1)


def _facts(replay: Replay, history: History) -> list[tuple[str, str]]:
    manager, stats = replay.manager, replay.manager.stats()
    share = stats.num_cached_tokens / (stats.num_queried_tokens or 1)
    at_end = (
        f"{stats.num_held_blocks:,} held, {stats.num_cached_blocks:,} cached, "
        f"{stats.num_fenced_blocks:,} fenced, {stats.num_free_blocks:,} free"
    )
    return [
        ("calls", f"{history.num_calls:,}"),
        ("pool", f"{manager.num_blocks:,} blocks of {manager.block_size} tokens, {manager.policy}"),
        ("state", _state(replay)),
        ("most held", f"{stats.peak_held_blocks:,} blocks"),
        ("at the end", at_end),
        (
            "found in cache",
            f"{stats.num_cached_tokens:,} of {stats.num_queried_tokens:,} tokens, {100 * share:.1f} %",
        ),
        ("evicted", f"{stats.num_evicted_blocks:,} blocks"),
        ("sharing", f"{stats.num_forks:,} forks, {stats.num_copies:,} blocks copied"),
    ]


def _state(replay: Replay) -> str:
    if replay.is_changed:
        return "of other options than the recorded ones"
    if replay.num_wrong_digests:
        return f"differs from the recorded one after call {replay.first_wrong_digest:,}"
    if replay.num_digests:
        return f"as recorded, {replay.num_digests:,} times compared"
    return "never compared: the log has no digest"


def _as_json(replay: Replay, history: History, calls: _Calls) -> dict[str, Any]:
    stats = replay.manager.stats()
    return {
        "num_calls": history.num_calls,
        "calls": [
            {"op": op, "made": number, "refused": calls.refused[op]}
            for op, number in calls.made.most_common()
        ],
        "is_changed": replay.is_changed,
        "num_digests": replay.num_digests,
        "num_wrong_digests": replay.num_wrong_digests,
        "first_wrong_digest": replay.first_wrong_digest,
        "state_digest": replay.manager.state_digest(),
        # A log has no clock, so that durations would be empty.
        "stats": {
            name: value
            for name in stats.__slots__
            if isinstance(value := getattr(stats, name), int)
        },
    }
