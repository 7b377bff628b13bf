"""The worked examples of copy-on-write and prefix caching, number by number."""

import pytest

from kvblocks import BlockCopy, BlockManager, OutOfBlocks, Usage, When

from .helpers import filled


def ref_counts(manager: BlockManager, *blocks: int) -> dict[int, int]:
    return {block: manager.ref_count(block) for block in blocks}


@pytest.fixture
def forked() -> BlockManager:
    """F1 before the append: a prompt of 35 tokens in blocks 10, 11, 12, held by A and B."""
    manager = BlockManager(num_blocks=16, block_size=16)
    filled(manager, "others", 160, first_token=1000)
    filled(manager, "A", 35)
    manager.fork("A", "B")
    return manager


def test_f1_first_writer_of_a_shared_tail_copies_it_and_the_last_writes_in_place(
    forked: BlockManager,
) -> None:
    assert forked.block_table("A").tolist() == [10, 11, 12]
    assert ref_counts(forked, 10, 11, 12) == {10: 2, 11: 2, 12: 2}

    plan = forked.append({"A": [7]})
    assert plan.copies == (BlockCopy(source=12, destination=13, num_tokens=3),)
    assert plan.slot_mapping.tolist() == [13 * 16 + 3]
    assert ref_counts(forked, 10, 11, 12, 13) == {10: 2, 11: 2, 12: 1, 13: 1}

    plan = forked.append({"B": [8]})
    assert (plan.copies, plan.new_blocks) == ((), {})
    assert plan.slot_mapping.tolist() == [12 * 16 + 3]
    forked.check()


def test_f2_shared_blocks_are_counted_once(forked: BlockManager) -> None:
    forked.append({"A": [7]})
    forked.append({"B": [8]})
    forked.free("others")
    usage = forked.usage()
    assert usage == Usage(num_blocks=4, num_slots=64, num_stored_tokens=40)
    assert usage.num_wasted_slots == 24
    without_sharing = sum(len(forked.block_table(s)) for s in "AB") * forked.block_size
    assert without_sharing == 96
    assert without_sharing - usage.num_slots == 32


def test_f3_a_finished_sequences_block_is_reusable_only_after_the_step_in_flight(
    forked: BlockManager,
) -> None:
    step = forked.begin_step()
    forked.append({"A": [7], "B": [8]})
    num_free = forked.stats().num_free_blocks
    forked.free("A")
    assert ref_counts(forked, 10, 11, 13) == {10: 1, 11: 1, 13: 0}
    assert forked.stats().num_free_blocks == num_free
    forked.complete_step(step)
    assert forked.stats().num_free_blocks == num_free + 1
    forked.check()


def test_f4_ten_appends_after_a_fork_copy_once_and_allocate_once() -> None:
    manager = BlockManager(num_blocks=8, block_size=8)
    filled(manager, "A", 22)
    manager.fork("A", "B")
    plans = [manager.append({"A": [100 + i]}) for i in range(10)]

    assert manager.block_table("A").tolist() == [0, 1, 3, 4]
    assert manager.block_table("B").tolist() == [0, 1, 2]
    assert ref_counts(manager, *range(5)) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    assert manager.usage() == Usage(num_blocks=5, num_slots=40, num_stored_tokens=38)
    assert [plan.copies for plan in plans if plan.copies] == [(BlockCopy(2, 3, 6),)]
    assert [plan.new_blocks for plan in plans if plan.new_blocks and not plan.copies] == [
        {"A": (4,)}
    ]
    assert sum(not plan.new_blocks for plan in plans) == 8


def test_f5_a_full_shared_block_is_never_written() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    filled(manager, "A", 8)
    manager.fork("A", "B")
    written = {slot // 4 for s in "ABAB" for slot in manager.append({s: [1, 2, 3]}).slot_mapping}
    assert written.isdisjoint({0, 1})


def test_f6_an_append_that_finds_no_block_changes_nothing() -> None:
    manager = BlockManager(num_blocks=1, block_size=4)
    filled(manager, "A", 4)
    before = manager.state_digest()
    with pytest.raises(OutOfBlocks, match="blocks needed: 1, available: 0; not even") as refused:
        manager.append({"A": [2]})
    assert refused.value.verdict.when is When.NEVER
    assert manager.state_digest() == before
    assert manager.block_table("A").tolist() == [0]


def test_f7_without_prefix_caching_all_blocks_come_back() -> None:
    manager = BlockManager(num_blocks=8, block_size=4, prefix_caching=False)
    filled(manager, "A", 10)
    manager.fork("A", "B")
    manager.append({"A": 3, "B": 1})
    manager.free("A")
    manager.free("B")
    assert manager.stats().num_free_blocks == 8
    assert not any(manager.ref_count(block) for block in range(8))


def test_p1_a_block_matches_only_behind_the_same_prefix() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate("A", [1, 1, 1, 1, 5, 5, 5, 5, 9])
    manager.append({"A": 9})
    manager.commit("A", 9)
    assert manager.match([1, 1, 1, 1, 5, 5, 5, 5, 9]).num_tokens == 8
    assert manager.match([2, 2, 2, 2, 5, 5, 5, 5, 9]).num_tokens == 0
    assert manager.match([5, 5, 5, 5, 9]).num_tokens == 0


def test_p2_an_unreferenced_cached_block_is_reused_by_reference() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    filled(manager, "A", 9)
    manager.free("A")
    assert ref_counts(manager, 0, 1) == {0: 0, 1: 0}
    allocation = manager.allocate("B", range(9))
    assert allocation.num_cached_tokens == 8
    assert ref_counts(manager, 0, 1) == {0: 1, 1: 1}
    assert manager.num_computed_tokens("B") == 8


def test_p3_cached_blocks_are_reclaimed_before_a_running_sequence_is_refused() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    filled(manager, "old", 8)
    manager.free("old")
    filled(manager, "new", 8, first_token=100)
    assert manager.stats().num_cached_blocks == 2
    assert manager.can_append({"new": 8}).is_now
    manager.append({"new": 8})
    assert manager.stats().num_evicted_blocks == 2
    assert manager.match(range(9)).num_tokens == 0
    manager.check()


def test_the_trace_of_the_contract() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    assert manager.allocate("A", range(6)).block_ids == (0, 1)
    for chunk in (4, 2):
        step = manager.begin_step()
        manager.append({"A": chunk})
        manager.complete_step(step)
    manager.commit("A", 6)
    manager.fork("A", "B")
    assert ref_counts(manager, 0, 1) == {0: 2, 1: 2}

    first = manager.begin_step()
    assert manager.append({"A": [6]}).copies == (BlockCopy(1, 2, 2),)
    assert manager.block_table("A").tolist() == [0, 2]
    assert manager.append({"B": [60]}).copies == ()
    second = manager.begin_step()
    plan = manager.append({"B": 3})
    assert plan.slot_mapping.tolist() == [7, 12, 13]
    assert plan.new_blocks == {"B": (3,)}
    manager.truncate("B", 8)
    assert manager.stats().num_fenced_blocks == 1

    manager.free("A")
    assert manager.stats().num_fenced_blocks == 2
    manager.complete_step(first)
    assert manager.stats().num_fenced_blocks == 1
    manager.complete_step(second)
    assert manager.stats().num_free_blocks == 6
    manager.commit("B", 8, [61])
    manager.free("B")
    assert manager.stats().num_cached_blocks == 2
    assert manager.match([0, 1, 2, 3, 4, 5, 60, 61, 0]).block_ids == (0, 1)
    manager.check()
