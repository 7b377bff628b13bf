"""A log repeats what was done, call by call, whatever was done."""

import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvblocks import (
    ALL_SALTS,
    Adapter,
    BlockManager,
    DecodeBatch,
    InvalidConfig,
    InvalidLog,
    InvalidNamespace,
    InvalidTokens,
    Media,
    OutOfBlocks,
)
from kvblocks.recording import RecordingBlockManager
from kvblocks.replay import Replay, _differences, find_difference

from .driver import Driver

# Public calls that change nothing that a caller could observe.
QUERIES = {
    "block_hashes",
    "block_table",
    "can_allocate",
    "can_append",
    "can_reserve",
    "can_swap_in",
    "can_swap_out",
    "block_states",
    "check",
    "explain",
    "freeing",
    "is_swapped",
    "match",
    "num_committed_tokens",
    "num_computed_tokens",
    "ref_count",
    "restore",
    "seq_ids",
    "snapshot",
    "state_digest",
    "stats",
    "take_events",
    "usage",
    "why_full",
    "write_block_tables",
    "write_slot_mapping",
}
PROGRAM = "from tests.test_replay import random_log; print(random_log(1, 2000), end='')"


def random_log(seed: int, num_operations: int, **options: Any) -> str:
    log = io.StringIO()
    options = {"num_host_blocks": 6, **options}
    driver = Driver(seed, RecordingBlockManager(log, 24, 2, digest_every=10, **options))
    for _ in range(num_operations):
        driver.operate()
    log.write(json.dumps({"digest": driver.manager.state_digest()}) + "\n")
    return log.getvalue()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_replay_is_in_the_same_state_all_the_way(seed: int, *, caching: bool) -> None:
    replay = Replay(random_log(seed, 3000, prefix_caching=caching).splitlines())
    num_refused = sum(applied.error is not None for applied in replay)
    replay.manager.check()
    assert replay.num_digests > 200
    assert not replay.num_wrong_digests
    assert num_refused > 10


