"""What blocks are used for, at each moment of a replay."""

import io
from collections.abc import Callable

import pytest

from kvblocks import BlockManager, OutOfBlocks
from kvblocks.block_map import KINDS, History, block_map, life_order, observe
from kvblocks.recording import RecordingBlockManager
from kvblocks.replay import Replay

from .driver import Driver


def kinds(manager: BlockManager) -> list[str]:
    return [KINDS[use.kind] for use in block_map(manager)]


def test_each_kind_of_use_is_told() -> None:
    manager = BlockManager(12, 2)
    manager.allocate("a", [1, 2, 3, 4, 5])
    manager.append({"a": 4})
    assert kinds(manager)[:4] == ["in flight", "in flight", "held", "free"]
    manager.commit("a", 4)
    manager.truncate("a", 4)
    manager.fork("a", "b")
    assert kinds(manager)[:3] == ["shared", "shared", "free"]
    assert block_map(manager)[0].holders == ("a", "b")
    manager.free("b")
    manager.begin_step()
    manager.append({"a": [5, 6, 7]})
    manager.free("a")
    assert kinds(manager)[:4] == ["fenced"] * 4
    manager.complete_step(1)
    assert kinds(manager)[:4] == ["cached", "cached", "free", "free"]
    manager.pin("system", [1, 2])
    assert kinds(manager)[:2] == ["pinned", "cached"]


def verify_counts(manager: BlockManager) -> None:
    stats, found = manager.stats(), kinds(manager)
    held = sum(found.count(kind) for kind in ("held", "shared", "in flight", "pinned"))
    assert held == stats.num_held_blocks
    assert found.count("free") == stats.num_free_blocks
    assert found.count("fenced") == stats.num_fenced_blocks
    assert found.count("cached") == stats.num_cached_blocks


def test_the_map_counts_as_the_statistics_do() -> None:
    driver = Driver(3, BlockManager(24, 2))
    for _ in range(1000):
        driver.operate()
        verify_counts(driver.manager)


def test_the_map_counts_the_blocks_of_windows() -> None:
    manager = BlockManager(24, 2, windows=(3,))
    for turn in range(9):
        prompt = [*range(turn % 3 + 3), turn, 1]
        found = manager.allocate(turn, prompt).num_cached_tokens
        manager.begin_step()
        manager.append({turn: len(prompt) - found})
        verify_counts(manager)
        manager.commit(turn, len(prompt))
        manager.free(turn)
        verify_counts(manager)
        manager.complete_step(turn + 1)
        verify_counts(manager)


def history_of(work: Callable[[BlockManager], object], num_frames: int = 100) -> History:
    log = io.StringIO()
    work(RecordingBlockManager(log, 24, 2))
    lines = log.getvalue().splitlines()
    return observe(Replay(lines), len(lines) - 1, num_frames)


def family(manager: BlockManager) -> None:
    manager.allocate("a", [1, 2, 3])
    manager.append({"a": 3})
    manager.commit("a", 3)
    manager.fork("a", "b")
    manager.append({"a": [4], "b": [5]})
    manager.free("a")
    manager.allocate("c", [1, 2, 9])
    manager.commit("b", 4)
    manager.fork("b", ("b", 1))


def test_the_lives_of_sequences_are_noted_with_forks_and_copies() -> None:
    lives = history_of(family).lives
    assert [(life.seq_id, life.parent, life.born, life.died) for life in lives] == [
        ("a", None, 1, 6),
        ("b", 0, 4, None),
        ("c", None, 7, None),
        (("b", 1), 1, 9, None),
    ]
    assert lives[0].copies == [(5, 1, 2)]
    assert lives[2].num_cached_tokens == 2
    assert list(life_order(lives)) == [(0, 0), (1, 1), (3, 2), (2, 0)]


@pytest.mark.parametrize("num_frames", [1, 7, 1000])
def test_the_changes_of_all_frames_give_the_map_at_the_end(num_frames: int) -> None:
    managers = []

    def work(manager: BlockManager) -> None:
        managers.append(manager)
        driver = Driver(5, manager)
        for _ in range(500):
            driver.operate()

    history = history_of(work, num_frames)
    assert len(history.frames) <= num_frames + 1
    uses = {block: use for frame in history.frames for block, use in frame.changes.items()}
    for block, use in enumerate(block_map(managers[0])):
        assert uses.get(block, use) == use
    assert all(sum(frame.counts) == 24 for frame in history.frames)
    assert history.frames[-1].number == history.num_calls
    num_evicted = managers[0].stats().num_evicted_blocks
    assert 0 < num_evicted == sum(frame.num_evicted for frame in history.frames)


def test_copies_in_windows_are_noted_too() -> None:
    log = io.StringIO()
    manager = RecordingBlockManager(log, 24, 2, windows=(3,))
    manager.allocate("a", [1, 2, 3])
    manager.append({"a": 3})
    manager.commit("a", 3)
    manager.fork("a", "b")
    copies = manager.append({"a": [4], "b": [5]}).copies
    history = observe(Replay(log.getvalue().splitlines()), 5, 9)
    assert len(copies) == 2
    assert [copy[1:] for copy in history.lives[0].copies] == [copy[:2] for copy in copies]


def test_a_frame_says_which_call_it_was_and_why_it_was_refused() -> None:
    def work(manager: BlockManager) -> None:
        manager.allocate("a", range(30))
        with pytest.raises(OutOfBlocks):
            manager.allocate("b", range(40))

    taken, refused = history_of(work).frames
    assert taken.text == "allocate(seq='a', tokens=30 items)"
    assert refused.text.startswith("allocate(seq='b', tokens=40 items): blocks needed: 20, ")
