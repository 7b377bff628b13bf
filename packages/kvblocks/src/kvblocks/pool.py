"""Which blocks are free, which loose blocks are shared, and which wait for a step.

A held block is *loose*, in the tables of one sequence or of a few forks of it, or it belongs to a
run, which knows its own holders (`kvblocks.tree`). This module knows ids, loose blocks and steps. It
does not know tokens, tables, or why anything is held.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvblocks.errors import InvalidStep


class BlockPool:
    """The blocks 0..num_blocks-1, as a stack of free ones and notes on those that are not simple.

    A fresh pool hands out 0, 1, 2, ...; blocks that came back are handed out next, in their order.

        stack:  | not free: whatever | free, the next one first |
                0                    top                        num_blocks
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._stack = array("i", range(num_blocks))
        self._top = 0
        self.shared: dict[int, int] = {}  # loose block -> how many tables hold it, if several do
        self.touched: dict[int, int] = {}  # shared block -> the newest open step of one who left it
        self.fenced: dict[int, array[int]] = {}  # step -> loose blocks that nobody holds
        self.num_fenced = 0
        self.step = 0  # the newest step begun: changes belong to it, if it is open
        self.completed_step = 0

    @property
    def open_step(self) -> int:
        """The step that changes belong to now, or 0."""
        return self.step if self.step > self.completed_step else 0

    @property
    def num_free(self) -> int:
        """Blocks that are free. O(1)."""
        return self.num_blocks - self._top

    @property
    def free(self) -> array[int]:
        """The free blocks, that which is handed out next first. One copy."""
        return self._stack[self._top :]

    def take(self, num_blocks: int) -> array[int]:
        """Take free blocks. The caller has made sure of enough. One copy."""
        start = self._top
        self._top += num_blocks
        return self._stack[start : self._top]

    def share(self, blocks: Iterable[int]) -> None:
        """Note one more table that holds each of these loose blocks."""
        for block in blocks:
            self.shared[block] = self.shared.get(block, 1) + 1

    def give_back(self, blocks: array[int], last_step: int) -> None:
        """Drop loose blocks from a table that `last_step` was the last step to use.

        One copy, unless some are shared. Who held them alone makes them free, or fenced while
        that step, or one of somebody who left them earlier, is open.
        """
        if self.shared or self.touched:
            self._give_back_shared(blocks, last_step)
        elif last_step > self.completed_step:
            self._fence(blocks, last_step)
        else:
            self._put(blocks)

    def begin_step(self) -> int:
        """Open the next step and return its number."""
        self.step += 1
        return self.step

    def complete_step(self, step: int) -> bool:
        """Complete all steps up to `step`; whether that is news. O(blocks whose fence falls)."""
        if not 0 < step <= self.step:
            raise InvalidStep(f"step must have been begun (1..{self.step}), got {step}")
        if step <= self.completed_step:
            return False
        self.completed_step = step
        self.touched = {b: s for b, s in self.touched.items() if s > step}
        for fence in sorted(s for s in self.fenced if s <= step):
            blocks = self.fenced.pop(fence)
            self.num_fenced -= len(blocks)
            self._put(blocks)
        return True

    def let_go(self, block: int, last_step: int) -> int | None:
        """Take a block out of a table; None if another table holds it still.

        Else the step, of those who had it, that must complete before it can be used again, or 0.
        """
        in_flight = last_step if last_step > self.completed_step else 0
        num_tables = self.shared.get(block, 1)
        step = max(in_flight, self.touched.get(block, 0))
        if num_tables == 1:
            return step
        if num_tables == 2:  # the one that is left holds it alone
            del self.shared[block]
        else:
            self.shared[block] = num_tables - 1
        if step:
            self.touched[block] = step
        return None

    def receive(self, block: int, step: int) -> None:
        """Take back a block that nobody holds: free, or fenced while a step is open."""
        if step:
            self._fence(array("i", (block,)), step)
        else:
            self._put(array("i", (block,)))

    def _put(self, blocks: array[int]) -> None:
        """Make blocks free, those that are handed out next."""
        end = self._top
        self._top -= len(blocks)
        self._stack[self._top : end] = blocks

    def _fence(self, blocks: array[int], step: int) -> None:
        if blocks:
            self.fenced.setdefault(step, array("i")).extend(blocks)
            self.num_fenced += len(blocks)

    def _give_back_shared(self, blocks: array[int], last_step: int) -> None:
        for block in reversed(blocks):
            step = self.let_go(block, last_step)
            if step is not None:
                self.receive(block, step)