def test_the_same_seed_writes_the_same_log_however_a_process_hashes_strings() -> None:
    here = random_log(1, 2000)
    for hash_seed in ("0", "4000000000"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == here


def methods(owner: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(owner, inspect.isroutine) if name[0] != "_"}


def test_every_call_that_changes_something_is_recorded_under_its_own_signature() -> None:
    assert not QUERIES - methods(BlockManager) - {"seq_ids"}
    changing = methods(BlockManager) - QUERIES - {"decode_batch"}
    batch = type(RecordingBlockManager(io.StringIO(), 4).decode_batch())
    for owner, recorder, names in [
        (BlockManager, RecordingBlockManager, changing),
        (DecodeBatch, batch, {"append", "commit", "join", "leave"}),
    ]:
        for name in names:
            assert name in vars(recorder), f"{name} is not recorded"
            assert inspect.signature(getattr(recorder, name)) == inspect.signature(
                getattr(owner, name)
            )


def recorded(work: Callable[[BlockManager], object], **options: Any) -> tuple[str, BlockManager]:
    log = io.StringIO()
    manager = RecordingBlockManager(log, 16, 2, **options)
    work(manager)
    return log.getvalue(), manager


def everything(manager: BlockManager) -> None:
    """Each call once, with all of its options."""
    media = [Media(1, b"\x00cat"), Media(4, "dog")]
    options: dict[str, Any] = {"salt": "", "adapter": Adapter("a", 2), "media": media}
    manager.allocate(("a", 1), iter([1, 2, 3, 4, 5]), priority=3, num_lookahead_tokens=1, **options)
    step = manager.begin_step()
    manager.append({("a", 1): 5})
    manager.commit(("a", 1), 5)
    manager.complete_step(step)
    manager.pin(("p", None), [1, 2], **options)
    manager.fork(("a", 1), "b")
    manager.allocate(7, [1, 2, 3], adapter=0)
    manager.append({7: (n for n in [1, 2, 3]), "b": [6]})
    manager.commit(7, 2, [])
    manager.truncate(7, 2)
    manager.commit("b", 6)
    batch = manager.decode_batch(["b"])
    batch.append()
    batch.commit(iter([7]))
    batch.leave("b")
    manager.unpin(("p", None))
    manager.reset_prefix_cache(salt="")
    manager.reset_prefix_cache(salt=None)
    manager.reset_prefix_cache(salt=ALL_SALTS)
    manager.free("b")


def test_every_call_is_repeated_with_all_its_options() -> None:
    log, manager = recorded(everything, policy="priority", partial_reuse=True, pin_limit=4)
    replay = Replay(log.splitlines())
    applied = list(replay)
    assert [str(each.error) for each in applied if each.error] == []
    assert replay.manager.state_digest() == manager.state_digest()
    assert replay.manager.policy == "priority"
    assert applied[0].answer.block_table.tolist() == [0, 1, 2]
    assert applied[0].line == 2


def test_a_call_is_written_before_it_is_carried_out() -> None:
    class Full(io.StringIO):
        def write(self, line: str, /) -> int:
            if '"free"' in line:
                raise OSError("no space left")
            return super().write(line)

    log = Full()
    manager = RecordingBlockManager(log, 2, 2)
    manager.allocate("a", [1, 2, 3])
    before = manager.state_digest()
    with pytest.raises(OSError, match="no space"):
        manager.free("a")
    assert manager.state_digest() == before
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", [1])
    *_, last = Replay(log.getvalue().splitlines())
    assert last.op == "allocate"
    assert isinstance(last.error, OutOfBlocks)


def test_what_cannot_be_written_is_refused_and_changes_nothing() -> None:
    log = io.StringIO()
    manager = RecordingBlockManager(log, 8, 2)
    before = manager.state_digest(), log.getvalue()
    deep: tuple[object, ...] = ()
    for _ in range(20_000):
        deep = (deep,)
    for seq_id in (b"a", object(), float("nan"), deep):
        with pytest.raises(InvalidLog, match="JSON"):
            manager.allocate(seq_id, [1, 2])
    with pytest.raises(InvalidTokens):
        manager.allocate("a", [-1])
    assert (manager.state_digest(), log.getvalue()) == before
    with pytest.raises(InvalidConfig, match="digest_every"):
        RecordingBlockManager(log, 8, digest_every=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.allocate("b", [1], adapter=("a",)),
        lambda m: m.allocate("b", [1], adapter=["a", 1]),
        lambda m: m.pin("p", [1, 2], adapter=("a", 1, 2)),
        lambda m: m.allocate(["b"], [1]),
        lambda m: m.fork("a", ["b"]),
        lambda m: m.unpin(["p"]),
        lambda m: m.swap_out([["a"]]),
        lambda m: m.decode_batch().join(["a"]),
    ],
)
def test_what_is_refused_is_not_repeated_as_something_else(
    call: Callable[[BlockManager], object],
) -> None:
    log = io.StringIO()
    manager = RecordingBlockManager(log, 8, 2, num_host_blocks=4)
    manager.allocate("a", [1, 2, 3])
    with pytest.raises((TypeError, InvalidNamespace)):
        call(manager)
    replay = Replay(log.getvalue().splitlines())
    assert [applied.error for applied in replay if applied.op != "decode_batch"] == [None]
    assert replay.manager.state_digest() == manager.state_digest()


def test_a_snapshot_of_a_recording_manager_is_one_of_its_state() -> None:
    log, manager = recorded(everything)
    other = BlockManager.restore(manager.snapshot())
    assert other.state_digest() == manager.state_digest()
    other.allocate("later", [1])
    assert list(Replay(log.splitlines()))[-1].op == "free"
    with pytest.raises(InvalidLog, match="new manager"):
        RecordingBlockManager.restore(manager.snapshot())


def test_numbers_of_other_types_are_written_as_json_has_them() -> None:
    class Four:
        def __index__(self) -> int:
            return 4

    log = io.StringIO()
    RecordingBlockManager(log, 8, 2, num_host_blocks=Four())
    assert Replay(log.getvalue().splitlines()).manager.num_host_blocks == 4


def test_another_policy_shows_what_would_have_become_of_the_same_calls() -> None:
    log, _ = recorded(everything)
    replay = Replay(log.splitlines(), policy="fifo", num_blocks=4)
    errors = [type(applied.error) for applied in replay if applied.error]
    assert errors[0] is OutOfBlocks
    assert replay.manager.num_blocks == 4
    assert replay.is_changed
    assert not replay.num_digests


