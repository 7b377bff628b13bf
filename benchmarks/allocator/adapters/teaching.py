"""The allocator of the textbooks: lists and dicts, one entry a block, no prefix cache.

This is how PagedAttention is usually explained: a free list, a dict of reference counts, a list a
sequence as its block table, copy-on-write of a shared last block. Payloads are left out, as no
other block manager here stores any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.allocator.adapters.base import Adapter, Can


class TeachingAllocator:
    """Blocks by sequence id. `allocate` and `append` raise `MemoryError` when the pool is empty."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(reversed(range(num_blocks)))
        self.ref_counts = dict.fromkeys(range(num_blocks), 0)
        self.block_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Take blocks for a prompt."""
        needed = math.ceil(num_tokens / self.block_size)
        if len(self.free_blocks) < needed:
            raise MemoryError(f"{needed} blocks needed, {len(self.free_blocks)} are free")
        self.block_tables[seq_id] = [self._take() for _ in range(needed)]
        self.lengths[seq_id] = num_tokens

    def append(self, seq_id: int) -> tuple[int, bool]:
        """Make room for one token: its slot, and whether a shared block has to be copied first."""
        table, length = self.block_tables[seq_id], self.lengths[seq_id]
        offset, copied = length % self.block_size, False
        if offset == 0:
            table.append(self._take())
        elif self.ref_counts[table[-1]] > 1:
            self.ref_counts[table[-1]] -= 1
            table[-1] = self._take()
            copied = True
        self.lengths[seq_id] = length + 1
        return table[-1] * self.block_size + offset, copied

    def fork(self, parent_id: int, child_id: int) -> None:
        """Share all blocks of a sequence with a new one."""
        table = self.block_tables[parent_id]
        for block in table:
            self.ref_counts[block] += 1
        self.block_tables[child_id] = list(table)
        self.lengths[child_id] = self.lengths[parent_id]

    def free(self, seq_id: int) -> None:
        """Drop a reference to each block; blocks without any go back."""
        for block in self.block_tables.pop(seq_id):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)
        del self.lengths[seq_id]

    def _take(self) -> int:
        if not self.free_blocks:
            raise MemoryError("no block is free")
        block = self.free_blocks.pop()
        self.ref_counts[block] = 1
        return block


class Teaching(Adapter):
    """Sequences are their ids."""

    abilities = frozenset(Can) - {Can.CACHE, Can.TELL}

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        self.allocator = TeachingAllocator(num_blocks, block_size)

    def admit(self, seq_id: int, prompt: Sequence[int]) -> tuple[int, int]:
        self.allocator.allocate(seq_id, len(prompt))
        return seq_id, 0

    def free(self, seq: int) -> None:
        self.allocator.free(seq)

    def decode(self, batch: list[int], tokens: Sequence[int]) -> list[int]:
        del tokens  # nothing is cached, so nobody asks what a block holds
        append = self.allocator.append
        return [append(seq_id)[0] for seq_id in batch]

    def fork(self, parent: int, child: int) -> int:
        self.allocator.fork(parent, child)
        return child

    def append_to_forks(self, seqs: Sequence[int], tokens: Sequence[int]) -> int:
        del tokens
        return sum(self.allocator.append(seq_id)[1] for seq_id in seqs)

    def table(self, seq: int) -> list[int]:
        return self.allocator.block_tables[seq]


ADAPTER = Teaching
