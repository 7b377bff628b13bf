"""Swapping: sequences go to host blocks and come back, several at once, all or nothing."""

import pytest

from kvblocks import (
    BlockManager,
    BlockSwap,
    InvalidConfig,
    InvalidSwap,
    OutOfBlocks,
    SequenceExists,
    UnknownSequence,
    When,
)

from .helpers import filled, refused


def manager_of(
    num_blocks: int = 8, num_host_blocks: int = 8, *, caching: bool = True
) -> BlockManager:
    return BlockManager(num_blocks, 4, prefix_caching=caching, num_host_blocks=num_host_blocks)


def host_states(manager: BlockManager) -> tuple[int, int, int]:
    stats = manager.stats()
    return stats.num_free_host_blocks, stats.num_held_host_blocks, stats.num_fenced_host_blocks


# ── out ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_blocks_of_computed_positions_move_and_capacity_beyond_is_given_back() -> None:
    manager = manager_of(caching=False)
    manager.allocate("A", range(6), num_lookahead_tokens=10)
    manager.append({"A": 6})
    manager.commit("A", 6)
    assert manager.swap_out(["A"]) == (BlockSwap(0, 0), BlockSwap(1, 1))
    assert manager.stats().num_free_blocks == 8
    assert host_states(manager) == (6, 2, 0)


def test_who_is_swapped_out_is_still_there() -> None:
    manager = manager_of()
    filled(manager, "A", 6)
    hashes = manager.block_hashes("A")
    manager.swap_out(["A"])
    assert "A" in manager
    assert manager.seq_ids == ("A",)
    assert manager.is_swapped("A")
    assert manager.num_computed_tokens("A") == manager.num_committed_tokens("A") == 6
    assert manager.block_hashes("A") == hashes
    with refused(manager, SequenceExists):
        manager.allocate("A", [1])


def test_full_blocks_stay_in_the_prefix_cache() -> None:
    manager = manager_of()
    filled(manager, "A", 6)
    manager.swap_out(["A"])
    assert manager.match(range(6)).block_ids == (0,)
    assert manager.stats().num_cached_blocks == 1


def test_a_block_that_several_share_is_one_host_block() -> None:
    manager = manager_of(caching=False)
    filled(manager, "A", 6)
    manager.fork("A", "B")
    assert manager.swap_out("AB") == (BlockSwap(0, 0), BlockSwap(1, 1))
    manager.free("A")
    assert host_states(manager) == (6, 2, 0)
    manager.free("B")
    assert host_states(manager) == (8, 0, 0)


def test_content_that_is_on_the_host_is_not_copied_again() -> None:
    manager = manager_of()
    filled(manager, "A", [1, 2, 3, 4, 5])
    filled(manager, "B", [1, 2, 3, 4, 6])
    assert manager.swap_out("A") == (BlockSwap(0, 0), BlockSwap(1, 1))
    assert manager.swap_out("B") == (BlockSwap(2, 2),)
    assert host_states(manager) == (5, 3, 0)


def test_equal_tokens_of_two_salts_are_two_host_blocks() -> None:
    manager = manager_of()
    filled(manager, "A", 4, salt="a")
    filled(manager, "B", 4, salt="b")
    assert len(manager.swap_out("A")) == len(manager.swap_out("B")) == 1
    assert host_states(manager) == (6, 2, 0)


def test_what_a_reset_has_forgotten_is_not_found_on_the_host() -> None:
    manager = manager_of()
    filled(manager, "A", 4)
    manager.swap_out("A")
    manager.reset_prefix_cache()
    filled(manager, "B", 4)
    assert len(manager.swap_out("B")) == 1
    assert manager.swap_in("B") == ()
    assert len(manager.swap_in("A")) == 1
    assert manager.block_table("A") != manager.block_table("B")


def test_a_decode_batch_goes_on_without_the_row() -> None:
    manager = manager_of()
    filled(manager, "A", 3)
    filled(manager, "B", 3)
    batch = manager.decode_batch("AB")
    batch.append()
    batch.commit([7, 8])
    manager.swap_out("A")
    assert batch.seq_ids == ("B",)
    manager.swap_in("A")
    assert manager.num_computed_tokens("A") == 4
    manager.check()


