"""Hypothesis programs, as many as it takes for a number of steps.

    nox -s fuzz -- --seed 1 --steps 200000

Knows how to count. Does not know any rule: see `test_stateful`.
"""

import argparse
import sys
from collections.abc import Sequence

from .test_stateful import Calls, run_programs

PROGRAMS_A_ROUND = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Make programs; a failure is raised with the shortest program that shows it."""
    parser = argparse.ArgumentParser(description="Hypothesis programs against the rules.")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--steps", type=int, default=200_000, help="%(default)s")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    start, rounds = Calls.num_calls, 0
    while (done := Calls.num_calls - start) < options.steps:
        left = 1 + (options.steps - done) // 30  # most programs are longer
        seed = options.seed * 1_000_000 + rounds
        run_programs(min(PROGRAMS_A_ROUND, left), seed=seed)
        rounds += 1
        if sys.stderr.isatty():
            print(f"\r{done:,} steps", end="", file=sys.stderr, flush=True)
    print(f"{done:,} steps: no rule broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
