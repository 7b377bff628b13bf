"""Reservations: blocks for positions to come, of several sequences at once, that nobody else takes."""

import pytest

from kvblocks import (
    BlockCopy,
    BlockManager,
    InvalidBatch,
    InvalidConfig,
    InvalidLength,
    OutOfBlocks,
    UnknownSequence,
    When,
)

from .helpers import filled, interrupted, refused


def test_with_reservations_one_sequence_can_always_finish() -> None:
    manager = BlockManager(7, 4, prefix_caching=False)
    filled(manager, "A", 16)
    manager.reserve({"A": 20})
    assert manager.can_allocate(12, num_lookahead_tokens=4).when is When.LATER  # B: 3 now, 1 later
    manager.append({"A": 4})
    manager.free("A")
    manager.allocate("B", 12)
    assert manager.reserve({"B": 16}).new_blocks.keys() == {"B"}


def test_two_that_could_never_both_finish_are_told_so() -> None:
    manager = BlockManager(7, 4, prefix_caching=False)
    filled(manager, "A", 16)
    filled(manager, "B", 12)
    assert manager.can_reserve({"A": 20, "B": 16}).when is When.NEVER
    assert manager.can_reserve({"A": 20}).when is When.LATER
    with refused(manager, OutOfBlocks):
        manager.reserve({"A": 16, "B": 16})


def test_a_need_that_others_could_make_room_for_is_not_never() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    filled(manager, "A", 8)
    manager.fork("A", "B")
    filled(manager, "other", 20)
    assert (
        manager.can_reserve({"A": 20, "B": 20}).when is When.LATER
    )  # the shared blocks count once


def test_pinned_blocks_of_others_leave_no_room() -> None:
    manager = BlockManager(6, 4)
    filled(manager, "P", 9)
    manager.pin("system", range(8))
    manager.free("P")
    filled(manager, "A", 4, first_token=50)
    assert manager.can_reserve({"A": 16}).is_now
    assert manager.can_reserve({"A": 20}).when is When.NEVER
    manager.allocate("B", [*range(8), 99])
    assert (
        manager.can_reserve({"B": 24}).when is When.LATER
    )  # two of its blocks are the pinned ones


def test_a_reservation_that_is_refused_takes_nothing_for_anybody() -> None:
    manager = BlockManager(3, 4)
    filled(manager, "A", 4)
    filled(manager, "B", 4, first_token=50)
    with refused(manager, OutOfBlocks) as caught:
        manager.reserve({"A": 8, "B": 8})
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict == manager.can_reserve({"A": 8, "B": 8})


def test_who_has_reserved_appends_in_a_full_pool() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 3)
    manager.reserve({"A": 8})
    filled(manager, "other", 8, first_token=50)
    assert manager.append({"A": 5}).new_blocks == {}


def test_truncate_keeps_what_is_reserved_until_it_is_given_up() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 3)
    manager.reserve({"A": 12})
    manager.append({"A": 9})
    manager.truncate("A", 3)
    assert len(manager.block_table("A")) == 3
    manager.reserve({"A": 0})
    assert len(manager.block_table("A")) == 3
    manager.truncate("A", 3)
    assert len(manager.block_table("A")) == 1


def test_a_shared_tail_is_exchanged_when_it_is_reserved() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 3)
    manager.fork("A", "B")
    answer = manager.reserve({"A": 8, "B": 4})
    assert answer.copies == (BlockCopy(0, 1, 3),)
    assert answer.new_blocks == {"A": (1, 2)}  # B is the last that holds the tail
    assert manager.append({"A": 5, "B": 1}).copies == ()


def test_the_source_of_a_reservations_copy_stays_until_the_step_completes() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 3)
    manager.fork("A", "B")
    step = manager.begin_step()
    manager.reserve({"A": 4})
    manager.free("B")
    assert manager.can_allocate([9]).step == step


