"""The content index: what matches, what is stored once, and what is evicted first."""

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvblocks import BlockManager, UnknownSequence

from .helpers import filled, refused

# ── identity ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("salt", [None, "", "a", "b", "None", "\ud800"])
def test_a_salt_sees_only_its_own_content(salt: str | None) -> None:
    manager = BlockManager(64, 4)
    salts = (None, "", "a", "b", "None", "4:salt", "\ud800")
    for number, other in enumerate(salts):
        if other != salt:
            filled(manager, number, 9, salt=other)
    assert manager.match(range(9), salt=salt).num_tokens == 0
    filled(manager, "own", 9, salt=salt)
    assert manager.match(range(9), salt=salt).num_tokens == 8
    assert manager.stats().num_merged_blocks == 0


def test_a_fork_keeps_the_salt() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 6, salt="s")
    manager.fork("A", "B")
    manager.append({"B": [6, 7]})
    manager.commit("B", 8)
    assert manager.match(range(9), salt="s").num_tokens == 8
    assert manager.match(range(9)).num_tokens == 0


def test_nothing_matches_behind_a_miss() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", [1, 1, 1, 1])
    assert manager.match([2, 2, 2, 2, 1, 1, 1, 1, 9]).num_tokens == 0


def test_only_full_blocks_match() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 7)
    assert manager.match(range(8)).num_tokens == 4


@pytest.mark.parametrize(("num_tokens", "num_matched"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_at_least_one_token_of_a_prompt_is_left_to_compute(
    num_tokens: int, num_matched: int
) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 8)
    manager.free("A")
    assert manager.match(range(num_tokens)).num_tokens == num_matched
    assert manager.allocate("B", range(num_tokens)).num_cached_tokens == num_matched


def test_only_committed_content_matches() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", range(8))
    manager.append({"A": 8})
    assert manager.match(range(9)).num_tokens == 0
    manager.commit("A", 7)
    assert manager.match(range(9)).num_tokens == 4


def test_without_prefix_caching_nothing_matches() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    filled(manager, "A", 8)
    assert manager.match(range(9)).num_tokens == 0
    assert manager.allocate("B", range(9)).num_cached_tokens == 0
    assert manager.stats().num_queried_tokens == 0


def test_queried_and_cached_tokens_are_counted() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 8)
    manager.allocate("B", range(10))
    stats = manager.stats()
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (18, 8)


def test_the_hit_rate_is_the_share_of_queried_tokens_that_were_cached() -> None:
    manager = BlockManager(8, 2)
    assert manager.stats().hit_rate == 0
    for name in "ab":
        manager.allocate(name, [1, 2, 3, 4])
        manager.append({name: 4 - manager.num_computed_tokens(name)})
        manager.commit(name, 4)
    assert manager.stats().hit_rate == 2 / 8


# ── leaks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", list(itertools.permutations("ABCD")))
def test_forks_freed_in_any_order_give_each_block_back_once(order: tuple[str, ...]) -> None:
    manager = BlockManager(12, 4)
    filled(manager, "A", 6)
    for parent, child in ("AB", "BC", "AD"):
        manager.fork(parent, child)
    manager.append({"B": [1], "C": [2, 3, 4]})
    for name in order:
        manager.free(name)
        manager.check()
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (11, 1)


def test_a_second_free_is_an_error_and_changes_nothing() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 4)
    manager.free("A")
    with refused(manager, UnknownSequence, "no sequence 'A'"):
        manager.free("A")


def aborted_before_allocate(manager: BlockManager) -> None:
    manager.match(range(9))


def aborted_before_append(manager: BlockManager) -> None:
    manager.allocate("X", range(9))
    manager.free("X")


def aborted_before_commit(manager: BlockManager) -> None:
    manager.allocate("X", range(9))
    step = manager.begin_step()
    manager.append({"X": 9})
    manager.free("X")
    manager.complete_step(step)


def aborted_during_a_copy(manager: BlockManager) -> None:
    manager.fork("A", "X")
    step = manager.begin_step()
    assert manager.append({"X": [1]}).copies
    manager.free("X")
    manager.complete_step(step)


