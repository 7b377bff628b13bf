"""The command line: `python -m benchmarks.memory`, or `nox -s bench -- memory`.

Counts of slots, blocks and hits: what the tables of docs/plan.md, docs/simulate.md and docs/sosp23.md
show. Most are answers of `kvblocks simulate`, each kept beside its command.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvblocks
from benchmarks.environment import TRACES
from benchmarks.memory.sharing import LOADS, WIDTHS, measure

NUM_SLOTS = 16_384
BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
CHAT = "mooncake/conversation_trace.jsonl"
CODE = "azure2023/AzureLLMInferenceTrace_code.csv"
CONV = "azure2023/AzureLLMInferenceTrace_conv.csv"
ALL, HALF = "1000,5000,10000,50000", "3000,9776,20000,40000,60000"
COMMANDS = {
    "waste of sharegpt-like": "simulate --waste",
    "waste of code": f"simulate --waste {CODE}",
    "waste of conv": f"simulate --waste {CONV}",
    "hits of all": f"simulate {CHAT} --semantics engine --capacity {ALL} --policy lru,fifo,lfu,slru",
    "hits of half, engine": (
        f"simulate {CHAT} --semantics engine --capacity {HALF} --policy lru,span,fifo,lfu,slru"
        " --measure-last 0.5"
    ),
    "hits of half, index": (
        f"simulate {CHAT} --capacity {HALF} --policy lru,span,fifo,lfu,slru,belady"
        " --measure-last 0.5"
    ),
}
COMMANDS |= {
    f"waste with blocks of {size}": (
        f"simulate --waste --baseline paged --block-size {size} --capacity {NUM_SLOTS // size}"
    )
    for size in BLOCK_SIZES
}


def main() -> int:
    """Count everything, and write it to a file."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args()
    answers = {}
    for name, line in COMMANDS.items():
        sys.stderr.write(f"kvblocks {line}\n")
        words = [str(TRACES / word) if "/" in word else word for word in line.split()]
        if missing := [word for word in words if "/" in word and not Path(word).exists()]:
            sys.stderr.write(
                f"left out: {missing[0]} is not there (benchmarks/README.md, Traces)\n"
            )
            continue
        answers[name] = {"command": f"kvblocks {line}", "answer": ask(words)}
    sharing = [
        asdict(measure(load, method, width))
        for load in LOADS
        for method in ("parallel sampling", "beam search")
        for width in WIDTHS
    ]
    told = {
        "command": "nox -s bench -- memory --json benchmarks/results/memory.json",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {"kvblocks": kvblocks.__version__},
        "commands": answers,
        "sharing": sharing,
    }
    text = json.dumps(told, indent=1) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def ask(words: list[str]) -> Any:
    """The JSON of a command of kvblocks."""
    command = [sys.executable, "-m", "kvblocks", *words, "--json"]
    done = subprocess.run(command, capture_output=True, check=True)  # noqa: S603 -- our own command
    return json.loads(done.stdout)["results"]


if __name__ == "__main__":
    sys.exit(main())
