"""Groups with windows: what is held, given up, found again and never asked for in vain."""

from collections.abc import Callable
from io import StringIO

import pytest

from kvblocks import (
    BlockCopy,
    BlockManager,
    InvalidBatch,
    InvalidConfig,
    InvariantViolation,
    OutOfBlocks,
    PinLimit,
    UnknownGroup,
    Usage,
    Verdict,
    When,
)
from kvblocks.recording import RecordingBlockManager
from kvblocks.replay import Replay, find_difference

from .helpers import filled, refused

WINDOW, SIZE = 6, 4  # a query at a boundary of blocks reads the two blocks before it
DEPTH = 2


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(40, SIZE, windows=(WINDOW,))


def decode(manager: BlockManager, name: str, num_tokens: int, *, token: int = 99) -> None:
    """Append and commit one token after another."""
    for _ in range(num_tokens):
        manager.append({name: [token]})
        manager.commit(name, manager.num_computed_tokens(name))
        manager.check()


# ── what is held ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("committed", "start"), [(158, 0), (159, 1), (190, 1), (191, 2)])
def test_a_block_is_out_of_the_window_once_no_later_query_reads_it(
    committed: int, start: int
) -> None:
    manager = BlockManager(20, 32, windows=(128,))
    manager.allocate("A", 300 * [1])
    manager.append({"A": committed})
    assert -1 not in manager.block_table("A", 1)
    manager.commit("A", committed)
    table = manager.block_table("A", 1).tolist()
    assert [block for block in table if block < 0] == start * [-1]
    manager.check()


def test_what_is_in_flight_keeps_the_window_where_it_is() -> None:
    manager = BlockManager(20, 32, prefix_caching=False, windows=(128,))
    manager.allocate("A", 160)
    manager.append({"A": 159})
    manager.commit("A", 158)
    assert manager.block_table("A", 1)[0] >= 0
    manager.commit("A", 159)
    assert manager.block_table("A", 1)[0] == -1


