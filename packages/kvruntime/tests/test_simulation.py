"""A share of the simulated worlds, and that what they find can be had again."""

from collections import Counter
from functools import cache

import pytest

from kvblocks import BlockManager

from .simulation import World, main

SEEDS = range(24)


@cache
def play(seed: int) -> Counter[str]:
    return World(seed, num_requests=40).play()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_gets_its_own_tokens_and_the_books_balance(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize(
    "counter",
    [
        "aborted decoding",
        "aborted in flight",
        "aborted preempted",
        "aborted prefilling",
        "aborted swapped",
        "aborted waiting",
        "clock jumps",
        "failed steps",
        "lost",
        "moved blocks",
        "num_bypasses",
        "num_cached_tokens",
        "num_copies",
        "num_deferrals",
        "num_evicted_blocks",
        "num_preemptions_recompute",
        "num_preemptions_swap",
        "num_swap_fallbacks",
        "num_swapped_in_blocks",
        "two steps open",
    ],
)
def test_every_policy_acts_in_some_world(counter: str) -> None:
    assert sum(play(seed)[counter] for seed in SEEDS) > 0


def test_a_world_that_fails_says_how_to_have_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BlockManager, "fork", lambda *_: None)
    arguments = ["--seed", "3", "--worlds", "1", "--requests", "40"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "again: nox -s simulate -- --seed 3 --worlds 1 --requests 40\n" in printed
    assert main(arguments) == 1
    assert capsys.readouterr().out == printed