@pytest.mark.parametrize(
    "abort",
    [aborted_before_allocate, aborted_before_append, aborted_before_commit, aborted_during_a_copy],
)
def test_an_abort_leaves_no_block_behind_and_publishes_nothing(
    abort: Callable[[BlockManager], None],
) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 6, first_token=100)
    abort(manager)
    manager.check()
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_held_blocks, stats.num_cached_blocks) == (6, 2, 0)
    assert manager.match(range(9)).num_tokens == 0


# ── eviction ─────────────────────────────────────────────────────────────────────────────────


def test_blocks_without_content_are_reused_before_a_cached_one_is_evicted() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "hot", 13)
    manager.free("hot")
    for number in range(50):
        filled(manager, number, 3, first_token=1000 + number * 10)
        manager.free(number)
    assert manager.match(range(13)).num_tokens == 12
    assert manager.stats().num_evicted_blocks == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 16)
    manager.free("A")
    matched = []
    for number in range(4):
        manager.allocate(number, [99])
        matched.append(manager.match(range(17)).num_tokens)
        manager.check()
    assert matched == [12, 8, 4, 0]


def test_the_chain_that_was_given_up_first_is_evicted_first() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 8, first_token=0)
    filled(manager, "B", 8, first_token=100)
    manager.free("A")
    manager.free("B")
    manager.allocate("C", range(900, 908))
    assert manager.match(range(9)).num_tokens == 0
    assert manager.match(range(100, 109)).num_tokens == 8


def test_a_hit_makes_content_young_again() -> None:
    manager = BlockManager(5, 4)
    filled(manager, "A", 8, first_token=0)
    filled(manager, "B", 8, first_token=100)
    manager.free("A")
    manager.free("B")
    manager.allocate("A again", range(9))
    manager.free("A again")
    manager.allocate("C", range(900, 912))
    assert manager.match(range(9)).num_tokens == 8
    assert manager.match(range(100, 109)).num_tokens == 0


def test_a_shared_prefix_outlives_its_branches() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", [0, 1, 2, 3, 10, 11, 12, 13])
    filled(manager, "B", [0, 1, 2, 3, 20, 21, 22, 23])
    manager.free("A")
    manager.free("B")
    manager.allocate("C", range(900, 912))
    assert manager.match(range(5)).num_tokens == 4
    manager.check()


def test_content_of_an_evicted_block_never_matches_again() -> None:
    manager = BlockManager(1, 4)
    for number in range(3):
        filled(manager, "A", 4, first_token=number * 100)
        manager.free("A")
        matched = [manager.match(range(n * 100, n * 100 + 5)).num_tokens for n in range(3)]
        assert matched == [4 * (n == number) for n in range(3)]
        manager.check()


