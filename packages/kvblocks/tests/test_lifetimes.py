"""Lifetimes: how long evicted blocks had been there, by the caller's clock."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest

from kvblocks import BlockManager, DecodeBatch
from kvblocks.recording import RecordingBlockManager
from kvblocks.results import Durations

from .driver import Driver
from .helpers import filled


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fails = False

    def __call__(self) -> float:
        if self.fails:
            raise MemoryError("of the clock")
        return self.now


def aged(clock: Clock, **options: Any) -> BlockManager:
    """Two blocks computed at 10, given up at 15, in a pool of four; and now it is 40."""
    manager = BlockManager(4, 2, clock=clock, **options)
    clock.now = 10.0
    filled(manager, "old", [1, 2, 3, 4])
    clock.now = 15.0
    manager.free("old")
    clock.now = 40.0
    return manager


def test_nothing_evicted_took_no_time() -> None:
    stats = aged(Clock()).stats()
    assert stats.idle_time == stats.lifetime == Durations(0, 0.0, math.inf, 0.0)
    assert stats.lifetime.mean == 0.0


def test_idle_time_counts_from_when_a_block_was_given_up_and_lifetime_from_when_it_was_computed() -> (
    None
):
    manager = aged(Clock())
    manager.allocate("new", range(10, 16))
    stats = manager.stats()
    assert stats.idle_time == Durations(1, 25.0, 25.0, 25.0)
    assert stats.lifetime == Durations(1, 30.0, 30.0, 30.0)


def test_durations_are_summed_over_blocks() -> None:
    clock = Clock()
    manager = aged(clock)
    manager.allocate("new", range(10, 16))
    clock.now = 50.0
    manager.append({"new": 6})
    manager.append({"new": 1})
    lifetime = manager.stats().lifetime
    assert lifetime == Durations(2, 70.0, 30.0, 40.0)
    assert lifetime.mean == 35.0


def test_who_uses_a_block_again_makes_it_less_idle_and_no_younger() -> None:
    clock = Clock()
    manager = aged(clock)
    manager.allocate("again", [1, 2, 3, 4, 5])
    manager.free("again")
    clock.now = 45.0
    manager.allocate("new", range(10, 18))
    stats = manager.stats()
    assert stats.idle_time == Durations(2, 10.0, 5.0, 5.0)
    assert stats.lifetime == Durations(2, 70.0, 35.0, 35.0)


def test_time_never_goes_back() -> None:
    clock = Clock()
    manager = aged(clock)
    clock.now = 1.0
    manager.allocate("new", range(10, 18))
    assert manager.stats().idle_time == Durations(2, 0.0, 0.0, 0.0)


def test_without_a_clock_nothing_is_counted() -> None:
    manager = BlockManager(4, 2)
    filled(manager, "old", [1, 2, 3, 4])
    manager.free("old")
    manager.allocate("new", range(10, 18))
    stats = manager.stats()
    assert stats.num_evicted_blocks == 2
    assert stats.lifetime == Durations()


def test_a_clock_changes_nothing_else() -> None:
    clock = Clock()
    plain, timed = (Driver(7, BlockManager(20, 2, clock=given)) for given in (None, clock))
    for number in range(250):
        clock.now = float(number)
        plain.operate()
        timed.operate()
        assert plain.manager.state_digest() == timed.manager.state_digest()
    assert timed.manager.stats().lifetime.num_blocks == timed.manager.stats().num_evicted_blocks


@pytest.mark.parametrize(
    "call",
    [
        lambda m, _: m.allocate("new", range(6)),
        lambda m, _: m.append({"a": 1}),
        lambda m, _: m.append({"a": 2}),
        lambda m, _: m.reserve({"a": 9}),
        lambda m, _: m.commit("c", 2),
        lambda m, _: m.free("a"),
        lambda m, _: m.free("out"),
        lambda m, _: m.swap_out(["a"]),
        lambda m, _: m.swap_in(["out"]),
        lambda m, _: m.unpin("pinned"),
        lambda _, batch: batch.append(),
        lambda _, batch: batch.commit([1]),
    ],
)
def test_a_clock_that_raises_leaves_no_trace(
    call: Callable[[BlockManager, DecodeBatch], object],
) -> None:
    clock = Clock()
    manager = BlockManager(30, 2, clock=clock, num_host_blocks=4)
    for name in ("a", "b", "out"):
        filled(manager, name, [1, 2, 3, 4])
    manager.pin("pinned", [1, 2])
    manager.swap_out(["out"])
    manager.allocate("c", [5, 6])
    manager.append({"c": 2})
    batch = manager.decode_batch(["b"])
    batch.append()
    before = manager.state_digest()
    clock.fails = True
    with pytest.raises(MemoryError, match="of the clock"):
        call(manager, batch)
    clock.fails = False
    assert manager.state_digest() == before
    batch.commit([1])
    manager.check()


def test_a_restored_manager_goes_on_by_the_clock_it_is_given() -> None:
    manager = aged(Clock())
    clock = Clock()
    clock.now = 60.0
    restored = BlockManager.restore(manager.snapshot(), clock=clock)
    restored.allocate("new", range(10, 18))
    assert restored.stats().lifetime == Durations(2, 100.0, 50.0, 50.0)


def test_for_a_restored_manager_without_a_clock_time_stands_still() -> None:
    restored = BlockManager.restore(aged(Clock()).snapshot())
    restored.allocate("new", range(10, 18))
    assert restored.stats().lifetime == Durations(2, 10.0, 5.0, 5.0)


def test_a_clock_is_not_part_of_a_log() -> None:
    log = io.StringIO()
    RecordingBlockManager(log, 4, clock=Clock())
    assert "clock" not in log.getvalue()


def test_both_parts_of_what_is_split_are_as_old_as_the_whole() -> None:
    clock = Clock()
    manager = aged(clock)
    manager.allocate("half", [1, 2, 9])  # holds the first of the two old blocks
    manager.free("half")
    manager.allocate("new", range(10, 18))
    assert manager.stats().lifetime == Durations(2, 60.0, 30.0, 30.0)
    assert manager.stats().idle_time == Durations(2, 25.0, 0.0, 25.0)
