"""Decode batches: the same states, plans and content as calls that name each sequence."""

import random
from collections import deque
from collections.abc import Callable

import pytest

from kvblocks import (
    BlockManager,
    DecodeBatch,
    InvalidBatch,
    InvalidLength,
    InvalidTokens,
    OutOfBlocks,
    UnknownSequence,
    When,
)

from .helpers import filled


class Twins:
    """Two managers that are told the same: one through a batch, one sequence by sequence."""

    def __init__(self, seed: int, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.rng = random.Random(seed)  # noqa: S311 -- not for secrets
        self.batched = BlockManager(num_blocks, block_size, prefix_caching=caching)
        self.plain = BlockManager(num_blocks, block_size, prefix_caching=caching)
        self.batch = self.batched.decode_batch()
        self.pending: deque[list[int]] = deque()  # the rows of steps that are not committed
        self.names = iter(range(10**9))

    def both(self, call: Callable[[BlockManager], object]) -> list[object]:
        """Tell both the same; they answer the same, or refuse the same."""
        answers: list[object] = []
        for manager in (self.batched, self.plain):
            try:
                answers.append(call(manager))
            except OutOfBlocks as error:
                answers.append(str(error))
        return answers

    def some(self) -> int | None:
        names = [name for name in self.sequences if name in self.batched]
        return self.rng.choice(names) if names else None

    @property
    def sequences(self) -> list[int]:
        return list(self.plain._ledger.sequences)  # type: ignore[arg-type]  # ints are all we use

    def allocate(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 12))]
        name = next(self.names)
        first, second = self.both(lambda m: m.allocate(name, tokens))
        assert first == second
        if name not in self.plain:
            return
        self.both(lambda m: m.append({name: len(tokens) - m.num_computed_tokens(name)}))
        self.both(lambda m: m.commit(name, len(tokens)))
        self.batch.join(name)

    def fork(self) -> None:
        name = self.some()
        if name is None or not self.is_settled(name):
            return
        child = next(self.names)
        self.both(lambda m: m.fork(name, child))
        for joining in (name, child):
            if self.rng.random() < 0.8:
                self.batch.join(joining)

    def is_settled(self, name: int) -> bool:
        return self.plain.num_computed_tokens(name) == self.plain.num_committed_tokens(name)

    def leave(self) -> None:
        if self.batch.seq_ids:
            self.batch.leave(self.rng.choice(self.batch.seq_ids))

    def rejoin(self) -> None:
        name = self.some()
        if name is not None and name not in self.batch.seq_ids and self.is_settled(name):
            self.batch.join(name)

    def free(self) -> None:
        name = self.some()
        if name is not None:
            self.both(lambda m: m.free(name))

    def append(self) -> None:
        names: list[int] = list(self.batch.seq_ids)  # type: ignore[arg-type]  # as above
        if not names or len(self.pending) == 2:
            return
        verdict = self.plain.can_append(dict.fromkeys(names, 1))
        assert self.batch.can_append() == verdict
        if not verdict.is_now:
            for refused in (self.batch.append, lambda: self.plain.append(dict.fromkeys(names, 1))):
                with pytest.raises(OutOfBlocks, match=str(verdict.num_needed_blocks)):
                    refused()
            self.free()
            return
        ours, theirs = self.batch.append(), self.plain.append(dict.fromkeys(names, 1))
        assert ours.slot_mapping == theirs.slot_mapping
        assert ours.copies == theirs.copies
        assert ours.new_blocks == theirs.new_blocks
        self.pending.append(names)

    def commit(self) -> None:
        if not self.pending:
            return
        names = self.pending.popleft()
        token_of = {name: self.rng.randrange(2) for name in names}
        self.batch.commit(token_of.values())
        rows = [name for name in self.batch.seq_ids if name in token_of]
        for name in rows:
            self.plain.commit(name, self.plain.num_committed_tokens(name) + 1, [token_of[name]])
        for name in token_of.keys() - set(rows):  # the batch passed over who has left
            for manager in (self.batched, self.plain):
                if name in manager:
                    num_tokens = manager.num_committed_tokens(name) + 1
                    manager.commit(name, num_tokens, [token_of[name]])

    def step(self) -> None:
        pool = self.plain._ledger.pool
        if pool.step - pool.completed_step < 2:
            self.both(lambda m: m.begin_step())
        else:
            self.both(lambda m: m.complete_step(pool.completed_step + 1))

    def operate(self) -> None:
        operations = (self.allocate, self.fork, self.leave, self.rejoin, self.free, self.step)
        weights = (3, 2, 1, 2, 1, 3)
        if self.rng.random() < 0.6:
            self.rng.choice((self.append, self.commit))()
        else:
            self.rng.choices(operations, weights)[0]()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [4, 12, 60])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_batch_does_what_single_calls_do(
    block_size: int, num_blocks: int, *, caching: bool
) -> None:
    twins = Twins(block_size * num_blocks, num_blocks, block_size, caching=caching)
    for number in range(1500):
        twins.operate()
        twins.batched.check()
        assert twins.batched.state_digest() == twins.plain.state_digest(), number


