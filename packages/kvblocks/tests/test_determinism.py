"""The same seed and the same operations make the same state, in every process."""

import os
import subprocess
import sys
from pathlib import Path

from kvblocks import BlockManager

from .driver import Driver

PROGRAM = "from tests.test_determinism import digests; print(*digests())"


def digests() -> list[str]:
    """The state after every hundredth operation of random runs, with a cache and without."""
    found = []
    for caching in (True, False):
        manager = BlockManager(24, 2, prefix_caching=caching)
        driver = Driver(5, manager)
        for number in range(3000):
            driver.operate()
            if number % 100 == 0:
                found.append(manager.state_digest())
    return found


def test_the_state_does_not_depend_on_how_a_process_hashes_strings() -> None:
    here = digests()
    assert len(set(here)) > 50, "the runs do too little"
    for hash_seed in ("0", "1", "4000000000"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == here
