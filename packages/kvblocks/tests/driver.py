"""A random user of the whole public interface, decode batches and steps included.

Knows how to make calls that are allowed. Does not know what their answers must be: who drives a
manager with it watches for that.
"""

import random
from collections.abc import Callable
from contextlib import suppress

from kvblocks import BlockManager, InvalidBatch, InvalidSwap, OutOfBlocks, StepPlan


class Driver:
    """Sequences of one manager, some of them in a decode batch, and the steps in flight."""

    def __init__(self, seed: int, manager: BlockManager) -> None:
        self.rng = random.Random(seed)  # noqa: S311 -- replayable, not secret
        self.manager = manager
        self.batch = manager.decode_batch()
        self.names: list[str] = []
        self.swapped: list[str] = []
        self.num_names = 0
        self.num_steps = self.num_completed = 0
        self.plans: list[StepPlan] = []  # all that were handed out in the last operation

    def operate(self) -> None:
        """One random call; a pool that is full makes room."""
        self.plans = []
        operations: list[tuple[Callable[[], None], int]] = [
            (self.allocate, 4),
            (self.begin, 2),
            (self.complete, 2),
        ]
        if self.names:
            operations += [
                (self.append, 6),
                (self.commit, 8),
                (self.truncate, 2),
                (self.fork, 4),
                (self.free, 3),
                (self.reserve, 1),
                (self.join, 4),
                (self.leave, 1),
                (self.append_batch, 6),
                (self.commit_batch, 8),
            ]
        if self.manager.num_host_blocks:
            operations += [(self.swap_out, 4), (self.swap_in, 4)]
        choices, weights = zip(*operations, strict=True)
        try:
            self.rng.choices(choices, weights)[0]()
        except OutOfBlocks:
            if self.names:
                self.free()

    def swap_out(self) -> None:
        names = [name for name in self.names if self.is_settled(name)]
        names = self.rng.sample(names, min(len(names), self.rng.randint(0, 2)))
        try:
            self.manager.swap_out(names)
        except InvalidSwap:
            return  # the open step fills blocks of one
        self.swapped += names
        self.names = [name for name in self.names if name not in names]

    def swap_in(self) -> None:
        names = self.rng.sample(self.swapped, min(len(self.swapped), self.rng.randint(0, 2)))
        self.manager.swap_in(names)
        self.names += names
        self.swapped = [name for name in self.swapped if name not in names]

    def some_name(self) -> str:
        return self.rng.choice(self.names)

    def new_name(self) -> str:
        self.num_names += 1
        return f"sequence {self.num_names}"

    def some_tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(num_tokens)]

    def is_settled(self, name: str) -> bool:
        return self.manager.num_committed_tokens(name) == self.manager.num_computed_tokens(name)

    def num_known(self, name: str) -> int:
        return self.manager._ledger.get(name).num_known

    def allocate(self) -> None:
        name = self.new_name()
        most = 4 * self.manager.block_size
        tokens = self.some_tokens(self.rng.randint(1, most))
        self.manager.allocate(name, tokens, salt=self.rng.choice((None, None, "", "x")))
        self.names.append(name)

    def append(self) -> None:
        names = self.rng.sample(self.names, self.rng.randint(1, len(self.names)))
        most = self.manager.block_size + 1
        self.plans.append(self.manager.append({n: self.rng.randint(1, most) for n in names}))

    def commit(self) -> None:
        name = self.some_name()
        committed = self.manager.num_committed_tokens(name)
        n = self.rng.randint(committed, self.manager.num_computed_tokens(name))
        if self.rng.random() < 0.7:
            n = self.manager.num_computed_tokens(name)
        self.manager.commit(name, n, self.some_tokens(max(0, n - self.num_known(name))))

    def truncate(self) -> None:
        name = self.some_name()
        committed = self.manager.num_committed_tokens(name)
        computed = self.manager.num_computed_tokens(name)
        self.manager.truncate(name, self.rng.randint(committed, computed))

    def fork(self) -> None:
        name = self.some_name()
        if self.is_settled(name):
            child = self.new_name()
            self.manager.fork(name, child)
            self.names.append(child)

    def reserve(self) -> None:
        name = self.some_name()
        num_more = self.rng.randint(0, 2 * self.manager.block_size)
        num_tokens = self.manager.num_computed_tokens(name) + num_more
        self.manager.reserve({name: self.rng.choice((0, 0, 0, num_tokens))})

    def free(self) -> None:
        name = self.some_name()
        self.manager.free(name)
        self.names.remove(name)

    def begin(self) -> None:
        if self.num_steps - self.num_completed < 2:
            self.num_steps = self.manager.begin_step()

    def complete(self) -> None:
        if self.num_completed < self.num_steps:
            self.num_completed += 1
            self.manager.complete_step(self.num_completed)

    def join(self) -> None:
        name = self.some_name()
        num_computed = self.manager.num_computed_tokens(name)
        is_known = self.num_known(name) == num_computed
        if name not in self.batch.seq_ids and self.is_settled(name) and is_known:
            with suppress(InvalidBatch):  # not all of its blocks are begun
                self.batch.join(name)

    def leave(self) -> None:
        if self.batch.seq_ids:
            self.batch.leave(self.rng.choice(self.batch.seq_ids))

    def append_batch(self) -> None:
        if len(self.batch._pending) < 2:
            self.plans.append(self.batch.append())

    def commit_batch(self) -> None:
        if self.batch._pending:
            self.batch.commit(self.some_tokens(len(self.batch._pending[0])))
