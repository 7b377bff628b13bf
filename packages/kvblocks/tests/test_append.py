"""The step protocol: what append plans, what commit takes, and what truncate leaves."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvblocks import (
    BlockCopy,
    BlockManager,
    InvalidBatch,
    InvalidLength,
    InvalidTokens,
    OutOfBlocks,
    SequenceExists,
    UnknownSequence,
    When,
)

from .helpers import filled, refused


@pytest.fixture
def manager() -> BlockManager:
    """A of 6 tokens in blocks 0 and 1, B of 3 in block 2, of 8 blocks of 4."""
    manager = BlockManager(8, 4)
    filled(manager, "A", 6)
    filled(manager, "B", 3, first_token=100)
    return manager


# ── what is planned ──────────────────────────────────────────────────────────────────────────


def test_slots_follow_the_order_of_the_batch(manager: BlockManager) -> None:
    assert manager.append({"B": [1], "A": [2, 3]}).slot_mapping.tolist() == [11, 6, 7]


def test_slots_cross_a_block_boundary(manager: BlockManager) -> None:
    plan = manager.append({"A": [1, 2, 3, 4]})
    assert plan.slot_mapping.tolist() == [6, 7, 12, 13]
    assert plan.new_blocks == {"A": (3,)}


def test_slots_are_int64_and_tables_int32(manager: BlockManager) -> None:
    assert manager.append({"A": 1}).slot_mapping.itemsize == 8
    assert manager.block_table("A").itemsize == 4


def test_a_block_is_taken_only_past_capacity(manager: BlockManager) -> None:
    assert manager.append({"A": 2}).new_blocks == {}
    assert manager.append({"A": 1}).new_blocks == {"A": (3,)}


def test_a_prompt_can_be_appended_in_chunks() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("A", range(10))
    chunks = [manager.append({"A": n}) for n in (3, 5, 2)]
    assert [slot for plan in chunks for slot in plan.slot_mapping] == list(range(10))
    assert not any(plan.new_blocks for plan in chunks)


def test_an_empty_batch_is_an_empty_plan(manager: BlockManager) -> None:
    assert manager.can_append({}).is_now
    plan = manager.append({})
    assert (len(plan.slot_mapping), plan.copies, plan.new_blocks) == (0, (), {})


def test_a_block_table_is_a_copy(manager: BlockManager) -> None:
    manager.block_table("A")[0] = 7
    assert manager.block_table("A").tolist() == [0, 1]


def test_a_view_of_a_block_table_does_not_lock_the_manager(manager: BlockManager) -> None:
    with memoryview(manager.block_table("A")):
        manager.append({"A": 3})


# ── all or nothing ───────────────────────────────────────────────────────────────────────────


def failing() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError


def test_a_batch_that_does_not_fit_as_a_whole_changes_nothing(manager: BlockManager) -> None:
    assert manager.can_append({"A": 18}).is_now
    with refused(manager, OutOfBlocks, "needed: 6, available: 5"):
        manager.append({"A": 18, "B": 6})
    assert manager.stats().num_refusals == 1


def test_a_bad_last_entry_undoes_the_batch(manager: BlockManager) -> None:
    with refused(manager, UnknownSequence):
        manager.append({"A": 1, "B": 1, "C": 1})
    with refused(manager, InvalidTokens):
        manager.append({"A": 1, "B": [-1]})
    with refused(manager, InvalidLength):
        manager.append({"A": 1, "B": 0})


def test_an_iterable_that_raises_midway_changes_nothing(manager: BlockManager) -> None:
    with refused(manager, ZeroDivisionError):
        manager.append({"A": [1], "B": failing()})
    with refused(manager, ZeroDivisionError):
        manager.allocate("C", failing())
    manager.append({"A": 1})
    with refused(manager, ZeroDivisionError):
        manager.commit("A", 7, failing())


def test_a_used_up_generator_is_refused(manager: BlockManager) -> None:
    tokens = iter([1, 2])
    assert manager.can_append({"A": tokens}).is_now
    with refused(manager, InvalidLength, "must append at least 1 token, got 0"):
        manager.append({"A": tokens})


def test_all_entries_are_read_before_any_is_judged(manager: BlockManager) -> None:
    def freeing() -> Iterator[int]:
        manager.free("A")
        yield 1

    with pytest.raises(UnknownSequence):
        manager.append({"A": [1], "B": freeing()})
    manager.check()
    assert manager.num_computed_tokens("B") == 3


def test_a_prompt_is_read_before_its_name_is_taken(manager: BlockManager) -> None:
    def allocating() -> Iterator[int]:
        manager.allocate("C", [1])
        yield 1

    with pytest.raises(ValueError, match="'C' exists"):
        manager.allocate("C", allocating())
    manager.check()


def test_late_ids_are_read_before_the_lengths_are_judged(manager: BlockManager) -> None:
    def truncating() -> Iterator[int]:
        manager.truncate("A", 6)
        yield 1

    manager.append({"A": 1})
    with pytest.raises(InvalidLength, match="6 <= 7 <= 6"):
        manager.commit("A", 7, truncating())
    manager.check()


@pytest.mark.parametrize("count", [10**9, 10**30])
def test_a_huge_count_is_refused_at_once(manager: BlockManager, count: int) -> None:
    with refused(manager, OutOfBlocks) as caught:
        manager.append({"A": count})
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict.when is When.NEVER
    assert caught.value.verdict.num_needed_blocks == (count + 6 + 3) // 4 - 2


class Two:
    """An integer of another library, such as NumPy's."""

    def __index__(self) -> int:
        return 2


