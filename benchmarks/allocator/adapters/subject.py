"""kvblocks itself, through its public class.

An engine's order without steps in flight: allocate, append, commit, free. A sequence is its id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from benchmarks.allocator.adapters.base import Adapter, Can
from kvblocks import BlockManager


class RunningBatch:
    """What an engine keeps of running sequences: the counts of a step, and who fills a block when."""

    def __init__(self, seq_ids: Iterable[int], manager: BlockManager) -> None:
        self.manager = manager
        self.seq_ids = list(seq_ids)
        self.counts = dict.fromkeys(self.seq_ids, 1)
        self.note_lengths()

    def note_lengths(self) -> None:
        """Group the sequences by the number of steps after which each fills a block."""
        self.num_steps = 0
        size = self.manager.block_size
        self._fills_after: list[list[int]] = [[] for _ in range(size)]
        for seq_id in self.seq_ids:
            num_tokens = self.manager.num_computed_tokens(seq_id)
            self._fills_after[-num_tokens % size].append(seq_id)

    def advance(self) -> list[int]:
        """Count a step; returns the sequences of which it filled a block."""
        self.num_steps += 1
        return self._fills_after[self.num_steps % self.manager.block_size]


class Subject(Adapter):
    """Every call of the public class that an engine would make, and no other."""

    abilities = frozenset(Can)
    evicts_like_model = True

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=caching)

    def pack(self, tokens: list[int]) -> array[int]:
        """32-bit ids: what the manager keeps."""
        return array("I", tokens)

    def admit(self, seq_id: int, prompt: Sequence[int]) -> tuple[int, int]:
        """Without caching nothing is published, so blocks are all that a prompt needs."""
        manager = self.manager
        num_cached = manager.allocate(seq_id, prompt).num_cached_tokens
        if self.caching:
            manager.append({seq_id: len(prompt) - num_cached})
            manager.commit(seq_id, len(prompt))
        return seq_id, num_cached

    def free(self, seq: int) -> None:
        self.manager.free(seq)

    def start(self, seqs: Sequence[int], prompts: Sequence[Sequence[int]]) -> RunningBatch:
        """A prompt that was only allocated is computed before it can be appended to."""
        if not self.caching:
            for seq_id, prompt in zip(seqs, prompts, strict=True):
                self.manager.append({seq_id: len(prompt)})
                self.manager.commit(seq_id, len(prompt))
        return RunningBatch(seqs, self.manager)

    def decode(self, batch: RunningBatch, tokens: Sequence[int]) -> array[int]:
        """One append a step; a sequence commits when a block of it is full and can be shared."""
        manager = self.manager
        if not self.caching:
            return manager.append(batch.counts).slot_mapping
        plan = manager.append(dict(zip(batch.seq_ids, zip(tokens, strict=True), strict=True)))
        for seq_id in batch.advance():
            manager.commit(seq_id, manager.num_computed_tokens(seq_id))
        return plan.slot_mapping

    def decode_singly(self, batch: RunningBatch, tokens: Sequence[int]) -> list[int]:
        """One append a sequence; with caching one commit too, whether a block is full or not."""
        manager = self.manager
        if not self.caching:
            return [manager.append({seq_id: 1}).slot_mapping[0] for seq_id in batch.seq_ids]
        slots = []
        for seq_id, token in zip(batch.seq_ids, tokens, strict=True):
            slots.append(manager.append({seq_id: (token,)}).slot_mapping[0])
            manager.commit(seq_id, manager.num_computed_tokens(seq_id))
        return slots

    def exchange(
        self, batch: RunningBatch, leaving: int, joining: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        for seq_id in batch.seq_ids[:leaving]:
            del batch.counts[seq_id]
        super().exchange(batch.seq_ids, leaving, joining)
        if self.caching:
            batch.note_lengths()
        else:
            self.manager.append({seq_id: len(prompt) for seq_id, prompt in joining})
        batch.counts.update((seq_id, 1) for seq_id, _ in joining)

    def fork(self, parent: int, child: int) -> int:
        self.manager.fork(parent, child)
        return child

    def append_to_forks(self, seqs: Sequence[int], tokens: Sequence[int]) -> int:
        del tokens  # a count is enough: nobody looks for what a fork holds
        return len(self.manager.append(dict.fromkeys(seqs, 1)).copies)

    def table(self, seq: int) -> list[int]:
        return self.manager.block_table(seq).tolist()

    def sequences(self, batch: RunningBatch) -> list[int]:
        return batch.seq_ids


ADAPTER = Subject
