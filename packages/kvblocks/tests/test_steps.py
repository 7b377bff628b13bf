"""Fences: what an open step reads or writes stays untouched until it completes."""

import pytest

from kvblocks import BlockCopy, BlockManager, InvalidStep, OutOfBlocks, When

from .helpers import filled, refused


def num_states(manager: BlockManager) -> tuple[int, int, int, int]:
    stats = manager.stats()
    return (
        stats.num_free_blocks,
        stats.num_cached_blocks,
        stats.num_held_blocks,
        stats.num_fenced_blocks,
    )


def test_steps_are_numbered_from_one() -> None:
    manager = BlockManager(4)
    assert [manager.begin_step() for _ in range(3)] == [1, 2, 3]


def test_without_a_step_nothing_is_fenced() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    filled(manager, "A", 8)
    manager.free("A")
    assert num_states(manager) == (4, 0, 0, 0)


def test_a_block_freed_in_flight_is_handed_out_only_after_the_step() -> None:
    manager = BlockManager(2, 4)
    manager.allocate("A", range(8))
    step = manager.begin_step()
    manager.append({"A": 8})
    manager.free("A")
    assert num_states(manager) == (0, 0, 0, 2)
    with refused(manager, OutOfBlocks):
        manager.allocate("B", range(4))
    manager.complete_step(step)
    assert num_states(manager) == (2, 0, 0, 0)
    assert manager.allocate("B", range(4)).num_new_blocks == 1


def test_a_running_sequence_waits_for_the_fence_when_every_victim_is_fenced() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    manager.allocate("running", range(4))
    for name in "abc":
        manager.allocate(name, range(4))
    step = manager.begin_step()
    manager.append(dict.fromkeys(("running", *"abc"), 4))
    for name in "abc":
        manager.free(name)
    verdict = manager.can_append({"running": 1})
    assert (verdict.when, verdict.step) == (When.AFTER_STEP, step)
    manager.complete_step(step)
    assert len(manager.append({"running": 1}).new_blocks["running"]) == 1


def test_a_sequence_that_the_open_step_does_not_use_is_not_fenced() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    filled(manager, "idle", 8)
    manager.allocate("busy", range(4))
    manager.begin_step()
    manager.append({"busy": 4})
    manager.free("idle")
    assert num_states(manager) == (3, 0, 1, 0)


def test_a_sequence_of_an_earlier_open_step_waits_for_that_step_only() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    filled(manager, "A", 4)
    first = manager.begin_step()
    manager.append({"A": 1})
    manager.begin_step()
    manager.free("A")
    assert num_states(manager) == (2, 0, 0, 2)
    manager.complete_step(first)
    assert num_states(manager) == (4, 0, 0, 0)


def test_a_sequence_used_by_two_steps_waits_for_the_later() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    manager.allocate("A", range(4))
    first = manager.begin_step()
    manager.append({"A": 2})
    second = manager.begin_step()
    manager.append({"A": 2})
    manager.free("A")
    manager.complete_step(first)
    assert num_states(manager) == (3, 0, 0, 1)
    manager.complete_step(second)
    assert num_states(manager) == (4, 0, 0, 0)


def test_a_sequence_allocated_and_freed_unscheduled_is_not_fenced() -> None:
    manager = BlockManager(4, 4)
    manager.begin_step()
    manager.allocate("A", range(8))
    manager.free("A")
    assert num_states(manager) == (4, 0, 0, 0)


@pytest.mark.parametrize("order", ["ABC", "BAC", "CBA", "CAB"])
def test_a_shared_block_waits_for_the_holder_that_used_it_last(order: str) -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    filled(manager, "A", 4)
    manager.fork("A", "B")
    manager.fork("A", "C")
    for name in "AB":
        manager.begin_step()
        manager.append({name: 1})
    for name in order:
        manager.free(name)
    assert num_states(manager) == (1, 0, 0, 3)
    manager.complete_step(1)
    assert num_states(manager) == (2, 0, 0, 2)
    manager.complete_step(2)
    assert num_states(manager) == (4, 0, 0, 0)


def test_a_copy_source_is_held_until_its_step_completes() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    filled(manager, "A", 2)
    manager.fork("A", "B")
    step = manager.begin_step()
    assert manager.append({"A": 1}).copies == (BlockCopy(0, 1, 2),)
    manager.free("B")
    assert num_states(manager) == (2, 0, 1, 1)
    manager.complete_step(step)
    assert num_states(manager) == (3, 0, 1, 0)