def test_a_fork_does_not_share_what_is_reserved() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 6)
    manager.reserve({"A": 16})
    manager.fork("A", "B")
    assert manager.block_table("B") == manager.block_table("A")[:2]
    manager.free("A")
    assert manager.stats().num_held_blocks == 2


def test_who_has_reserved_and_is_forked_reserves_again() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 3)
    manager.reserve({"A": 8})
    manager.fork("A", "B")
    assert manager.can_append({"A": 1}).num_needed_blocks == 1  # for the tail that B holds too
    manager.reserve({"A": 8})
    assert manager.can_append({"A": 5}).num_needed_blocks == 0


def test_who_is_swapped_out_gives_its_reservation_up() -> None:
    manager = BlockManager(4, 4, num_host_blocks=4)
    filled(manager, "A", 3)
    manager.reserve({"A": 16})
    assert len(manager.swap_out("A")) == 1
    assert manager.stats().num_free_blocks == 4
    manager.swap_in("A")
    assert len(manager.block_table("A")) == 1


def test_rows_of_a_decode_batch_begin_the_blocks_that_they_reserved() -> None:
    manager = BlockManager(3, 2)
    filled(manager, "A", 1)
    manager.reserve({"A": 4})
    table = manager.block_table("A")
    batch = manager.decode_batch("A")
    filled(manager, "other", 2, first_token=50)
    slots = []
    for _ in range(3):
        assert batch.can_append().is_now
        plan = batch.append()
        slots += plan.slot_mapping.tolist()
        assert plan.new_blocks == {}
        batch.commit([7])
    assert slots == [2 * table[0] + 1, 2 * table[1], 2 * table[1] + 1]
    assert batch.can_append().when is When.LATER


def test_a_shared_tail_before_reserved_blocks_is_exchanged_by_a_batch() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 3)
    manager.reserve({"A": 12})
    manager.fork("A", "B")
    plan = manager.decode_batch("A").append()
    assert [copy.num_tokens for copy in plan.copies] == [3]
    assert plan.slot_mapping[0] == manager.block_table("A")[0] * 4 + 3
    manager.check()


def test_reserved_blocks_that_a_fork_holds_too_keep_a_sequence_out_of_a_batch() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    manager.allocate("A", 12)
    manager.append({"A": 3})
    manager.commit("A", 3)
    manager.fork("A", "B")  # with the rest of its prompt
    manager.reserve({"B": 3})
    with refused(manager, InvalidBatch):
        manager.decode_batch("B")
    manager.reserve({"B": 12})
    assert manager.decode_batch("B").seq_ids == ("B",)


def test_a_batch_goes_on_without_who_gets_blocks() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 3)
    filled(manager, "B", 3)
    batch = manager.decode_batch("AB")
    manager.reserve({"A": 12, "B": 4})
    assert batch.seq_ids == ("B",)


def test_what_is_no_reservation_is_refused() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 3)
    with refused(manager, InvalidLength, "'A' must reserve 0 or more positions, got -1"):
        manager.reserve({"A": -1})
    with refused(manager, UnknownSequence):
        manager.reserve({"A": 8, "X": 8})
    with refused(manager, TypeError):
        manager.reserve({"A": 8.0})  # type: ignore[dict-item]  # that is the point
    with refused(manager, ZeroDivisionError):
        manager.reserve(dict.fromkeys(interrupted([1]), 8))


def test_windows_are_not_reserved() -> None:
    manager = BlockManager(8, 4, windows=[4])
    filled(manager, "A", 3)
    with refused(manager, InvalidConfig, r"reserve needs no windows, got \(4,\)"):
        manager.reserve({"A": 8})


@pytest.mark.parametrize("lengths", [{}, {"A": 0}, {"A": 3}])
def test_what_is_there_already_takes_no_blocks(lengths: dict[str, int]) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 3)
    assert manager.reserve(lengths) == ((), {})
    assert manager.stats().num_held_blocks == 1
