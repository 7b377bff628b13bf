"""Faults: a caller's iterable that raises, and MemoryError at every line of this package.

Nothing a caller hands in can leave a trace, wherever it raises. A fault of the interpreter itself is
another matter: queries change nothing whatever happens, and calls that change something leave the
state as it was until their first change; in the midst of the changes nothing is undone. Then
`check()` says so, or the state is whole and the manager can go on. It does not look into decode
batches: one that a fault has struck is to be dropped.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest

import kvblocks
from kvblocks import BlockManager, InvariantViolation

from .helpers import filled, refused

SOURCE = os.path.dirname(kvblocks.__file__)  # noqa: PTH120 -- compared with names of code

Call = Callable[[BlockManager], object]


def busy(*, caching: bool) -> BlockManager:
    """Forks, cached content, open steps, a prompt half scheduled: something for every call to do."""
    num_blocks = 11 if caching else 13
    manager = BlockManager(num_blocks, 2, prefix_caching=caching, num_host_blocks=9)
    filled(manager, "out", [4, 4, 4])
    filled(manager, "also out", [4, 4, 5])
    manager.swap_out(["out", "also out"])
    filled(manager, "a", [1, 2, 3, 4, 5])
    filled(manager, "old", [1, 2, 7, 8, 9])
    filled(manager, "older", [5, 5, 5])
    manager.free("old")
    manager.free("older")
    manager.fork("a", "b")
    filled(manager, "c", [6])
    manager.begin_step()
    manager.append({"c": 1})
    manager.allocate("d", [3, 3, 3])
    manager.append({"d": 2})
    filled(manager, "e", [1, 2, 3, 4])
    manager.append({"e": [5]})
    manager.free("e")
    return manager


# ── what callers hand in ─────────────────────────────────────────────────────────────────────────


def raising_after(tokens: list[int]) -> Iterator[int]:
    yield from tokens
    raise MemoryError("of the caller")


class RaisingMapping(dict[str, int]):
    """A batch that cannot be read to its end."""

    def items(self) -> Any:
        yield from list(super().items())[:1]
        raise MemoryError("of the caller")

    def values(self) -> Any:
        yield from list(super().values())[:1]
        raise MemoryError("of the caller")


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
@pytest.mark.parametrize(
    "call",
    [
        lambda m, t: m.match(t),
        lambda m, t: m.can_allocate(t),
        lambda m, t: m.allocate("new", t),
        lambda m, t: m.can_append({"a": 1, "b": t}),
        lambda m, t: m.append({"a": 1, "b": t}),
        lambda m, t: m.append({"a": t, "b": 1}),
        lambda m, t: m.commit("c", 2, t),
    ],
)
def test_token_ids_that_raise_leave_no_trace(
    call: Callable[[BlockManager, Iterator[int]], object], num_tokens: int
) -> None:
    manager = busy(caching=True)
    with refused(manager, MemoryError, match="of the caller"):
        call(manager, raising_after([1] * num_tokens))


def test_a_batch_that_raises_leaves_no_trace() -> None:
    manager = busy(caching=True)
    for call in (manager.append, manager.can_append):
        with refused(manager, MemoryError, match="of the caller"):
            call(RaisingMapping(a=1, b=1))


def test_rows_and_their_tokens_that_raise_leave_no_trace() -> None:
    manager = busy(caching=True)

    def names() -> Iterator[str]:
        yield "a"
        raise MemoryError("of the caller")

    for call in (manager.decode_batch, manager.swap_out, manager.can_swap_out):
        with refused(manager, MemoryError, match="of the caller"):
            call(names())
    batch = manager.decode_batch(["a", "b"])
    batch.append()
    with refused(manager, MemoryError, match="of the caller"):
        batch.commit(raising_after([1]))
    batch.commit([1, 2])
    assert manager.num_committed_tokens("b") == 6


# ── faults at every line ─────────────────────────────────────────────────────────────────────────


class Injected(MemoryError):
    """A fault that a test has injected."""


class Fault:
    """Raises `Injected` before the line of this package that comes up as the n-th."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.is_raised = False

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line" and not self.is_raised:
            if not self.left:
                self.is_raised = True
                raise Injected
            self.left -= 1
        return self.trace

    def strike(self, call: Callable[[], object]) -> bool:
        """Make a call; whether it came to the line."""
        outer = sys.gettrace()  # that of a coverage measurement
        sys.settrace(self.trace)
        try:
            call()
        except Injected:
            pass
        finally:
            sys.settrace(outer)
        return self.is_raised


