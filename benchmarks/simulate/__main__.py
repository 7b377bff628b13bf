"""The command line: `python -m benchmarks.simulate`, or `nox -s bench -- simulate`.

Both read the trace from its file, prepare it, and replay it under one policy at one capacity, with the
last half of the requests measured. Each does so in a process of its own, so that nobody's garbage
collector walks over another's objects; what counts is processor time, of a program that is called too.
Answers must be equal to the token before anything is reported.

Knows options and what is written. The replays are in `measure`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import TRACES, system
from benchmarks.simulate import measure

COMMAND = "nox -s bench -- simulate --json benchmarks/results/simulate.json"


def main() -> int:
    """Measure, show, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args()
    trace = TRACES / "mooncake" / "conversation_trace.jsonl"
    if not trace.is_file():
        sys.stderr.write(f"error: {trace} is not there; KVBLOCKS_TRACES names the folder\n")
        return 2
    measure.theirs_compiled(trace, "fifo")  # which compiles it, where that was not done before
    found: dict[str, Any] = {
        "command": COMMAND,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": system(),
            "num_cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {name: version(name) for name in ("kvblocks", "kvcache-simulator")},
        "trace": "mooncake/conversation_trace.jsonl",
        "capacity": measure.CAPACITY,
        "rounds": options.rounds,
        "policies": measure.measure(trace, options.rounds),
    }
    capacities, taken = measure.alone(measure.curve, trace, "lru")
    found["lru_curve"] = {"capacities": capacities, "seconds": round(taken, 3)}
    text = json.dumps(found, indent=2) + "\n"
    sys.stdout.write(text)
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