# ── in ───────────────────────────────────────────────────────────────────────────────────────────


def test_who_comes_back_goes_on_as_before() -> None:
    manager = manager_of(caching=False)
    filled(manager, "A", 6)
    manager.swap_out("A")
    filled(manager, "other", 4)
    swaps = manager.swap_in("A")
    table = manager.block_table("A")
    assert swaps == (BlockSwap(0, table[0]), BlockSwap(1, table[1]))
    assert manager.append({"A": 1}).slot_mapping.tolist() == [table[1] * 4 + 2]


def test_content_that_is_in_the_prefix_cache_is_not_copied() -> None:
    manager = manager_of()
    filled(manager, "A", 9)
    manager.swap_out("A")
    assert manager.swap_in("A") == (BlockSwap(2, 2),)
    assert manager.block_table("A").tolist() == [0, 1, 2]


def test_what_comes_back_can_be_found() -> None:
    manager = manager_of(num_blocks=3)
    filled(manager, "A", 9)
    manager.swap_out("A")
    filled(manager, "other", 12, first_token=100)  # evicts all of it
    manager.free("other")
    assert len(manager.swap_in("A")) == 3
    assert manager.match(range(9)).block_ids == tuple(manager.block_table("A")[:2])


@pytest.mark.parametrize("caching", [True, False])
def test_what_was_shared_is_shared_again(*, caching: bool) -> None:
    manager = manager_of(num_blocks=4, caching=caching)
    filled(manager, "A", 6)
    manager.fork("A", "B")
    manager.swap_out("AB")
    filled(manager, "other", 16, first_token=100)
    manager.free("other")
    assert len(manager.swap_in("AB")) == 2
    assert manager.block_table("A") == manager.block_table("B")
    assert len(manager.append({"A": 1, "B": 1}).copies) == 1  # the tail is shared still


# ── verdicts and fences ──────────────────────────────────────────────────────────────────────────


def test_too_few_host_blocks_refuse_all() -> None:
    manager = manager_of(num_host_blocks=3)
    filled(manager, "A", 8)
    filled(manager, "B", 8, first_token=50)
    verdict = manager.can_swap_out("AB")
    assert (verdict.when, verdict.pool) == (When.NEVER, "host")
    with refused(manager, OutOfBlocks, "host blocks needed: 4, available: 3"):
        manager.swap_out("AB")
    manager.swap_out("A")
    assert manager.can_swap_out("B").when is When.LATER
    assert str(manager.can_swap_out("B")).endswith("1 short until swapped sequences are freed")


def test_without_host_blocks_nobody_is_ever_swapped_out() -> None:
    manager = BlockManager(4)
    filled(manager, "A", 4)
    assert manager.can_swap_out("A").when is When.NEVER
    assert "not even freeing every swapped sequence would do" in str(manager.can_swap_out("A"))


def test_too_few_device_blocks_refuse_all() -> None:
    manager = manager_of(num_blocks=3, caching=False)
    filled(manager, "A", 8)
    manager.swap_out("A")
    filled(manager, "B", 8)
    with refused(manager, OutOfBlocks) as caught:
        manager.swap_in("A")
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict == manager.can_swap_in("A")
    assert caught.value.verdict.when is When.LATER


def test_several_that_could_never_be_here_together_are_refused_for_good() -> None:
    manager = manager_of(num_blocks=3)
    for name in "AB":
        filled(manager, name, 8, first_token=ord(name))
        manager.swap_out(name)
    assert manager.can_swap_in("AB").when is When.NEVER
    assert manager.can_swap_in("A").when is When.NOW


def test_blocks_that_are_left_wait_for_the_step() -> None:
    manager = manager_of(num_blocks=2)
    filled(manager, "A", 8)
    step = manager.begin_step()
    manager.swap_out("A")
    verdict = manager.can_allocate(range(100, 104))
    assert (verdict.when, verdict.step) == (When.AFTER_STEP, step)
    manager.complete_step(step)
    assert manager.can_allocate(range(100, 104)).is_now


