"""The command line: `python -m benchmarks.engine_memory`, or `nox -s bench -- engine-memory`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_memory import accuracy, memory, speed
from benchmarks.environment import command, system
from kvruntime import load_checkpoint
from kvruntime.weights import Checkpoint

CASES: dict[str, Callable[[Checkpoint], dict[str, Any]]] = {
    "sharing": memory.sharing,
    "side by side": lambda _: memory.side_by_side(),
    "pressure": memory.pressure,
    "first token": speed.first_token,
    "bookkeeping": speed.bookkeeping,
    "shared prefix": speed.shared_prefix,
    "batch size": speed.by_batch_size,
    "kv dtype": accuracy.accuracy,
}


def main() -> int:
    """Measure, show, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_memory", description=__doc__)
    parser.add_argument("--only", default="", metavar="sharing,pressure", help="these tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name] or list(CASES)
    if strange := set(only) - CASES.keys():
        sys.stderr.write(f"error: there is no table {min(strange)!r}, but {', '.join(CASES)}\n")
        return 2
    torch.set_num_threads(1)
    checkpoint = load_checkpoint("smollm2")
    told: dict[str, Any] = {
        "command": command("engine-memory"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unit": "processor time of one thread, where time is measured",
        "results": {},
    }
    for name in only:
        sys.stderr.write(f"{name}\n")
        told["results"][name] = CASES[name](checkpoint)
        sys.stdout.write(f"\n{name}\n\n{_table(told['results'][name])}\n")
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


def _table(rows: dict[str, Any]) -> str:
    """Rows of equal columns, or of one number."""
    if not all(isinstance(row, dict) for row in rows.values()):
        rows = {name: {"": value} for name, value in rows.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        cells = [f"{row[column]:,}" if column in row else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