def struck(call: Call, *, caching: bool) -> Iterator[tuple[BlockManager, bool]]:
    """For each line of a call: the manager after a fault there, and whether it is as before."""
    state = pickle.dumps(busy(caching=caching))
    before = pickle.loads(state).state_digest()  # noqa: S301 -- written above
    number = 0
    while True:
        manager: BlockManager = pickle.loads(state)  # noqa: S301 -- written above
        if not Fault(number).strike(lambda m=manager: call(m)):  # type: ignore[misc]  # mypy cannot infer it
            return
        yield manager, manager.state_digest() == before
        number += 1


QUERIES: Mapping[str, Call] = {
    "match": lambda m: m.match([1, 2, 7, 8, 1]),
    "can_allocate": lambda m: m.can_allocate([1, 2, 7, 8, 1]),
    "can_allocate later": lambda m: m.can_allocate(range(16)),
    "can_append": lambda m: m.can_append({"a": [1, 2], "b": 3}),
    "can_reserve": lambda m: m.can_reserve({"a": 7, "b": 9}),
    "can_swap_out": lambda m: m.can_swap_out("ab"),
    "can_swap_in": lambda m: m.can_swap_in(["out"]),
    "contains": lambda m: "a" in m,
    "block_table": lambda m: m.block_table("a"),
    "ref_count": lambda m: m.ref_count(0),
    "block_hashes": lambda m: m.block_hashes("a"),
    "usage": lambda m: m.usage(),
    "stats": lambda m: m.stats(),
    "freeing": lambda m: m.freeing("abcd"),
    "why_full": lambda m: m.why_full(),
    "block_states": lambda m: m.block_states(),
    "write_block_tables": lambda m: m.write_block_tables(
        memoryview(bytearray(64)).cast("i", (2, 8)), "ab"
    ),
    "check": lambda m: m.check(),
    "state_digest": lambda m: m.state_digest(),
}
CHANGES: Mapping[str, Call] = {
    "allocate": lambda m: m.allocate("new", [1, 2, 7, 8, 1, 1, 1]),
    "append": lambda m: m.append({"a": 1, "b": 1, "c": 1}),
    "append one": lambda m: m.append({"c": 1}),
    "reserve": lambda m: m.reserve({"a": 6, "c": 3}),
    "commit": lambda m: m.commit("c", 2, [0]),
    "truncate": lambda m: m.truncate("d", 1),
    "fork": lambda m: m.fork("a", "new"),
    "free": lambda m: m.free("a"),
    "free in flight": lambda m: m.free("c"),
    "free swapped": lambda m: m.free("out"),
    "swap_out": lambda m: m.swap_out("ab"),
    "swap_in": lambda m: m.swap_in(["out", "also out"]),
    "begin_step": lambda m: m.begin_step(),
    "complete_step": lambda m: m.complete_step(1),
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", QUERIES)
def test_a_fault_in_a_query_leaves_no_trace(name: str, *, caching: bool) -> None:
    outcomes = [as_before for _, as_before in struck(QUERIES[name], caching=caching)]
    assert outcomes
    assert all(outcomes)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_leaves_no_trace_or_a_whole_state_or_check_says_so(
    name: str, *, caching: bool
) -> None:
    outcomes = []
    for manager, as_before in struck(CHANGES[name], caching=caching):
        try:
            manager.check()
        except InvariantViolation:
            outcomes.append(False)
        else:
            outcomes.append(as_before)
            give_all_back(manager)
    first_change = outcomes.index(False)
    assert all(outcomes[:first_change])
    assert first_change > 0


def give_all_back(manager: BlockManager) -> None:
    """Who frees everything and completes every step has the whole pool."""
    for name in manager.seq_ids:
        manager.free(name)
    manager.complete_step(manager._ledger.pool.step)
    manager.check()
    stats = manager.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks


def test_the_calls_that_are_struck_take_and_evict_blocks() -> None:
    for name in ("allocate", "append"):
        manager = busy(caching=True)
        CHANGES[name](manager)
        assert manager.stats().num_evicted_blocks > 0
