"""Errors: the rule and the values, the builtin that fits, and no trace of the call."""

import copy
import pickle
from array import array
from collections.abc import Callable

import pytest

import kvblocks
from kvblocks import BlockManager, KVBlocksError, OutOfBlocks, Verdict, When
from kvblocks.runs import Run

from .helpers import filled, refused

Call = Callable[[BlockManager], object]

CASES: list[tuple[Call, type[KVBlocksError], type[Exception], str]] = [
    (
        lambda m: m.allocate("A", [1]),
        kvblocks.SequenceExists,
        ValueError,
        "a sequence 'A' exists already; free it first",
    ),
    (
        lambda m: m.fork("A", "B"),
        kvblocks.SequenceExists,
        ValueError,
        "a sequence 'B' exists already; free it first",
    ),
    (
        lambda m: m.fork("A", "A"),
        kvblocks.SequenceExists,
        ValueError,
        "a sequence 'A' exists already; free it first",
    ),
    (
        lambda m: m.allocate("C", []),
        kvblocks.InvalidTokens,
        ValueError,
        "a prompt must have at least 1 token, got 0",
    ),
    (
        lambda m: m.match([]),
        kvblocks.InvalidTokens,
        ValueError,
        "a prompt must have at least 1 token, got 0",
    ),
    (
        lambda m: m.allocate("C", [2**32]),
        kvblocks.InvalidTokens,
        ValueError,
        "token ids must be in [0, 2**32): ",
    ),
    (
        lambda m: m.append({"A": "text"}),  # type: ignore[dict-item]  # what is tested
        kvblocks.InvalidTokens,
        ValueError,
        "tokens must be an iterable of integers: ",
    ),
    (
        lambda m: m.append({"B": [7]}),
        kvblocks.InvalidTokens,
        ValueError,
        "token ids must agree with the known ones: sequence 'B' has 102 at position 2, got 7",
    ),
    (
        lambda m: m.append({"A": -3}),
        kvblocks.InvalidLength,
        ValueError,
        "sequence 'A' must append at least 1 token, got -3",
    ),
    (
        lambda m: m.commit("A", 7),
        kvblocks.InvalidLength,
        ValueError,
        "commit needs committed <= num_tokens <= computed, got 6 <= 7 <= 6",
    ),
    (
        lambda m: m.commit("A", 6, [1]),
        kvblocks.InvalidTokens,
        ValueError,
        "token ids may not go past the computed 6 positions, got ids up to 7",
    ),
    (
        lambda m: m.truncate("A", 0),
        kvblocks.InvalidLength,
        ValueError,
        "truncate needs committed <= num_tokens <= computed, got 6 <= 0 <= 6",
    ),
    (
        lambda m: m.fork("B", "C"),
        kvblocks.InvalidLength,
        ValueError,
        "fork needs committed = computed, got 1 and 2: commit or truncate first",
    ),
    (
        lambda m: m.complete_step(1),
        kvblocks.InvalidStep,
        ValueError,
        "step must have been begun (1..0), got 1",
    ),
    (
        lambda m: m.ref_count(8),
        kvblocks.UnknownBlock,
        IndexError,
        "block ids are 0..7, got 8",
    ),
    (
        lambda m: m.ref_count(-1),
        kvblocks.UnknownBlock,
        IndexError,
        "block ids are 0..7, got -1",
    ),
    (
        lambda m: m.append({"A": 27}),
        kvblocks.OutOfBlocks,
        MemoryError,
        "blocks needed: 7, available: 5; one sequence would hold more than the whole pool",
    ),
    (
        lambda _: BlockManager(0),
        kvblocks.InvalidConfig,
        ValueError,
        "num_blocks must be at least 1, got 0",
    ),
    (
        lambda _: BlockManager(1, -4),
        kvblocks.InvalidConfig,
        ValueError,
        "block_size must be at least 1, got -4",
    ),
]

UNKNOWN: list[Call] = [
    lambda m: m.append({"A": 1, "none": 1}),
    lambda m: m.can_append({"none": 1}),
    lambda m: m.commit("none", 1),
    lambda m: m.truncate("none", 1),
    lambda m: m.fork("none", "C"),
    lambda m: m.free("none"),
    lambda m: m.block_table("none"),
    lambda m: m.block_hashes("none"),
    lambda m: m.num_computed_tokens("none"),
    lambda m: m.num_committed_tokens("none"),
]


