"""The command line: `python -m benchmarks.batching`, or `nox -s bench -- batching`.

SmolLM2-135M in float32 on one thread, with a pool that holds one request and with one that holds eight.
Eight times the memory lets eight requests run at once. A load that generates gains much, since a step
reads the same weights for all of them. A load that reads prompts gains nothing: one prompt keeps the
arithmetic busy.

Rounds alternate between the pools; what is compared is the median of the ratios of a round.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.environment import command, system
from kvruntime import LLM, EngineConfig, SamplingParams, load_checkpoint

NUM_REQUESTS = 8
BLOCK_SIZE = 16


class Load(NamedTuple):
    """Eight equal requests."""

    about: str
    num_prompt: int
    num_generated: int

    @property
    def num_blocks(self) -> int:
        """What one request holds at its end."""
        return -(-(self.num_prompt + self.num_generated) // BLOCK_SIZE)


LOADS = {
    "answers": Load("prompts of 16 tokens, answers of 64", 16, 64),
    "prompts": Load("prompts of 256 tokens, answers of 1", 256, 1),
}


def main() -> int:
    """Measure both loads in both pools."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.batching", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint("smollm2")
    loads = {}
    for name, load in LOADS.items():
        pools = {
            number: LLM(
                checkpoint,
                EngineConfig(
                    num_blocks=number * load.num_blocks,
                    block_size=BLOCK_SIZE,
                    admission="output",
                    prefix_caching=False,
                ),
            )
            for number in (1, NUM_REQUESTS)
        }
        rounds = [
            {number: rate(llm, load) for number, llm in pools.items()}
            for _ in range(options.rounds + 1)
        ][1:]  # the first one warms up
        loads[name] = {
            "about": load.about,
            "tokens": "computed tokens a processor second",
            "rates": [list(one.values()) for one in rounds],
            "ratio": median(one[NUM_REQUESTS] / one[1] for one in rounds),
        }
        sys.stdout.write(f"{load.about}: {loads[name]['ratio']:.2f} times as many tokens\n")
    if options.json:
        options.json.write_text(json.dumps(told(loads), indent=2) + "\n", encoding="utf-8")
    return 0


def rate(llm: LLM, load: Load) -> float:
    """Tokens a processor second, prompts and answers together."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(load.num_prompt)] for _ in range(8)]
    params = SamplingParams(max_tokens=load.num_generated, temperature=0, ignore_eos=True)
    start = time.process_time()
    llm.generate(prompts, params)
    seconds = time.process_time() - start
    return NUM_REQUESTS * (load.num_prompt + load.num_generated) / seconds


def told(loads: dict[str, Any]) -> dict[str, Any]:
    """Everything, with the machine, the versions and the command."""
    return {
        "command": command("batching"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("kvruntime", "torch")},
        "loads": loads,
    }


if __name__ == "__main__":
    sys.exit(main())