def num_operations(call: Callable[[], object]) -> int:
    """The bytecodes and calls that a call executes: a cost that is the same on every machine.

    The first time is not to be relied on: Python 3.12 then tells of the lines of functions alone.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del event, argument
        frame.f_trace_opcodes = True
        count += 1
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests left behind is not cleared away at this call's cost
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def with_cached_blocks(num_cached: int) -> BlockManager:
    manager = BlockManager(num_cached + 3, 1)
    for token in range(num_cached):
        filled(manager, "A", [token])
        manager.free("A")
    filled(manager, "busy", [10**6, 10**6 + 1, 10**6 + 2])
    assert manager.stats().num_free_blocks == 0
    return manager


def test_the_cost_of_an_eviction_does_not_depend_on_the_size_of_the_cache() -> None:
    costs = []
    for num_cached in (5, 10, 2000):
        manager = with_cached_blocks(num_cached)
        costs.append(num_operations(lambda: manager.append({"busy": [7]})))  # noqa: B023 -- called at once
        assert manager.stats().num_evicted_blocks == 1
    assert costs[1] == costs[2]


def one_step(manager: BlockManager) -> None:
    """Every call that an engine makes all the time."""
    step = manager.begin_step()
    manager.allocate("B", [0, 1])
    manager.can_append({"busy": 1, "B": 2})
    manager.append({"busy": [7], "B": [1, 2]})
    manager.complete_step(step)
    manager.commit("B", 3)
    manager.fork("B", "C")
    manager.append({"C": [3, 4]})
    manager.truncate("C", 4)
    manager.free("C")
    manager.free("B")
    manager.stats()


def test_no_call_of_a_step_costs_more_in_a_larger_pool_or_cache() -> None:
    costs = []
    for num_cached in (20, 20, 2000):
        manager = with_cached_blocks(num_cached)
        costs.append(num_operations(lambda: one_step(manager)))  # noqa: B023 -- called at once
    assert costs[1] == costs[2]


def test_a_refusal_costs_no_more_in_a_larger_pool() -> None:
    costs = []
    for num_blocks in (4, 4, 4000):
        manager = BlockManager(num_blocks, 1)
        filled(manager, "A", num_blocks - 1)
        manager.fork("A", "B")
        costs.append(num_operations(lambda: manager.can_append({"A": 2, "B": 2})))  # noqa: B023 -- called at once
    assert costs[1] == costs[2]


# ── equal content is stored once ─────────────────────────────────────────────────────────────


@pytest.fixture
def twins() -> BlockManager:
    """A and B computed the same 10 tokens side by side, in blocks 0, 1, 2 and 3, 4, 5."""
    manager = BlockManager(8, 4)
    for name in "AB":
        manager.allocate(name, range(10))
    manager.append({"A": 10, "B": 10})
    return manager


def test_the_loser_of_twins_adopts_the_winners_blocks(twins: BlockManager) -> None:
    twins.commit("A", 10)
    twins.commit("B", 10)
    assert twins.block_table("B").tolist() == [0, 1, 5]
    assert [twins.ref_count(block) for block in range(6)] == [2, 2, 1, 0, 0, 1]
    stats = twins.stats()
    assert (stats.num_merged_blocks, stats.num_free_blocks) == (2, 4)
    twins.check()


def test_twins_merge_block_by_block_whoever_is_ahead(twins: BlockManager) -> None:
    twins.commit("A", 4)
    twins.commit("B", 8)
    twins.commit("A", 8)
    assert twins.block_table("A").tolist() == [0, 4, 2]
    assert twins.block_table("B").tolist() == [0, 4, 5]


def test_twins_freed_in_either_order_leave_one_cached_copy(twins: BlockManager) -> None:
    twins.commit("A", 10)
    twins.commit("B", 10)
    twins.free("A")
    twins.free("B")
    stats = twins.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (6, 2)
    assert twins.match(range(10)).block_ids == (0, 1)


def test_a_twin_merges_with_content_that_nobody_holds(twins: BlockManager) -> None:
    twins.commit("A", 10)
    twins.free("A")
    twins.commit("B", 10)
    assert twins.block_table("B").tolist() == [0, 1, 5]
    assert twins.stats().num_cached_blocks == 0


def test_the_peak_does_not_count_a_merge(twins: BlockManager) -> None:
    twins.commit("A", 10)
    twins.free("A")
    twins.commit("B", 10)
    assert twins.stats().peak_held_blocks == 6
    lone = BlockManager(4, 4)
    filled(lone, "A", 4)
    lone.free("A")
    for name in "BC":
        lone.allocate(name, range(4))
    lone.append({"B": 4, "C": 4})
    lone.commit("B", 4)
    assert lone.stats().peak_held_blocks == 2


def test_the_chain_goes_on_behind_an_adopted_block(twins: BlockManager) -> None:
    twins.commit("A", 4)
    twins.free("A")
    twins.commit("B", 4)
    twins.append({"B": [20, 21]})
    twins.commit("B", 12)
    assert twins.match([*range(10), 20, 21, 0]).block_ids == (0, 4, 5)
    twins.check()


def test_a_second_copy_of_evicted_content_takes_its_place(twins: BlockManager) -> None:
    twins.commit("A", 10)
    twins.free("A")
    twins.allocate("hog", range(900, 920))
    assert twins.match(range(10)).num_tokens == 0
    twins.commit("B", 10)
    assert twins.match(range(10)).block_ids == (3, 4)
    twins.check()