def test_host_blocks_that_are_left_wait_for_the_step() -> None:
    manager = manager_of(num_host_blocks=2, caching=False)
    filled(manager, "A", 8)
    filled(manager, "B", 8)
    manager.swap_out("A")
    step = manager.begin_step()
    manager.swap_in("A")
    assert host_states(manager) == (0, 0, 2)
    verdict = manager.can_swap_out("B")
    assert (verdict.when, verdict.step) == (When.AFTER_STEP, step)
    assert str(verdict).endswith(f"enough once step {step} completes")
    manager.complete_step(step)
    assert manager.swap_out("B")


def test_two_open_steps_give_host_blocks_back_one_by_one() -> None:
    manager = manager_of(num_host_blocks=2, caching=False)
    for name in "AB":
        filled(manager, name, 4)
    filled(manager, "C", 8)
    manager.swap_out("AB")
    manager.begin_step()
    manager.swap_in("A")
    second = manager.begin_step()
    manager.swap_in("B")
    assert manager.can_swap_out("C").step == second


def test_who_goes_out_may_come_back_in_the_same_step() -> None:
    manager = manager_of(caching=False)
    filled(manager, "A", 4)
    manager.begin_step()
    assert manager.swap_out("A") == (BlockSwap(0, 0),)
    (swap,) = manager.swap_in("A")
    assert swap.destination != 0  # its old block is read by the step


def test_a_block_that_the_open_step_brings_does_not_go_out_in_it() -> None:
    manager = manager_of(caching=False)
    filled(manager, "A", 4)
    manager.swap_out("A")
    step = manager.begin_step()
    manager.swap_in("A")
    with refused(manager, InvalidSwap, "swap it out in a later step"):
        manager.swap_out("A")
    manager.complete_step(step)
    assert manager.swap_out("A")


def test_a_block_that_the_open_step_copies_to_does_not_go_out_in_it() -> None:
    manager = manager_of()
    filled(manager, "A", 6)
    manager.fork("A", "B")
    manager.begin_step()
    assert manager.append({"A": [7]}).copies
    manager.truncate("A", 6)
    with refused(manager, InvalidSwap):
        manager.swap_out("A")
    manager.swap_out("B")
    manager.begin_step()
    assert manager.swap_out("A")


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


def test_what_is_computed_must_be_committed() -> None:
    manager = manager_of()
    filled(manager, "A", 4)
    manager.append({"A": [9]})
    with refused(manager, InvalidSwap, "must have committed = computed to be swapped out, got 4 "):
        manager.swap_out("A")


def test_a_sequence_is_swapped_once_in_a_call() -> None:
    manager = manager_of()
    filled(manager, "A", 4)
    with refused(manager, InvalidSwap, "got 'A' again"):
        manager.swap_out("AA")


def test_who_is_not_there_cannot_be_swapped() -> None:
    manager = manager_of()
    filled(manager, "A", 4)
    with refused(manager, UnknownSequence):
        manager.swap_out("AX")
    with refused(manager, UnknownSequence):
        manager.swap_in("X")
    with refused(manager, InvalidSwap, "must be swapped out to be swapped in"):
        manager.swap_in("A")


def test_who_is_swapped_out_is_asked_nothing_of_blocks() -> None:
    manager = manager_of()
    filled(manager, "A", 4)
    filled(manager, "B", 4)
    manager.swap_out("A")
    for call in (
        lambda: manager.block_table("A"),
        lambda: manager.append({"A": 1}),
        lambda: manager.append({"B": 1, "A": 1}),
        lambda: manager.commit("A", 4),
        lambda: manager.truncate("A", 4),
        lambda: manager.fork("A", "C"),
        lambda: manager.decode_batch("BA"),
        lambda: manager.swap_out("A"),
    ):
        with refused(manager, InvalidSwap, "'A' is swapped out: swap it in first"):
            call()


def test_nobody_is_a_swap_that_changes_nothing() -> None:
    manager = manager_of()
    before = manager.state_digest()
    assert manager.swap_out([]) == manager.swap_in([]) == ()
    assert manager.state_digest() == before


def test_num_host_blocks_must_not_be_negative() -> None:
    with pytest.raises(InvalidConfig, match="num_host_blocks must not be negative, got -1"):
        manager_of(num_host_blocks=-1)
