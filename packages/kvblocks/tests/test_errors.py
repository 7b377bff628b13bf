"""Errors: the rule and the values, the builtin that fits, and no trace of the call."""

import copy
import pickle
from collections.abc import Callable

import pytest

import kvblocks
from kvblocks import BlockManager, KVBlocksError, OutOfBlocks, Verdict, When

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
        "blocks needed: 7, available: 5; not even freeing every sequence would do",
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
    (
        lambda _: BlockManager(2**31),
        kvblocks.InvalidConfig,
        ValueError,
        "num_blocks must be at most 2**31 - 1, as block ids are int32, got 2147483648",
    ),
    (
        lambda _: BlockManager(8, num_host_blocks=2**31),
        kvblocks.InvalidConfig,
        ValueError,
        "num_host_blocks must be at most 2**31 - 1, as block ids are int32, got 2147483648",
    ),
    (
        lambda _: BlockManager(2, 2**62),
        kvblocks.InvalidConfig,
        ValueError,
        "num_blocks * block_size must be less than 2**63, as slots are int64, got 2 * 46116860184",
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
        lambda m: m.ref_count(0.5),
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
