"""kvblocks itself, through its public class.

An engine's order without steps in flight: allocate, append, commit, free. A sequence is its id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.allocator.adapters.base import Adapter, Can
from kvblocks import BlockManager


class RunningBatch:
    """What an engine keeps of its running sequences: their ids by age, and a decode batch."""

    def __init__(self, seq_ids: Iterable[int], manager: BlockManager) -> None:
        self.by_age = list(seq_ids)
        self.rows = manager.decode_batch(self.by_age)


class Subject(Adapter):
    """Every call of the public class that an engine would make, and no other."""

    abilities = frozenset(Can)
    evicts_like_model = True

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        self.manager = BlockManager(
            num_blocks, block_size, prefix_caching=caching, events=caching and self.tells
        )

    def pack(self, tokens: list[int]) -> array[int]:
        """32-bit ids: what the manager keeps."""
        return array("I", tokens)

    def admit(self, seq_id: int, prompt: Sequence[int]) -> tuple[int, int]:
        """Without caching a prompt is its length: nothing is published, and no ids are kept."""
        manager = self.manager
        if not self.caching:
            manager.allocate(seq_id, len(prompt))
            return seq_id, 0
        num_cached = manager.allocate(seq_id, prompt).num_cached_tokens
        manager.append({seq_id: len(prompt) - num_cached})
        manager.commit(seq_id, len(prompt))
        return seq_id, num_cached

    def free(self, seq: int) -> None:
        self.manager.free(seq)

    def take_events(self) -> list[Any]:
        return self.manager.take_events()

    def start(self, seqs: Sequence[int], prompts: Sequence[Sequence[int]]) -> RunningBatch:
        self._compute(list(zip(seqs, prompts, strict=True)))
        return RunningBatch(seqs, self.manager)

    def decode(self, batch: RunningBatch, tokens: Sequence[int]) -> array[int]:
        """A decode batch: rows advance together, and the step is committed with its tokens."""
        plan = batch.rows.append()
        batch.rows.commit(tokens)
        return plan.slot_mapping

    def decode_together(self, batch: RunningBatch, tokens: Sequence[int]) -> array[int]:
        """One append a step; with caching a commit a sequence, which brings its token."""
        manager, seq_ids = self.manager, batch.by_age
        plan = manager.append(dict.fromkeys(seq_ids, 1))
        if self.caching:
            for seq_id, token in zip(seq_ids, tokens, strict=True):
                manager.commit(seq_id, manager.num_computed_tokens(seq_id), (token,))
        return plan.slot_mapping

    def decode_singly(self, batch: RunningBatch, tokens: Sequence[int]) -> list[int]:
        """One append a sequence; with caching a commit too, which brings its token."""
        manager = self.manager
        if not self.caching:
            return [manager.append({seq_id: 1}).slot_mapping[0] for seq_id in batch.by_age]
        slots = []
        for seq_id, token in zip(batch.by_age, tokens, strict=True):
            slots.append(manager.append({seq_id: 1}).slot_mapping[0])
            manager.commit(seq_id, manager.num_computed_tokens(seq_id), (token,))
        return slots

    def exchange(
        self, batch: RunningBatch, leaving: int, joining: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        """Who is freed leaves the rows by itself; who is appended to by itself has left them."""
        super().exchange(batch.by_age, leaving, joining)
        self._compute(joining)
        for seq_id, _ in joining:
            batch.rows.join(seq_id)

    def fork(self, parent: int, child: int) -> int:
        self.manager.fork(parent, child)
        return child

    def append_to_forks(self, seqs: Sequence[int], tokens: Sequence[int]) -> int:
        del tokens  # a count is enough: nobody looks for what a fork holds
        return len(self.manager.append(dict.fromkeys(seqs, 1)).copies)

    def table(self, seq: int) -> list[int]:
        return self.manager.block_table(seq).tolist()

    def sequences(self, batch: RunningBatch) -> list[Any]:
        """Rows move when others leave; sequences that were appended to otherwise are no rows."""
        return list(batch.rows.seq_ids) or batch.by_age

    def _compute(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Prompts that were only allocated are computed before they can be appended to."""
        if not self.caching:
            self.manager.append({seq_id: len(prompt) for seq_id, prompt in prompts})
            for seq_id, prompt in prompts:
                self.manager.commit(seq_id, len(prompt))


ADAPTER = Subject
