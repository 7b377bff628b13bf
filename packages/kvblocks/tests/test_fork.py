"""Forks: who copies a shared block and who writes in place, and what may be forked at all."""

import pytest

from kvblocks import BlockCopy, BlockManager, InvalidLength, InvalidTokens, OutOfBlocks

from .helpers import filled, refused


@pytest.fixture
def manager() -> BlockManager:
    """A of 6 tokens in blocks 0 and 1, B of 3 in block 2, of 8 blocks of 4."""
    manager = BlockManager(8, 4)
    filled(manager, "A", 6)
    filled(manager, "B", 3, first_token=100)
    return manager


# ── copy-on-write in a batch ─────────────────────────────────────────────────────────────────


def test_of_several_forks_in_a_batch_all_but_the_last_copy(manager: BlockManager) -> None:
    for name in "CD":
        manager.fork("A", name)
    plan = manager.append({"D": [1], "A": [2], "C": [3]})
    assert plan.copies == (BlockCopy(1, 3, 2), BlockCopy(1, 4, 2))
    assert plan.slot_mapping.tolist() == [14, 18, 6]
    assert [manager.block_table(name)[1] for name in "DAC"] == [3, 4, 1]


def test_while_a_holder_is_not_in_the_batch_every_fork_copies(manager: BlockManager) -> None:
    for name in "CD":
        manager.fork("A", name)
    plan = manager.append({"D": [1], "A": [2]})
    assert plan.copies == (BlockCopy(1, 3, 2), BlockCopy(1, 4, 2))
    assert manager.stats().num_copies == 2
    assert manager.ref_count(1) == 1


def test_no_destination_of_a_plan_is_another_copys_source(manager: BlockManager) -> None:
    for name in "CDE":
        manager.fork("A", name)
    manager.fork("B", "F")
    copies = manager.append(dict.fromkeys("FEDCBA", 1)).copies
    assert {copy.source for copy in copies}.isdisjoint(copy.destination for copy in copies)


def test_a_fork_of_a_fork_shares_with_both(manager: BlockManager) -> None:
    manager.fork("A", "C")
    manager.fork("C", "D")
    assert manager.stats().num_forks == 2
    assert [manager.ref_count(block) for block in (0, 1)] == [3, 3]
    manager.append({"C": [1]})
    assert [manager.ref_count(block) for block in (0, 1, 3)] == [3, 2, 1]


def test_a_shared_block_that_holds_nothing_yet_is_replaced_without_a_copy() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", range(16))
    manager.append({"A": 4})
    manager.commit("A", 4)
    manager.fork("A", "B")
    plan = manager.append({"A": 8, "B": 8})
    assert plan.copies == ()
    assert plan.new_blocks == {"A": (4, 5)}
    assert manager.block_table("A").tolist() == [0, 4, 5, 3]
    assert manager.block_table("B").tolist() == [0, 1, 2, 3]


def test_a_copy_takes_only_the_positions_of_the_writer() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", [1, 2, 3])
    manager.append({"A": 1})
    manager.commit("A", 1)
    manager.fork("A", "B")
    assert manager.append({"A": 2, "B": 1}).copies == (BlockCopy(0, 1, 1),)


def test_a_batch_that_has_no_block_for_its_copies_is_refused() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 6)
    manager.fork("A", "B")
    with refused(manager, OutOfBlocks, "needed: 1, available: 0"):
        manager.append({"A": 1, "B": 1})


# ── fork ─────────────────────────────────────────────────────────────────────────────────────


def test_positions_in_flight_cannot_be_forked(manager: BlockManager) -> None:
    manager.append({"A": 1})
    with refused(manager, InvalidLength, "fork needs committed = computed, got 6 and 7"):
        manager.fork("A", "C")
    manager.commit("A", 7, [1])
    manager.fork("A", "C")


def test_forks_cannot_tell_different_late_ids_for_one_position() -> None:
    manager = BlockManager(8, 2)
    filled(manager, "A", 1)
    manager.append({"A": 1})
    with refused(manager, InvalidLength):
        manager.fork("A", "B")


def test_merging_never_parts_a_block_from_its_parent() -> None:
    """B would hold a block behind one that it does not hold, were it forked before the commit."""
    manager = BlockManager(6, 2)
    manager.allocate("A", [1, 1, 2, 2, 3])
    manager.append({"A": 5})
    filled(manager, "X", [1, 1, 9])
    with refused(manager, InvalidLength):
        manager.fork("A", "B")
    manager.commit("A", 5)
    manager.fork("A", "B")
    manager.free("X")
    manager.free("A")
    manager.check()
    manager.allocate("Y", [7, 7, 8, 8])
    manager.append({"Y": 4})
    manager.commit("Y", 4)
    assert manager.match([7, 7, 2, 2, 0]).num_tokens == 2


def test_a_fork_knows_the_rest_of_the_prompt() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", range(8))
    manager.fork("A", "B")
    with refused(manager, InvalidTokens, "'B' has 0 at position 0, got 9"):
        manager.append({"B": [9]})
    assert manager.num_computed_tokens("B") == 0


# ── what is stored ───────────────────────────────────────────────────────────────────────────


def test_usage_counts_positions_of_a_shared_block_once(manager: BlockManager) -> None:
    manager.fork("A", "C")
    manager.fork("B", "D")
    usage = manager.usage()
    assert (usage.num_blocks, usage.num_slots, usage.num_stored_tokens) == (3, 12, 9)
    assert usage.num_wasted_slots == 3