def test_a_number_may_be_any_integer_type() -> None:
    number: Any = Two()
    manager = BlockManager(number, number)
    manager.allocate("A", [1, 2, 3])
    assert len(manager.append({"A": number}).slot_mapping) == 2
    manager.append({"A": 1})
    manager.truncate("A", number)
    manager.commit("A", number)
    manager.begin_step()
    manager.begin_step()
    manager.complete_step(number)
    lengths = manager.num_computed_tokens("A"), manager.num_committed_tokens("A")
    assert {type(n) for n in (*lengths, manager.num_blocks, manager.block_size)} == {int}


# ── ids ──────────────────────────────────────────────────────────────────────────────────────


def test_known_ids_may_be_repeated_and_continued() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", [5, 6, 7])
    manager.append({"A": [5, 6]})
    manager.append({"A": [7, 8, 9]})
    manager.commit("A", 5)
    assert manager.match([5, 6, 7, 8, 0]).num_tokens == 4


def test_ids_that_contradict_the_prompt_are_refused() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", [5, 6, 7])
    with refused(manager, InvalidTokens, "sequence 'A' has 6 at position 1, got 9"):
        manager.append({"A": [5, 9, 7]})


def test_late_ids_come_with_commit(manager: BlockManager) -> None:
    manager.append({"A": 3})
    manager.commit("A", 8, [6, 7, 8])
    assert manager.num_committed_tokens("A") == 8
    assert manager.match(range(9)).num_tokens == 8
    manager.commit("A", 9)


def test_late_ids_may_come_in_parts(manager: BlockManager) -> None:
    manager.append({"A": 3})
    manager.commit("A", 7, [6])
    manager.commit("A", 9, [7, 8])
    assert manager.match([*range(8), 0]).num_tokens == 8


def test_committed_positions_need_ids(manager: BlockManager) -> None:
    manager.append({"A": 3})
    with refused(manager, InvalidTokens, "known token ids: 7 of 8 are known"):
        manager.commit("A", 8, [6])


def test_late_ids_may_not_go_past_what_is_computed(manager: BlockManager) -> None:
    manager.append({"A": 1})
    with refused(manager, InvalidTokens, "computed 7 positions, got ids up to 8"):
        manager.commit("A", 7, [6, 7])


def test_late_ids_cannot_replace_those_of_the_prompt() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("A", range(8))
    manager.append({"A": 4})
    with refused(manager, InvalidTokens):
        manager.commit("A", 4, [9])


