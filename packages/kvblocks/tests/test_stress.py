"""The stress program: a share of it, and that what it finds can be had again."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvblocks import BlockManager

from .stress import CASES, OPERATIONS_A_RUN, Run, deal, failure_of


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_share_of_the_stress_program(number: int) -> None:
    Run(seed=0, number=number, num_operations=200).play()


def test_the_operations_asked_for_are_dealt_out_whole() -> None:
    runs = list(deal(seed=7, num_operations=2 * OPERATIONS_A_RUN + 1))
    assert [run.num_operations for run in runs] == [OPERATIONS_A_RUN, OPERATIONS_A_RUN, 1]
    assert len({run.number for run in runs}) == 3


def test_a_failure_says_how_to_have_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "truncate", lambda *_: None)
    text = failure_of(Run(seed=3, number=11, num_operations=OPERATIONS_A_RUN))
    assert "AssertionError" in text
    assert "nox -s stress -- --seed 3 --run 11" in text
    assert text == failure_of(Run(seed=3, number=11, num_operations=OPERATIONS_A_RUN))


@pytest.mark.parametrize("options", [["--operations", "40"], ["--run", "4"]])
def test_the_program_prints_its_seed_first(options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.stress", "--seed", "5", "--processes", "1", *options]
    package = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=package, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("seed 5\n")
