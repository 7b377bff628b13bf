"""A stress program: random operations against the naive model, as many as asked for, on all cores.

    nox -s stress -- --seed 1 --operations 1000000

The work is cut into runs that each begin with a new manager; after each operation `check()` proves
the invariants, and the naive model compares every answer and what every sequence would read. A run
that fails is named, and can be had again by itself. Then requests are served under digests that
collide, one for ten operations.

Knows how to deal out runs and what to say of them. Does not know what is true: see `naive_engine`.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

from .naive_engine import Engine
from .naive_swaps import SwappingEngine
from .naive_windows import WindowEngine
from .weak_digests import WEAK_DIGESTS, play

# With a prefix cache or without one, blocks in the pool, tokens in a block, windows, host blocks.
CASES = (
    *product((True, True, False), (1, 3, 7, 20, 60), (1, 2, 4, 16), ((),), (0,)),
    *product((True, False), (5, 20, 60), (1, 4), ((3,), (9, 2)), (0,)),
    *product((True, False), (3, 7, 20), (1, 4), ((),), (2, 8)),
)
OPERATIONS_A_RUN = 5000
RUNS_A_SEED = 1_000_000


class Run(NamedTuple):
    """What a run depends on, and nothing else."""

    seed: int
    number: int
    num_operations: int

    def play(self) -> None:
        """Operate and verify; a failure says which operation it was."""
        case = CASES[self.number % len(CASES)]
        caching, num_blocks, block_size, windows, num_host = case
        pool = (self.seed * RUNS_A_SEED + self.number, num_blocks, block_size)
        engine: Engine | WindowEngine
        if windows:
            engine = WindowEngine(*pool, windows, caching=caching)
        elif num_host:
            engine = SwappingEngine(*pool, num_host, caching=caching)
        else:
            engine = Engine(*pool, caching=caching)
        for number in range(self.num_operations):
            try:
                engine.operate()
                engine.verify()
                if number % 16 == 0:
                    engine.verify_rarely()
            except BaseException as error:
                error.add_note(
                    f"operation {number} with {num_blocks=} {block_size=} {caching=} {windows=} "
                    f"{num_host=}; again: "
                    f"nox -s stress -- --seed {self.seed} --run {self.number}"
                )
                raise


def failure_of(run: Run) -> str:
    """Play a run; the traceback if it fails, as text: not every exception can be sent home."""
    try:
        run.play()
    except BaseException:  # noqa: BLE001 -- pytest's failures are no Exceptions
        return traceback.format_exc()
    return ""


def deal(seed: int, num_operations: int) -> Iterator[Run]:
    """Cut a number of operations into runs."""
    for number, start in enumerate(range(0, num_operations, OPERATIONS_A_RUN)):
        yield Run(seed, number, min(OPERATIONS_A_RUN, num_operations - start))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play; 0 if all is well, 1 at the first failure."""
    parser = argparse.ArgumentParser(description="Random operations against the naive model.")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--operations", type=int, default=1_000_000, help="%(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="%(default)s")
    parser.add_argument("--run", type=int, help="only the run of this number")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    if options.run is not None:
        runs = [Run(options.seed, options.run, OPERATIONS_A_RUN)]
    else:
        runs = list(deal(options.seed, options.operations))
    done = 0
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as workers:
        for run, failure in zip(runs, workers.map(failure_of, runs), strict=True):
            if failure:
                workers.shutdown(wait=False, cancel_futures=True)
                print(failure)
                return 1
            done += run.num_operations
            if sys.stderr.isatty():
                print(f"\r{done:,} operations", end="", file=sys.stderr, flush=True)
    print(f"{done:,} operations, {len(runs)} managers: all as the naive model says")
    for name in WEAK_DIGESTS if options.run is None else ():
        num_hits = play(name, options.seed, done // 10)
        print(f"{done // 10:,} requests under a {name} digest: {num_hits:,} tokens found, all true")
    return 0


if __name__ == "__main__":
    sys.exit(main())
