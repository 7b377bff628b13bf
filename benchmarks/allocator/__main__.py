"""The command line: `python -m benchmarks.allocator`, or `nox -s bench -- allocator`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.allocator import cases, peers, report, runner


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allocator",
        description="Measure kvblocks beside the block managers of serving engines.",
        epilog="example: python -m benchmarks.allocator --only W3,W4 --peers vllm,teaching --quick",
    )
    parser.add_argument("--quick", action="store_true", help="less work a round, fewer rounds")
    parser.add_argument("--only", default="", metavar="W3,W4", help="these workloads")
    parser.add_argument("--peers", default="", metavar="vllm,sglang", help="these peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".nox/bench-peers"),
        help="where peers are unpacked and their logs go (default: %(default)s)",
    )
    return parser.parse_args()


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def main() -> int:
    """Measure, show, and write what was asked for."""
    arguments = _parse()
    try:
        chosen = cases.select(list(filter(None, arguments.only.split(","))))
        others = peers.select(list(filter(None, arguments.peers.split(","))))
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    run = runner.run(chosen, others, arguments.folder.resolve(), quick=arguments.quick, say=_say)
    for statistic in ("minimum", "median"):
        sys.stdout.write(f"\n{statistic.capitalize()} of the rounds, microseconds a unit ")
        sys.stdout.write(f"(W8: bytes), ratio to kvblocks\n\n{report.table(run, statistic)}\n")
    sys.stdout.write(f"\n{report.notes(run)}\n")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        told = report.as_json(run, quick=arguments.quick)
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
