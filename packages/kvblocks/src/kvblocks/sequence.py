"""One sequence: its block table, its lengths, and which blocks a write needs.

          0        committed     computed          capacity
          |------------|-------------|-----------------|
           written, may  scheduled,    blocks are held,
           be shared     in flight     nothing scheduled

Knows its own table and tokens. Does not know the pool: it is told reference counts and given blocks.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvblocks.errors import InvalidLength, InvalidTokens
from kvblocks.hashing import TOKEN_BYTES, little_endian, pack_tokens
from kvblocks.results import BlockCopy, SequenceId


@dataclass(frozen=True, slots=True)
class Write:
    """A checked write of the next positions of one sequence, and the blocks it needs."""

    num_tokens: int
    new_tokens: array[int]  # ids that the sequence does not know yet
    replaced: tuple[int, ...]  # table indices of blocks that others hold too
    sources: tuple[int, ...]  # those blocks
    num_blocks: int  # blocks up to the last position written
    num_new_blocks: int


@dataclass(slots=True)
class Sequence:
    """The state of one sequence. `token_ids` holds the ids known so far, at least the committed."""

    block_size: int
    root: bytes
    block_table: array[int]
    token_ids: array[int]
    num_committed: int
    num_computed: int
    last_step: int = 0  # the newest step that was begun when it was last scheduled

    @property
    def capacity(self) -> int:
        """Positions that the held blocks can store."""
        return len(self.block_table) * self.block_size

    def block_tokens(self, start: int, stop: int) -> Iterator[bytes]:
        """The packed tokens of the full blocks start..stop-1."""
        return split_blocks(self.token_ids, self.block_size, start, stop)

    def num_valid(self, index: int) -> int:
        """Computed positions in the block at `index` of the table."""
        return min(max(self.num_computed - index * self.block_size, 0), self.block_size)

    def plan_write(
        self, seq_id: SequenceId, entry: array[int] | int, ref_count: Callable[[int], int]
    ) -> Write:
        """Check a write of the next positions and find the blocks it needs; changes nothing."""
        num_tokens, new_tokens = self._read_entry(seq_id, entry)
        end = self.num_computed + num_tokens
        num_held, num_blocks = len(self.block_table), -(-end // self.block_size)
        touched = range(self.num_computed // self.block_size, min(num_held, num_blocks))
        shared = tuple(i for i in touched if ref_count(self.block_table[i]) > 1)
        return Write(
            num_tokens=num_tokens,
            new_tokens=new_tokens,
            replaced=shared,
            sources=tuple(self.block_table[i] for i in shared),
            num_blocks=num_blocks,
            num_new_blocks=len(shared) + max(0, num_blocks - num_held),
        )

    def apply_write(self, write: Write, new_blocks: Iterable[int]) -> list[BlockCopy]:
        """Put new blocks where the write needs them, and schedule its positions."""
        copies = []
        blocks = iter(new_blocks)
        for index, source in zip(write.replaced, write.sources, strict=True):
            destination = next(blocks)
            if num_valid := self.num_valid(index):
                copies.append(BlockCopy(source, destination, num_valid))
            self.block_table[index] = destination
        self.block_table.extend(blocks)
        self.token_ids.extend(write.new_tokens)
        self.num_computed += write.num_tokens
        return copies

    def slots(self, start: int) -> Iterator[range]:
        """The slots of the positions start..computed-1: one range a block."""
        size = self.block_size
        while start < self.num_computed:
            index, offset = divmod(start, size)
            stop = min(self.num_computed, (index + 1) * size)
            slot = self.block_table[index] * size + offset
            yield range(slot, slot + stop - start)
            start = stop

    def fork(self) -> Sequence:
        """A sequence with the same tokens, lengths and blocks. The caller adds the references."""
        return replace(self, block_table=self.block_table[:], token_ids=self.token_ids[:])

    def _read_entry(self, seq_id: SequenceId, entry: array[int] | int) -> tuple[int, array[int]]:
        """The number of positions that an entry schedules, and the token ids that are news."""
        if isinstance(entry, int):
            num_tokens, packed = entry, array("I")
        else:
            num_tokens, packed = len(entry), entry
        if num_tokens < 1:
            raise InvalidLength(
                f"sequence {seq_id!r} must append at least 1 token, got {num_tokens}"
            )
        start, num_known = self.num_computed, len(self.token_ids)
        if packed and start > num_known:
            raise InvalidTokens(
                f"sequence {seq_id!r} has {start} computed positions but {num_known} known token "
                f"ids: commit the missing ids first, or append a count"
            )
        known = self.token_ids[start : start + len(packed)]
        if packed[: len(known)] != known:
            at = next(i for i, token in enumerate(known) if token != packed[i])
            raise InvalidTokens(
                f"token ids must agree with the known ones: sequence {seq_id!r} has {known[at]} "
                f"at position {start + at}, got {packed[at]}"
            )
        return num_tokens, packed[len(known) :]


def read_entry(entry: Iterable[int] | int) -> array[int] | int:
    """One entry of a batch: packed token ids, or a count."""
    return pack_tokens(entry) if isinstance(entry, Iterable) else operator.index(entry)


def split_blocks(tokens: array[int], block_size: int, start: int, stop: int) -> Iterator[bytes]:
    """Cut packed tokens into the bytes of the full blocks start..stop-1."""
    packed = little_endian(tokens[start * block_size : stop * block_size])
    width = block_size * TOKEN_BYTES
    for at in range(0, len(packed), width):
        yield packed[at : at + width]