def test_ids_cannot_follow_unknown_ones(manager: BlockManager) -> None:
    manager.append({"A": 1})
    with refused(manager, InvalidTokens, "'A' has 7 computed positions but 6 known token ids"):
        manager.append({"A": [1]})
    manager.append({"A": 1})
    manager.commit("A", 8, [6, 7])
    manager.append({"A": [8]})


# ── lengths ──────────────────────────────────────────────────────────────────────────────────


def test_commit_stays_between_committed_and_computed(manager: BlockManager) -> None:
    with refused(manager, InvalidLength, "commit needs .* got 6 <= 5 <= 6"):
        manager.commit("A", 5)
    with refused(manager, InvalidLength, "commit needs .* got 6 <= 7 <= 6"):
        manager.commit("A", 7)
    manager.commit("A", 6)


def test_truncate_stays_between_committed_and_computed(manager: BlockManager) -> None:
    with refused(manager, InvalidLength, "truncate needs .* got 6 <= 5 <= 6"):
        manager.truncate("A", 5)
    with refused(manager, InvalidLength, "truncate needs .* got 6 <= 7 <= 6"):
        manager.truncate("A", 7)
    manager.truncate("A", 6)


def test_rejected_drafts_give_their_blocks_back_and_are_never_published(
    manager: BlockManager,
) -> None:
    plan = manager.append({"A": [6, 71, 72, 73, 74]})
    assert plan.new_blocks == {"A": (3,)}
    manager.truncate("A", 7)
    assert manager.ref_count(3) == 0
    manager.append({"A": [7]})
    manager.commit("A", 8)
    assert manager.match([*range(6), 6, 71, 0]).num_tokens == 4
    assert manager.match([*range(8), 0]).num_tokens == 8


def test_rejected_drafts_are_written_over_in_place(manager: BlockManager) -> None:
    manager.append({"A": [6, 7]})
    manager.truncate("A", 6)
    assert manager.append({"A": [8]}).slot_mapping.tolist() == [6]


def test_unknown_drafts_can_be_truncated(manager: BlockManager) -> None:
    manager.append({"A": 3})
    manager.truncate("A", 7)
    with refused(manager, InvalidTokens, "6 of 7 are known"):
        manager.commit("A", 7)
    manager.commit("A", 7, [6])


def test_truncating_a_fork_leaves_the_other_alone(manager: BlockManager) -> None:
    manager.fork("A", "C")
    manager.append({"C": [1, 2, 3]})
    manager.truncate("C", 6)
    assert manager.block_table("A").tolist() == [0, 1]
    assert manager.append({"A": [7]}).slot_mapping.tolist() == [6]


def test_truncating_within_the_prompt_forgets_the_rest_of_it() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("A", range(10))
    manager.append({"A": 5})
    manager.truncate("A", 5)
    assert manager.block_table("A").tolist() == [0, 1]
    manager.append({"A": [99]})
    assert manager.num_computed_tokens("A") == 6


@pytest.mark.parametrize("entry", [0, -1, []])
def test_an_entry_schedules_at_least_one_token(
    manager: BlockManager, entry: int | list[int]
) -> None:
    with refused(manager, InvalidLength, "sequence 'A' must append at least 1 token, got"):
        manager.append({"A": entry})


# ── token ids that nobody needs ──────────────────────────────────────────────────────────────


def test_without_a_prefix_cache_a_count_is_a_prompt() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    assert manager.can_allocate(9).num_needed_blocks == 3
    assert manager.allocate("A", 9).block_ids == (0, 1, 2)
    manager.append({"A": 9})
    manager.commit("A", 9)
    manager.fork("A", "B")
    assert manager.append({"A": 1, "B": 1}).copies == (BlockCopy(2, 3, 1),)
    manager.commit("A", 10)
    assert manager.block_hashes("A") == ()
    manager.check()


def test_with_a_prefix_cache_a_count_is_no_prompt() -> None:
    manager = BlockManager(8, 4)
    with pytest.raises(InvalidTokens, match="tokens must be an iterable of integers"):
        manager.allocate("A", 9)
    with pytest.raises(InvalidTokens, match="a prompt must have at least 1 token, got 0"):
        BlockManager(8, 4, prefix_caching=False).allocate("A", 0)


