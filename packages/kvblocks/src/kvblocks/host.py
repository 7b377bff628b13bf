"""Blocks of host memory: which are free, and what those hold that sequences were swapped out to.

A full block is known by what it holds and by the block before it, so that sequences with a common
prefix share its host blocks, whenever they are swapped out. This module numbers blocks; it does not know
the memory behind them, tables of device blocks, or who is swapped when.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from kvblocks.pool import BlockPool
from kvblocks.results import Verdict, When
from kvblocks.sequence import Sequence

# What precedes a full block (a host block, or for the first one a generation, made negative), and what
# it holds: its packed tokens, and what stands before them.
Name: TypeAlias = tuple[int, bytes]


class Swapped(NamedTuple):
    """A sequence without device blocks, and the host blocks of its computed positions."""

    sequence: Sequence
    host_table: array[int]


class HostBlocks:
    """The host blocks of one manager."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_of: dict[Name, int] = {}
        self.name_of: dict[int, Name] = {}

    @property
    def num_held(self) -> int:
        """Blocks that swapped sequences hold. O(1)."""
        return self.pool.num_blocks - self.pool.num_free - self.pool.num_fenced

    def judge(self, num_needed: int, num_total: int) -> Verdict:
        """Judge a need for host blocks, for sequences that will hold `num_total`. O(open steps)."""
        available = self.pool.num_free
        if num_total > self.pool.num_blocks:
            return Verdict(When.NEVER, num_needed, available, pool="host")
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available, pool="host")
        within_reach = available
        for step in sorted(self.pool.fenced):
            within_reach += len(self.pool.fenced[step])
            if num_needed <= within_reach:
                return Verdict(When.AFTER_STEP, num_needed, available, step, pool="host")
        return Verdict(When.LATER, num_needed, available, pool="host")

    def find(self, generation: int, contents: Iterator[bytes]) -> array[int]:
        """The blocks that hold the first of these contents. O(blocks)."""
        found, before = array("i"), -generation
        for content in contents:
            block = self.block_of.get((before, content))
            if block is None:
                break
            found.append(block)
            before = block
        return found

    def note(self, generation: int, table: array[int], contents: Iterator[bytes]) -> None:
        """Note what the first blocks of a table hold. O(blocks)."""
        before = -generation
        for block, content in zip(table, contents, strict=False):
            name = (before, content)
            self.block_of[name], self.name_of[block] = block, name
            before = block

    def give_back(self, table: array[int], last_step: int) -> None:
        """Drop the blocks of a table that `last_step` was the last step to use. O(blocks)."""
        for block in table:
            if block not in self.pool.shared and block in self.name_of:
                del self.block_of[self.name_of.pop(block)]
        self.pool.give_back(table, last_step)

    def move(self, key: bytes, generation: int, to: int) -> None:
        """Let what begins with `key` in one generation belong to another. O(blocks with a name)."""
        for name, block in list(self.block_of.items()):
            before, content = name
            if before == -generation and content.startswith(key):
                del self.block_of[name]
                self.block_of[-to, content] = block
                self.name_of[block] = -to, content

    def state(self) -> tuple[object, ...]:
        """All that matters from now on but who holds what, for comparison."""
        pool = self.pool
        return (
            (pool.free, sorted(pool.shared.items())),
            (sorted(pool.touched.items()), sorted(pool.fenced.items())),
        )


def contents_of(
    tokens: bytes, keys: Mapping[int, bytes], width: int, num_blocks: int
) -> Iterator[bytes]:
    """What the first blocks of a sequence hold, each with what stands before it."""
    for index in range(num_blocks):
        yield keys.get(index, b"") + tokens[index * width : (index + 1) * width]