def test_blocks_of_rejected_drafts_wait_for_the_step_that_writes_them() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 4)
    step = manager.begin_step()
    manager.append({"A": 5})
    manager.truncate("A", 5)
    assert num_states(manager) == (1, 0, 2, 1)
    manager.complete_step(step)
    assert num_states(manager) == (2, 0, 2, 0)


def test_a_fenced_committed_block_may_be_matched() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 4)
    manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    assert num_states(manager) == (0, 0, 0, 2)
    assert manager.match(range(5)).block_ids == (0,)
    assert not manager.can_allocate(range(5)).is_now


def test_a_fenced_committed_block_is_never_evicted() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 4)
    manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    with refused(manager, OutOfBlocks):
        manager.allocate("B", [9])


def test_a_matched_fenced_block_given_back_is_fenced_as_before() -> None:
    manager = BlockManager(3, 4)
    filled(manager, "A", 4)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    assert manager.allocate("B", range(5)).num_cached_tokens == 4
    assert num_states(manager) == (0, 0, 2, 1)
    manager.free("B")
    assert num_states(manager) == (1, 0, 0, 2)
    manager.complete_step(step)
    assert num_states(manager) == (2, 1, 0, 0)


def test_a_held_block_survives_the_fence_of_its_former_holder() -> None:
    manager = BlockManager(3, 4)
    filled(manager, "A", 4)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    manager.allocate("B", range(5))
    manager.complete_step(step)
    assert num_states(manager) == (1, 0, 2, 0)
    manager.free("B")
    assert num_states(manager) == (2, 1, 0, 0)


def test_a_block_that_merging_gives_back_waits_for_the_step_in_flight() -> None:
    manager = BlockManager(4, 4)
    for name in "AB":
        manager.allocate(name, range(4))
        manager.append({name: 4})
    manager.commit("A", 4)
    step = manager.begin_step()
    manager.append({"B": 1})
    manager.commit("B", 4)
    assert manager.block_table("B").tolist() == [0, 2]
    assert num_states(manager) == (1, 0, 2, 1)
    manager.complete_step(step)
    assert num_states(manager) == (2, 0, 2, 0)


def test_a_block_that_no_open_step_used_does_not_wait_with_its_prefix() -> None:
    manager = BlockManager(3, 2)
    filled(manager, "A", [1, 2, 3])
    manager.append({"A": [4]})
    manager.allocate("B", [1, 2, 9])
    step = manager.begin_step()
    manager.append({"B": 1})
    manager.free("B")  # the step reads block 0, which A holds too, and writes block 2
    manager.commit("A", 4)
    manager.free("A")
    stats = manager.stats()
    assert (stats.num_fenced_blocks, stats.num_cached_blocks) == (2, 1)
    manager.check()
    manager.complete_step(step)
    assert manager.stats().num_cached_blocks == 2


def test_completing_a_step_completes_all_before_it() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    for name in "AB":
        manager.allocate(name, range(4))
    steps = []
    for name in "AB":
        steps.append(manager.begin_step())
        manager.append({name: 4})
        manager.free(name)
    assert num_states(manager) == (2, 0, 0, 2)
    manager.complete_step(steps[1])
    assert num_states(manager) == (4, 0, 0, 0)


def test_changes_after_all_steps_completed_belong_to_none() -> None:
    manager = BlockManager(4, 4, prefix_caching=False)
    manager.complete_step(manager.begin_step())
    filled(manager, "A", 8)
    manager.free("A")
    assert num_states(manager) == (4, 0, 0, 0)


def test_after_the_fence_tails_are_still_evicted_first() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 13)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    manager.complete_step(step)
    for num_left, name in ((2, "x"), (1, "y"), (0, "z")):
        manager.allocate(name, [99])
        if name == "x":  # took the free block
            assert manager.match(range(13)).num_tokens == 12
            manager.allocate("w", [99])
        assert manager.match(range(13)).num_tokens == num_left * 4
        manager.check()


@pytest.mark.parametrize("step", [0, -1, 3])
def test_a_step_that_was_never_begun_cannot_complete(step: int) -> None:
    manager = BlockManager(4)
    manager.begin_step()
    manager.begin_step()
    with refused(manager, InvalidStep, rf"step must have been begun \(1\.\.2\), got {step}"):
        manager.complete_step(step)


def test_completing_a_step_again_changes_nothing() -> None:
    manager = BlockManager(4)
    for _ in range(2):
        manager.begin_step()
    manager.complete_step(2)
    before = manager.state_digest()
    for step in (1, 2):
        manager.complete_step(step)
        assert manager.state_digest() == before