@pytest.fixture
def manager() -> BlockManager:
    """A of 6 committed tokens; B of 4 tokens, 2 computed and 1 committed."""
    manager = BlockManager(8, 4)
    filled(manager, "A", 6)
    manager.allocate("B", range(100, 104))
    manager.append({"B": 2})
    manager.commit("B", 1)
    return manager


@pytest.mark.parametrize(("call", "error", "builtin", "message"), CASES)
def test_an_error_states_the_rule_and_the_values_and_changes_nothing(
    manager: BlockManager,
    call: Call,
    error: type[KVBlocksError],
    builtin: type[Exception],
    message: str,
) -> None:
    with refused(manager, builtin) as caught:
        call(manager)
    assert type(caught.value) is error
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("call", UNKNOWN)
def test_an_unknown_sequence_is_named(manager: BlockManager, call: Call) -> None:
    with refused(manager, KeyError) as caught:
        call(manager)
    assert type(caught.value) is kvblocks.UnknownSequence
    assert str(caught.value) == "no sequence 'none'"


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.commit("A", 6.0),
        lambda m: m.truncate("A", 6.0),
        lambda m: m.append({"A": 1.0}),
        lambda m: m.complete_step(1.0),
        lambda m: m.ref_count("0"),
        lambda m: m.allocate([], [1]),
        lambda m: m.fork("A", []),
        lambda m: m.free([]),
        lambda _: BlockManager(2.0),  # type: ignore[arg-type]  # what is tested
        lambda _: BlockManager(2, 4.5),  # type: ignore[arg-type]  # what is tested
    ],
)
def test_a_value_of_another_type_is_a_type_error(manager: BlockManager, call: Call) -> None:
    manager.begin_step()
    with refused(manager, TypeError):
        call(manager)


def test_every_error_is_in_the_tree() -> None:
    errors = [
        value
        for name in kvblocks.__all__
        if isinstance(value := getattr(kvblocks, name), type) and issubclass(value, Exception)
    ]
    tree = kvblocks.errors.__doc__
    assert tree is not None
    for error in errors:
        assert issubclass(error, KVBlocksError)
        assert error.__name__ in tree
        for base in error.__bases__:
            assert base in (KVBlocksError, Exception) or f"({base.__name__})" in tree


def test_out_of_blocks_keeps_its_verdict_through_pickle_and_copy() -> None:
    verdict = Verdict(When.AFTER_STEP, 2, 1, 5)
    error = OutOfBlocks(verdict)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 -- our own bytes
        assert other.verdict == verdict
        assert str(other) == str(error)


# ── check() ──────────────────────────────────────────────────────────────────────────────────


def run_of(manager: BlockManager) -> Run:
    """The run of blocks 0 and 1, which A holds."""
    return manager._ledger.sequences["A"].run


def leak(manager: BlockManager) -> None:
    manager._ledger.pool.free.pop()


def hand_out_twice(manager: BlockManager) -> None:
    manager._ledger.pool.free.append(0)


def miscount_cached(manager: BlockManager) -> None:
    manager._ledger.runs.num_cached += 1


def miscount_holders(manager: BlockManager) -> None:
    run_of(manager).holders += 1


def miscount_tables(manager: BlockManager) -> None:
    manager._ledger.pool.shared[2] = 2


def cut_tokens(manager: BlockManager) -> None:
    del run_of(manager).tokens[-1:]


def move_a_key(manager: BlockManager) -> None:
    children = manager._ledger.runs.root.children
    children[b"other"] = children.pop(run_of(manager).key)


def change_a_key(manager: BlockManager) -> None:
    run_of(manager).tokens[0] += 1


def evict_a_parent_first(manager: BlockManager) -> None:
    manager.allocate("C", [0, 1, 2, 3, 9])  # splits the run
    manager.free("C")
    manager.free("A")
    next(iter(manager._ledger.runs)).last_used = -1