def test_a_state_that_differs_from_the_recorded_one_is_noted() -> None:
    lines = random_log(1, 200).splitlines()
    at = next(i for i, line in enumerate(lines) if "digest" in line)
    replay = Replay([*lines[:at], '{"digest": "other"}', *lines[at + 1 :]])
    assert len(list(replay)) > 100
    assert (replay.num_wrong_digests, replay.first_wrong_digest) == (1, at - 1)


HEADER = '{"kvblocks_log": 1, "manager": {"num_blocks": 4, "block_size": 2}}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "line 1: a log must begin"),
        (['{"op": "free"}'], "line 1: a log must begin"),
        (["[]"], "line 1: a record must be an object"),
        (['{"kvblocks_log": 2, "manager": {}}'], "format of a log must be 1, got 2"),
        (['{"kvblocks_log": 1, "manager": {}}'], "cannot be made"),
        (['{"kvblocks_log": 1, "manager": {"num_blocks": 0}}'], "cannot be made"),
        (['{"kvblocks_log": 1, "manager": {"num_blocks": 2147483648}}'], "cannot be made"),
        ([HEADER, "", '{"op": "free"'], "line 3: not JSON"),
        ([HEADER, "[" * 100_000], "line 2: not JSON"),
        ([HEADER, '{"op": "_make_batch"}'], "line 2: op must be one that is recorded"),
        ([HEADER, '{"op": ["free"]}'], "line 2: op must be one that is recorded"),
        ([HEADER, '{"op": "free"}'], "line 2: free cannot be carried out"),
        ([HEADER, '{"op": "free", "seq": {}}'], "line 2: free cannot be carried out"),
        ([HEADER, '{"op": "batch.append", "batch": 0}'], "line 2: batch.append cannot"),
        ([HEADER, '{"op": "append", "batch": 5}'], "line 2: append cannot"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_by_its_line(lines: list[str], reason: str) -> None:
    with pytest.raises(InvalidLog, match=reason):
        list(Replay(lines))


def test_logs_part_at_the_first_call_answer_or_state_that_differs() -> None:
    log, _ = recorded(everything)
    lines = log.splitlines()
    assert find_difference(lines, lines) is None
    shorter = find_difference(lines[:-1], lines)
    assert shorter == (len(lines) - 1, ("the first log ends before this call",))
    other = find_difference(lines, [*lines[:-1], '{"op": "free", "seq": 7}'])
    assert other is not None
    assert other.what == ("free(seq='b')", "free(seq=7)")
    smaller = find_difference(
        lines, [lines[0].replace('"num_blocks":16', '"num_blocks":15'), *lines[1:]]
    )
    assert smaller is not None
    assert smaller.number == 1
    assert "num_blocks: 16, and 15" in smaller.what


def test_managers_that_would_evict_in_another_order_differ() -> None:
    def work(manager: BlockManager) -> None:
        for name in "ab":
            manager.allocate(name, [ord(name), 2, 3])
            manager.append({name: 3})
            manager.commit(name, 3)
        for name in "ab":
            manager.free(name)

    log, _ = recorded(work)
    lines = log.splitlines()
    assert find_difference(lines, [*lines[:-2], lines[-1], lines[-2]]) is not None


def test_states_that_differ_in_what_is_out_of_the_pool_or_in_order_alone_are_described() -> None:
    def freed(*names: str) -> BlockManager:
        manager = BlockManager(8, 2, num_host_blocks=2)
        for name in "ab":
            manager.allocate(name, [ord(name), 2, 3])
            manager.append({name: 3})
            manager.commit(name, 3)
        for name in names:
            manager.free(name)
        return manager

    one, other = freed("a", "b"), freed("b", "a")
    assert one.state_digest() != other.state_digest()
    assert list(_differences(one, other)) == ["the order in which blocks are handed out or evicted"]
    one, other = freed(), freed()
    one.swap_out(["a"])
    assert "sequence 'a', blocks: swapped out, and [0, 1]" in list(_differences(one, other))
