"""kvblocks itself, through its public class."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.allocator.adapters.base import Adapter, Can
from kvblocks import BlockManager


@dataclass(slots=True)
class Running:
    """A sequence as an engine knows it: its id and its length."""

    seq_id: int
    num_tokens: int


class Subject(Adapter):
    """An engine's order without steps in flight: allocate, append, commit, free."""

    abilities = frozenset(Can)
    evicts_like_model = True

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=caching)

    def pack(self, tokens: list[int]) -> array[int]:
        """32-bit ids: what the manager keeps."""
        return array("I", tokens)

    def admit(self, seq_id: int, prompt: Sequence[int]) -> tuple[Running, int]:
        """Without caching nothing is published, so blocks are all that a prompt needs."""
        manager, num_tokens = self.manager, len(prompt)
        num_cached = manager.allocate(seq_id, prompt).num_cached_tokens
        if self.caching:
            manager.append({seq_id: num_tokens - num_cached})
            manager.commit(seq_id, num_tokens)
        return Running(seq_id, num_tokens), num_cached

    def free(self, seq: Running) -> None:
        self.manager.free(seq.seq_id)

    def start(self, seqs: Sequence[Running]) -> list[Running]:
        """A prompt that was only allocated is computed before it can be appended to."""
        if not self.caching:
            self.manager.append({seq.seq_id: seq.num_tokens for seq in seqs})
            for seq in seqs:
                self.manager.commit(seq.seq_id, seq.num_tokens)
        return list(seqs)

    def decode(self, batch: list[Running], tokens: Sequence[int]) -> array[int]:
        """One append a step; a sequence commits when a block of it is full and can be shared."""
        manager = self.manager
        if not self.caching:
            for seq in batch:
                seq.num_tokens += 1
            return manager.append(dict.fromkeys([seq.seq_id for seq in batch], 1)).slot_mapping
        plan = manager.append(
            {seq.seq_id: (token,) for seq, token in zip(batch, tokens, strict=True)}
        )
        for seq in batch:
            seq.num_tokens += 1
            if not seq.num_tokens % self.block_size:
                manager.commit(seq.seq_id, seq.num_tokens)
        return plan.slot_mapping

    def decode_singly(self, batch: list[Running], tokens: Sequence[int]) -> list[int]:
        """One append a sequence; with caching one commit too, whether a block is full or not."""
        manager, slots = self.manager, []
        for seq, token in zip(batch, tokens, strict=True):
            entry = (token,) if self.caching else 1
            slots.append(manager.append({seq.seq_id: entry}).slot_mapping[0])
            seq.num_tokens += 1
            if self.caching:
                manager.commit(seq.seq_id, seq.num_tokens)
        return slots

    def exchange(
        self, batch: list[Running], leaving: int, joining: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        super().exchange(batch, leaving, joining)
        if not self.caching:
            self.manager.append({seq_id: len(prompt) for seq_id, prompt in joining})

    def fork(self, parent: Running, child: int) -> Running:
        self.manager.fork(parent.seq_id, child)
        return Running(child, parent.num_tokens)

    def append_to_forks(self, seqs: Sequence[Running], tokens: Sequence[int]) -> int:
        del tokens  # a count is enough: nobody looks for what a fork holds
        for seq in seqs:
            seq.num_tokens += 1
        return len(self.manager.append(dict.fromkeys([seq.seq_id for seq in seqs], 1)).copies)

    def table(self, seq: Running) -> list[int]:
        return self.manager.block_table(seq.seq_id).tolist()


ADAPTER = Subject