def test_without_a_prefix_cache_ids_are_read_and_forgotten() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    manager.allocate("A", range(6))
    manager.append({"A": [9, 9]})  # others than were allocated, and nobody compares
    manager.append({"A": 5})
    manager.append({"A": [1]})
    manager.commit("A", 8, [7] * 100)
    assert manager.block_hashes("A") == ()
    with pytest.raises(InvalidTokens, match="token ids must be in"):
        manager.append({"A": [-1]})


@pytest.mark.parametrize("entry", [1, (7,), [7]])
def test_one_token_each_is_what_entries_of_their_own_schedule(entry: int | Sequence[int]) -> None:
    """The passes for common steps against the general one, which generators take."""
    ours, theirs = BlockManager(12, 4), BlockManager(12, 4)
    for manager in (ours, theirs):
        for name, length in (("A", 3), ("B", 4), ("C", 6)):
            filled(manager, name, length, first_token=10 * length)
        manager.begin_step()
    known = () if entry == 1 else [7]
    plan = ours.append(dict.fromkeys("ABC", entry))
    expected = theirs.append({name: 1 if entry == 1 else iter([7]) for name in "ABC"})
    assert plan.slot_mapping == expected.slot_mapping
    assert plan.new_blocks == expected.new_blocks == {"B": (4,)}
    assert ours.state_digest() == theirs.state_digest()
    for manager in (ours, theirs):
        manager.commit("A", 4, () if known else [7])
        manager.free("A")
        assert manager.stats().num_fenced_blocks == 1
    assert ours.state_digest() == theirs.state_digest()
    with pytest.raises(UnknownSequence, match="no sequence 'A'"):
        ours.append(dict.fromkeys("BA", entry))


@pytest.mark.parametrize("entry", [[7], (7, 8), [7, 8]])
def test_one_sequence_goes_on_as_in_a_batch(entry: Sequence[int]) -> None:
    ours, theirs = BlockManager(12, 4), BlockManager(12, 4)
    for manager in (ours, theirs):
        filled(manager, "A", 5)
        manager.begin_step()
    assert ours.append({"A": entry}).slot_mapping == theirs.append({"A": iter(entry)}).slot_mapping
    assert ours.state_digest() == theirs.state_digest()


def test_ids_that_are_known_already_are_compared_by_all_passes() -> None:
    manager = BlockManager(12, 4)
    manager.allocate("A", [1, 2, 3])
    manager.allocate("B", [4, 5, 6])
    for batch in ({"A": [9]}, {"A": [9], "B": [4]}, {"A": (1,), "B": (9,)}):
        with refused(manager, InvalidTokens, "token ids must agree with the known ones"):
            manager.append(batch)
    assert manager.append({"A": [1], "B": [4]}).slot_mapping.tolist() == [0, 4]
    manager.check()


@pytest.mark.parametrize("batch", [[("A", 1)], {"A"}, "A", None])
def test_a_batch_is_a_mapping(manager: BlockManager, batch: Any) -> None:
    for call in (manager.append, manager.can_append, manager.reserve, manager.can_reserve):
        with refused(manager, InvalidBatch, "a batch must be a mapping of sequence ids"):
            call(batch)


def test_a_count_is_admitted_as_its_ids_would_be() -> None:
    """The pass for plain counts against the general one, which ids take."""
    ours, theirs = (BlockManager(6, 4, prefix_caching=False) for _ in range(2))
    ours.allocate("A", 9, num_lookahead_tokens=4)
    theirs.allocate("A", range(9), num_lookahead_tokens=4)
    ours.allocate("B", 1, priority=2)
    theirs.allocate("B", range(1), priority=2)
    assert ours.state_digest() == theirs.state_digest()
    assert ours.stats() == theirs.stats()
    with refused(ours, OutOfBlocks, "blocks needed: 2, available: 1"):
        ours.allocate("C", 5)
    with refused(ours, SequenceExists, "a sequence 'A' exists already"):
        ours.allocate("A", 1)
    ours.check()