def test_a_block_that_leaves_the_window_waits_for_the_steps_that_read_it() -> None:
    manager = BlockManager(4, 2, prefix_caching=False, windows=(2,))
    manager.allocate("A", 4)
    step = manager.begin_step()
    manager.append({"A": 3})
    manager.commit("A", 3)
    assert manager.block_table("A", 1).tolist() == [-1, 3]
    assert (manager.stats().num_fenced_blocks, manager.stats().num_free_blocks) == (1, 0)
    manager.complete_step(step)
    assert (manager.stats().num_fenced_blocks, manager.stats().num_free_blocks) == (0, 1)
    manager.check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_decode_holds_no_more_than_its_window(
    window: int, block_size: int, *, caching: bool
) -> None:
    manager = BlockManager(400, block_size, prefix_caching=caching, windows=(window,))
    manager.allocate("A", [1])
    most = 0
    for position in range(300):
        manager.append({"A": [position]} if position else {"A": 1})
        held = [block for block in manager.block_table("A", 1) if block >= 0]
        most = max(most, len(held))
        manager.commit("A", position + 1)
    assert most == -(-(window - 1) // block_size) + 1
    manager.check()


def test_a_prompt_gets_window_blocks_for_one_window_and_append_takes_the_rest(
    manager: BlockManager,
) -> None:
    answer = manager.allocate("A", range(20))
    assert answer.block_ids == (0, 1, 2, 3, 4)
    assert answer.num_new_blocks == 8
    assert manager.block_table("A", 1).tolist() == [5, 6, 7]
    plan = manager.append({"A": 20})
    assert plan.new_blocks_by_group == ({}, {"A": (8, 9)})
    assert plan.slot_mappings[1].tolist() == [*range(20, 40)]
    assert plan.slot_mapping is plan.slot_mappings[0]


def test_a_prompt_computed_in_chunks_needs_only_its_window_at_a_time() -> None:
    manager = BlockManager(25 + DEPTH + 1, SIZE, windows=(WINDOW,))
    manager.allocate("A", range(100))
    for chunk in range(SIZE, 101, SIZE):
        manager.append({"A": SIZE})
        manager.commit("A", chunk)
        manager.check()


def test_a_manager_without_windows_has_one_group() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("A", [1])
    plan = manager.append({"A": 1})
    assert plan.slot_mappings == (plan.slot_mapping,)
    assert plan.new_blocks_by_group == ({},)
    for group in (-1, 1):
        with refused(manager, UnknownGroup, match=rf"groups are 0..0, got {group}"):
            manager.block_table("A", group)


@pytest.mark.parametrize("window", [0, -1, 1.0, "4"])
def test_a_window_is_at_least_one_token(window: object) -> None:
    with pytest.raises(InvalidConfig, match=f"at least 1 token, got {window!r}"):
        BlockManager(4, windows=(window,))  # type: ignore[arg-type]  # what is refused


def test_windows_and_partial_reuse_do_not_go_together() -> None:
    with pytest.raises(InvalidConfig, match=r"partial_reuse needs no windows, got \(4,\)"):
        BlockManager(4, windows=(4,), partial_reuse=True)


# ── forks and truncation ─────────────────────────────────────────────────────────────────────────


def test_each_group_copies_its_shared_tail_on_write(manager: BlockManager) -> None:
    filled(manager, "A", 6)
    manager.fork("A", "B")
    plan = manager.append({"A": 1, "B": 1})
    assert plan.copies == (BlockCopy(1, 4, 2), BlockCopy(3, 5, 2))
    assert plan.new_blocks_by_group == ({"A": (4,)}, {"A": (5,)})
    assert [slots.tolist() for slots in plan.slot_mappings] == [[18, 6], [22, 14]]
    manager.check()


def test_a_block_that_a_fork_still_holds_stays_when_the_other_moves_on() -> None:
    manager = BlockManager(20, 2, prefix_caching=False, windows=(2,))
    manager.allocate("A", 4)
    manager.append({"A": 2})
    manager.commit("A", 2)
    manager.fork("A", "B")
    shared = manager.block_table("B", 1)[0]
    decode(manager, "A", 1)
    assert manager.block_table("A", 1)[0] == -1
    assert (manager.block_table("B", 1)[0], manager.ref_count(shared)) == (shared, 1)
    manager.free("B")
    assert manager.ref_count(shared) == 0
    manager.check()


def test_truncate_gives_back_the_surplus_of_each_group(manager: BlockManager) -> None:
    filled(manager, "A", 6)
    manager.append({"A": 7})
    assert manager.stats().num_held_blocks == 8
    manager.truncate("A", 7)
    assert manager.stats().num_held_blocks == 4
    assert manager.block_table("A", 1).tolist() == [2, 3]
    manager.check()


# ── finding ──────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_finds_the_window_blocks_that_it_can_read_still(manager: BlockManager) -> None:
    filled(manager, "A", 20)
    window = manager.block_table("A", 1)
    assert manager.allocate("B", [*range(20), 7]).num_cached_tokens == 20
    table = manager.block_table("B", 1)
    assert table[:5].tolist() == [-1, -1, -1, *window[3:]]
    assert [manager.ref_count(block) for block in table[3:5]] == [2, 2]
    manager.check()


def test_window_blocks_that_were_left_behind_can_be_found_until_they_are_evicted(
    manager: BlockManager,
) -> None:
    filled(manager, "A", 20)
    for num_tokens in range(1, 21):
        assert manager.match([*range(num_tokens), 7]).num_tokens == num_tokens // SIZE * SIZE


@pytest.mark.parametrize("windows", [(3, 6), (6, 3)])
def test_what_one_window_shortens_the_others_must_have_whole(windows: tuple[int, int]) -> None:
    manager = BlockManager(80, 1, windows=windows)
    filled(manager, "A", 20)
    short, long = (windows.index(size) for size in (3, 6))
    companions, table = manager._ledger.windows.companions, manager.block_table("A")
    for group, index in ((long, 15), (short, 13), (long, 8)):
        companions[group][table[index]] = -1
    assert manager.match([*range(20), 7]).num_tokens == 8


def test_usage_counts_the_blocks_of_every_group(manager: BlockManager) -> None:
    filled(manager, "A", 6)
    assert manager.usage() == Usage(num_blocks=4, num_slots=16, num_stored_tokens=12)
    decode(manager, "A", 5)
    assert manager.usage() == Usage(num_blocks=5, num_slots=20, num_stored_tokens=11 + 7)


def test_equal_content_is_merged_in_each_group(manager: BlockManager) -> None:
    for name in "AB":
        manager.allocate(name, range(8))
        manager.append({name: 8})
    manager.commit("A", 8)
    merges = manager.commit("B", 8)
    assert [tuple(merge) for merge in merges] == [
        (0, 4, 0, 0),
        (1, 5, 1, 0),
        (0, 6, 2, 1),
        (1, 7, 3, 1),
    ]
    assert [manager.block_table(name, 1) for name in "AB"] == [manager.block_table("A", 1)] * 2
    manager.check()


# ── eviction ─────────────────────────────────────────────────────────────────────────────────────


def test_what_was_given_up_longest_ago_goes_first_whatever_group_it_is_of() -> None:
    manager = BlockManager(20, SIZE, windows=(WINDOW,))
    filled(manager, "A", 20)  # 5 blocks each; the window has left 3 behind
    manager.free("A")
    assert manager.stats().num_free_blocks == 10
    manager.allocate("B", 10 * [1])  # 3 and 3
    manager.allocate("C", 14 * [2])  # 4, and 3 of a window
    assert manager.stats().num_evicted_blocks == 3
    assert manager.match([*range(20), 7]).num_tokens == 20
    assert manager.match([*range(16), 7]).num_tokens == 0
    manager.check()


def test_a_block_that_is_evicted_takes_its_companions_along() -> None:
    manager = BlockManager(6, SIZE, windows=(WINDOW,))
    filled(manager, "A", 2 * SIZE)
    manager.free("A")
    manager.allocate("B", 3 * [1])  # the last two free ones
    assert manager.stats().num_free_blocks == 0
    manager.allocate("C", 3 * [2])
    assert manager.match([*range(8), 7]).num_tokens == SIZE
    assert manager.stats().num_cached_blocks == 2
    assert manager.stats().num_evicted_blocks == 2
    manager.check()


def test_a_match_is_shortened_to_where_every_window_is_whole_and_not_to_nothing() -> None:
    manager = BlockManager(14, SIZE, windows=(WINDOW,))
    filled(manager, "A", 8)
    manager.free("A")
    filled(manager, "B", [*range(20)])
    manager.free("B")
    assert manager.match([*range(20), 7]).num_tokens == 20
    assert manager.stats().num_free_blocks == 4
    manager.match([*range(8), 7])
    filled(manager, "C", [*range(8), 7])  # its window is used again, and so given up last
    manager.free("C")
    while manager.match([*range(20), 7]).num_tokens == 20:
        name = f"D{manager.stats().num_evicted_blocks}"
        manager.allocate(name, 9 * [5])
    assert manager.match([*range(20), 7]).num_tokens == 8
    manager.check()


@pytest.mark.parametrize("num_blocks", [400, 120])
def test_groups_do_not_veto_each_other_on_conversations(num_blocks: int) -> None:
    """Turns of eight conversations in rounds: what full attention finds, the window finds too."""
    manager = BlockManager(num_blocks, SIZE, windows=(WINDOW,))
    talks = [[100 * talk + i for i in range(12)] for talk in range(8)]
    found = asked = 0
    for turn in range(6):
        for talk in talks:
            found += manager.allocate(turn, talk).num_cached_tokens
            asked += len(talk)
            for chunk in range(manager.num_computed_tokens(turn), len(talk), SIZE):
                manager.append({turn: min(SIZE, len(talk) - chunk)})
                manager.commit(turn, manager.num_computed_tokens(turn))
            for _ in range(5):
                talk.append(len(talk))
                manager.append({turn: talk[-1:]})
                manager.commit(turn, len(talk))
            manager.free(turn)
            talk += [turn, turn]
        manager.check()
    most = asked - 8 * 12 - 5 * 8 * (SIZE + 2)  # all but the first prompts, what is new, and tails
    assert found > (most if num_blocks == 400 else most // 2)


# ── all or nothing ───────────────────────────────────────────────────────────────────────────────


def test_verdicts_count_the_blocks_of_every_group() -> None:
    manager = BlockManager(8, SIZE, prefix_caching=False, windows=(WINDOW,))
    assert manager.can_allocate(5 * SIZE).num_needed_blocks == 5 + DEPTH + 1
    assert manager.can_allocate(6 * SIZE).when is When.NEVER
    manager.allocate("A", 5 * SIZE)
    with refused(manager, OutOfBlocks) as caught:
        manager.allocate("B", 1)
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict == Verdict(When.LATER, 2, 0)
    assert manager.can_append({"A": 5 * SIZE}).when is When.NEVER
    assert manager.can_append({"A": 4 * SIZE}).num_needed_blocks == 1
    with refused(manager, OutOfBlocks):
        manager.append({"A": 4 * SIZE})
    manager.append({"A": 3 * SIZE})


def test_what_a_window_gives_up_in_a_step_is_said_to_come_after_it() -> None:
    manager = BlockManager(7, SIZE, prefix_caching=False, windows=(WINDOW,))
    manager.allocate("A", 4 * SIZE)
    step = manager.begin_step()
    manager.append({"A": 3 * SIZE})
    manager.commit("A", 3 * SIZE)
    assert manager.can_append({"A": SIZE}) == Verdict(When.AFTER_STEP, 1, 0, step)
    manager.complete_step(step)
    manager.append({"A": SIZE})


def test_a_companion_that_waits_for_a_step_can_be_found_and_held() -> None:
    manager = BlockManager(6, SIZE, windows=(WINDOW,))
    manager.allocate("A", range(8))
    step = manager.begin_step()
    manager.append({"A": 8})
    manager.commit("A", 8)
    manager.free("A")
    assert manager.can_allocate(range(12)) == Verdict(When.NOW, 2, 2)
    assert manager.can_allocate(12 * [9]) == Verdict(When.AFTER_STEP, 6, 2, step)
    assert manager.allocate("B", range(9)).num_cached_tokens == 8
    manager.check()
    manager.free("B")
    manager.check()
    manager.complete_step(step)
    assert manager.stats().num_cached_blocks == 4
    manager.check()


# ── pins, resets, copies ─────────────────────────────────────────────────────────────────────────


def test_a_pin_keeps_what_a_prompt_reads_that_goes_on_from_it(manager: BlockManager) -> None:
    filled(manager, "A", 20)
    manager.free("A")
    manager.pin("system", range(20))
    assert manager.stats().num_pinned_blocks == 5 + DEPTH
    manager.check()
    while manager.can_allocate(9 * [1]).is_now:
        manager.allocate(manager.stats().num_sequences, 9 * [1])
        manager.check()
    assert manager.match([*range(20), 7]).num_tokens == 20
    longest = [*range(20), *(32 * SIZE) * [1]]  # 5 pinned blocks and 32, 2 pinned ones and 1
    assert manager.can_allocate(longest).when is When.LATER
    assert manager.can_allocate([*longest, 1]).when is When.NEVER
    manager.unpin("system")
    assert manager.stats().num_pinned_blocks == 0
    manager.check()


def test_two_pins_of_one_prefix_count_its_blocks_once(manager: BlockManager) -> None:
    filled(manager, "A", 20)
    manager.pin("one", range(20))
    manager.pin("other", range(20))
    assert manager.stats().num_pinned_blocks == 5 + DEPTH
    manager.unpin("one")
    assert manager.stats().num_pinned_blocks == 5 + DEPTH
    manager.check()


def test_a_pin_that_would_pass_the_limit_with_its_window_is_refused() -> None:
    manager = BlockManager(40, SIZE, windows=(WINDOW,), pin_limit=5 + DEPTH - 1)
    filled(manager, "A", 20)
    with refused(manager, PinLimit, match="at most 6 blocks, got 7"):
        manager.pin("system", range(20))


def test_a_reset_forgets_the_content_of_every_group(manager: BlockManager) -> None:
    filled(manager, "A", 20)
    filled(manager, "B", 8, first_token=100)
    manager.free("B")
    assert tuple(manager.reset_prefix_cache()) == (2 + 2 + 3, 0, 5 + 2)
    assert manager.stats().num_cached_blocks == 0
    manager.check()
    decode(manager, "A", 9)
    manager.free("A")
    assert manager.stats().num_free_blocks == 40


def test_a_reset_leaves_what_steps_use_until_they_complete(manager: BlockManager) -> None:
    manager.allocate("A", range(8))
    step = manager.begin_step()
    manager.append({"A": 8})
    manager.commit("A", 8)
    manager.free("A")
    assert tuple(manager.reset_prefix_cache()) == (0, 4, 0)
    manager.check()
    manager.complete_step(step)
    assert manager.stats().num_free_blocks == 40
    manager.check()


def test_a_snapshot_has_every_group(manager: BlockManager) -> None:
    filled(manager, "A", 21)
    manager.free("A")
    filled(manager, "B", 14)
    copy = BlockManager.restore(manager.snapshot())
    copy.check()
    assert copy.state_digest() == manager.state_digest()
    for each in (manager, copy):
        decode(each, "B", 9)
    assert copy.block_table("B", 1) == manager.block_table("B", 1)
    assert copy.state_digest() == manager.state_digest()


def test_a_log_says_which_windows_there_were() -> None:
    log = StringIO()
    manager = RecordingBlockManager(log, 40, SIZE, windows=(WINDOW,), digest_every=1)
    filled(manager, "A", 14)
    manager.free("A")
    filled(manager, "B", 14)
    replay = Replay(log.getvalue().splitlines())
    assert [applied.error for applied in replay if applied.error] == []
    assert replay.manager.windows == (WINDOW,)
    assert (replay.num_digests > 0, replay.num_wrong_digests) == (True, 0)


def test_two_logs_part_where_a_window_has_other_blocks() -> None:
    logs = StringIO(), StringIO()
    for log, window in zip(logs, (WINDOW, 2 * WINDOW), strict=True):
        filled(RecordingBlockManager(log, 40, SIZE, windows=(window,)), "A", 14)
    difference = find_difference(*(log.getvalue().splitlines() for log in logs))
    assert difference is not None
    assert any("blocks of window 6: [4, 5, 6], and none" in what for what in difference.what)


# ── what check() finds ───────────────────────────────────────────────────────────────────────────


def lose_a_full_block(manager: BlockManager) -> None:
    manager._ledger.windows.full_block_of[manager.block_table("A", 1)[-2]] = -1


def keep_what_nobody_finds(manager: BlockManager) -> None:
    windows, block = manager._ledger.windows, manager.block_table("A", 1)[-1]
    full = manager.block_table("A")[-1]
    windows.companions[0][full], windows.full_block_of[block] = block, full


def start_too_early(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].windows[0].start -= 1


def reach_further(manager: BlockManager) -> None:
    manager._ledger.windows.sizes = (WINDOW + SIZE,)


def forget_a_block(manager: BlockManager) -> None:
    table = manager._ledger.sequences["A"].windows[0].blocks
    manager._ledger.pool.give_back(table[-1:], 0)
    del table[-1]


def hold_another_block(manager: BlockManager) -> None:
    windows = manager._ledger.windows
    known, full_block_of = windows.companions[0], windows.full_block_of
    one, other = manager.block_table("A")[3:5]
    known[one], known[other] = known[other], known[one]
    full_block_of[known[one]], full_block_of[known[other]] = one, other


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lose_a_full_block, "from the other side"),
        (keep_what_nobody_finds, "full block must be findable"),
        (start_too_early, "each once"),
        (reach_further, "window 0 must begin at block 3"),
        (forget_a_block, "21 computed, 5 window blocks"),
        (hold_another_block, "must be in its table"),
    ],
)
def test_check_finds_what_is_broken(
    manager: BlockManager, break_it: Callable[[BlockManager], None], message: str
) -> None:
    filled(manager, "A", 21)
    manager.check()
    break_it(manager)
    with pytest.raises(InvariantViolation, match=message):
        manager.check()


# ── what does not go together ────────────────────────────────────────────────────────────────────


def test_windows_and_host_blocks_do_not_go_together() -> None:
    with pytest.raises(InvalidConfig, match=r"num_host_blocks needs no windows, got \(4,\)"):
        BlockManager(4, windows=(4,), num_host_blocks=1)


def test_windows_and_decode_batches_do_not_go_together(manager: BlockManager) -> None:
    with refused(manager, InvalidBatch, match=r"a decode batch needs no windows, got \(6,\)"):
        manager.decode_batch()