@pytest.fixture
def batch() -> DecodeBatch:
    """Rows a, b and c of 3, 5 and 7 tokens, in blocks of 4."""
    manager = BlockManager(16, 4)
    for name, num_tokens in (("a", 3), ("b", 5), ("c", 7)):
        filled(manager, name, num_tokens, first_token=100 * num_tokens)
    return manager.decode_batch("abc")


def test_the_last_row_takes_the_place_of_one_that_leaves(batch: DecodeBatch) -> None:
    batch.leave("a")
    assert batch.seq_ids == ("c", "b")
    assert batch.append().slot_mapping.tolist() == [4 * 4 + 3, 2 * 4 + 1]
    assert len(batch) == 2


def test_tokens_of_rows_that_left_are_passed_over(batch: DecodeBatch) -> None:
    batch.append()
    batch.leave("a")
    batch.commit([1, 2, 3])
    manager = BlockManager(16, 4)
    filled(manager, "b", 5, first_token=500)
    manager.append({"b": [2]})
    manager.commit("b", 6)
    assert batch._ledger.get("b").token_ids == manager._ledger.get("b").token_ids


def test_a_sequence_in_flight_cannot_join() -> None:
    manager = BlockManager(16, 4)
    manager.allocate("a", range(6))
    with pytest.raises(InvalidBatch, match="'a' must have committed, computed and known the same"):
        manager.decode_batch("a")
    manager.append({"a": 6})
    with pytest.raises(InvalidBatch, match="got 0, 6 and 6"):
        manager.decode_batch("a")


def test_a_sequence_joins_once(batch: DecodeBatch) -> None:
    with pytest.raises(InvalidBatch, match="sequence 'a' is in this batch already"):
        batch.join("a")
    manager = BlockManager(16, 4)
    filled(manager, "a", 3)
    with pytest.raises(InvalidBatch, match="a sequence joins a batch once, got 'a' again"):
        manager.decode_batch("aa")


def test_a_refused_batch_leaves_the_others_as_they_were() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "a", 3)
    batch = manager.decode_batch("a")
    with pytest.raises(UnknownSequence, match="no sequence 'x'"):
        manager.decode_batch("ax")
    assert batch.seq_ids == ("a",)


def test_only_a_row_can_leave(batch: DecodeBatch) -> None:
    batch.leave("a")
    with pytest.raises(InvalidBatch, match="sequence 'a' is not in this batch"):
        batch.leave("a")
    with pytest.raises(UnknownSequence, match="no sequence 'x'"):
        batch.leave("x")


def test_a_commit_brings_one_token_a_row(batch: DecodeBatch) -> None:
    with pytest.raises(InvalidLength, match="commit needs a step that was appended"):
        batch.commit([1, 2, 3])
    batch.append()
    with pytest.raises(InvalidTokens, match="one token id for each of the 3 rows, got 2"):
        batch.commit([1, 2])
    with pytest.raises(InvalidTokens, match="token ids must be in"):
        batch.commit([1, 2, -1])
    batch.commit([1, 2, 3])


def test_a_full_pool_refuses_the_whole_batch() -> None:
    manager = BlockManager(3, 2)
    for name in "ab":
        filled(manager, name, 2, first_token=ord(name))
    batch = manager.decode_batch("ab")
    before = manager.state_digest()
    with pytest.raises(OutOfBlocks) as refused:
        batch.append()
    assert refused.value.verdict.when is When.LATER
    assert manager.state_digest() == before
    manager.free("b")
    assert batch.append().new_blocks == {"a": (2,)}


def test_a_batch_of_nobody_does_nothing() -> None:
    manager = BlockManager(3, 2)
    batch = manager.decode_batch()
    assert len(batch.append().slot_mapping) == 0
    batch.commit([])


def test_a_sequence_without_a_block_advances_beside_a_shared_tail() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    filled(manager, "A", [1, 2, 3])
    manager.fork("A", "B")
    manager.allocate("empty", [5])
    manager.truncate("empty", 0)
    plan = manager.decode_batch(["empty", "A", "B"]).append()
    assert plan.new_blocks.keys() == {"empty", "A"}
    assert plan.slot_mapping.tolist()[2] == 3
    manager.check()


def test_without_a_prefix_cache_a_commit_needs_no_ids() -> None:
    manager = BlockManager(16, 4, prefix_caching=False)
    for name in "ab":
        manager.allocate(name, 3)
        manager.append({name: 3})
        manager.commit(name, 3)
    batch = manager.decode_batch("ab")
    for _ in range(3):
        batch.append()
        batch.commit()
    assert manager.num_committed_tokens("a") == 6
    batch.append()
    with pytest.raises(InvalidTokens, match="one token id for each of the 2 rows, got 1"):
        batch.commit([1])


def test_a_prompt_that_is_not_computed_cannot_join() -> None:
    manager = BlockManager(16, 4, prefix_caching=False)
    manager.allocate("a", 9)
    manager.append({"a": 3})
    manager.commit("a", 3)
    with pytest.raises(InvalidBatch, match="got 3 computed positions in blocks for 12"):
        manager.decode_batch("a")