def lose_from_the_queue(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.queued = 0
    manager._ledger.runs.queue.entries.clear()


def queue_twice(manager: BlockManager) -> None:
    manager.free("A")
    manager._ledger.runs.queue.entries *= 2


def queue_unknowingly(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.queued = 0


def queue_behind_its_turn(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.last_used -= 1


def shuffle_the_queue(manager: BlockManager) -> None:
    filled(manager, "C", 4, first_token=100)
    manager.free("A")
    manager.free("C")
    manager._ledger.runs.queue.entries.reverse()


def keep_what_is_forgotten(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    run_of(manager).is_kept = True


def forget_what_is_kept(manager: BlockManager) -> None:
    run_of(manager).is_kept = False


def leave_what_nobody_finds(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    run = run_of(manager)
    run.children[b""] = Run(b"", bytearray(), run.blocks[:0], run, 0)


def find_a_child_more_often(manager: BlockManager) -> None:
    manager.allocate("C", [0, 1, 2, 3, 9])  # splits the run
    run_of(manager).num_hits = 2


def rest_nowhere(manager: BlockManager) -> None:
    run = run_of(manager)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    del manager._ledger.runs.fenced[step][run]
    manager._ledger.runs.fenced[step][Run(b"", bytearray(), run.blocks, None, 0)] = None


def put_a_block_into_two_runs(manager: BlockManager) -> None:
    run = run_of(manager)
    twin = Run(b"", run.tokens[:16], run.blocks[:1], manager._ledger.runs.root, 0)
    twin.key, twin.holders = bytes(twin.tokens), 0
    manager._ledger.runs.root.children[bytes(16)] = twin


def loosen_a_block_of_a_run(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_run_blocks = 1


def fence_by_no_step(manager: BlockManager) -> None:
    manager._ledger.pool.fenced[3] = array("i", (manager._ledger.pool.free.pop(),))
    manager._ledger.pool.num_fenced += 1


def use_in_no_step(manager: BlockManager) -> None:
    manager._ledger.pool.touched[0] = 3


def commit_what_is_not_computed(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_committed = 13


def forget_ids(manager: BlockManager) -> None:
    del manager._ledger.sequences["B"].token_ids[:]


def hold_a_block_twice(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].block_table.append(2)
    manager._ledger.pool.shared[2] = 2


def publish_nothing(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_committed = 8
    manager._ledger.sequences["A"].num_computed = 12
    manager._ledger.sequences["A"].token_ids.extend((1, 1, 1))
    manager._ledger.sequences["A"].num_committed = 12


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (leak, "must be the pool of 8, each once"),
        (hand_out_twice, "must be the pool of 8, each once"),
        (miscount_cached, r"\(1, 0, 0\) counted, \(0, 0, 0\) found"),
        (miscount_holders, "2 holders counted, 1 found"),
        (miscount_tables, r"loose blocks are shared {}, counted {2: 2}"),
        (cut_tokens, "a run of 2 blocks has 31 bytes of tokens"),
        (move_a_key, "must be found under its first block's tokens"),
        (change_a_key, "must be found under its first block's tokens"),
        (evict_a_parent_first, "a run must not be evicted before its children"),
        (lose_from_the_queue, "a cached leaf must be in the queue of eviction"),
        (queue_twice, "no run is in the queue of eviction twice"),
        (queue_unknowingly, "a run must know whether it is queued"),
        (queue_behind_its_turn, "a run is queued at 1, and ranks 0 now"),
        (shuffle_the_queue, "the queue of eviction must be a heap"),
        (keep_what_is_forgotten, "a run is kept exactly if it can be found"),
        (forget_what_is_kept, "a run is kept exactly if it can be found"),
        (leave_what_nobody_finds, "what cannot be found must be held"),
        (find_a_child_more_often, "who used a run must have used its parent"),
        (rest_nowhere, "a run waits for step 1 without resting there"),
        (put_a_block_into_two_runs, "must be the pool of 8, each once"),
        (loosen_a_block_of_a_run, r"the path holds \[0, 1\], the table \[0\]"),
        (fence_by_no_step, r"blocks wait for the steps \[3\], open are 1..0"),
        (use_in_no_step, r"blocks wait for the steps \[3\], open are 1..0"),
        (commit_what_is_not_computed, "'A': committed 13 <= computed 9 <= capacity 12"),
        (forget_ids, "'B': 1 committed, 0 ids known"),
        (hold_a_block_twice, r"'A' holds a block twice: \[0, 1, 2, 2\]"),
        (publish_nothing, "'A': 3 full blocks, 2 published"),
    ],
)
def test_check_finds_what_is_broken(break_it: Callable[[BlockManager], None], message: str) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 9)
    filled(manager, "B", 1)
    manager.check()
    break_it(manager)
    with pytest.raises(kvblocks.InvariantViolation, match=message) as caught:
        manager.check()
    assert isinstance(caught.value, AssertionError)
