"""Groups of layers that read no further back than a window: which of their blocks are kept and found.

All groups take blocks from one pool. The window group's block of some content is the *companion* of
the full group's block of the same content, and its life lies within that block's:

    tokens          [0, B)   [B, 2B)  [2B, 3B)  [3B, 4B)     a window that reaches back two blocks
    full group        7        3         8         5          a run, or the loose tail of a table
                                         │         │
    window group      -        -         2         6          companions: what a query at 4B reads

A prompt finds so many full blocks as have, right before its end, the companions that a query there can
read. A companion that no table holds is cached by itself. Full runs and companions are evicted in one
order, that in which they were given up, so that neither drives the other out; and a companion goes
with its full block at the latest.

Knows companions, who of them rests, and how far a window reaches. Does not know prompts or batches.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, takewhile

from kvblocks.errors import InvalidConfig
from kvblocks.pool import BlockPool
from kvblocks.results import BlockMerge, Forgotten
from kvblocks.runs import Found, Run, parent_of
from kvblocks.sequence import Sequence, WindowTable
from kvblocks.tree import RunTree


class Windows:
    """The window groups of one manager: `sizes` are in tokens, one's own included."""

    def __init__(
        self, pool: BlockPool, runs: RunTree, block_size: int, sizes: tuple[int, ...]
    ) -> None:
        self._pool = pool
        self._runs = runs
        self._block_size = block_size
        self.sizes = sizes
        # How many blocks before a boundary of blocks a query at that boundary can read.
        self.depths = tuple(-(-(size - 1) // block_size) for size in sizes)
        blank = array("i", (-1,)) * (pool.num_blocks if sizes else 0)
        self.companions = [blank[:] for _ in sizes]  # of each group: full block -> its block, or -1
        self.full_block_of = blank  # companion -> full block, or -1
        self.cached: OrderedDict[int, int] = OrderedDict()  # companion -> when it was given up
        self.fenced: dict[int, int] = {}  # companion -> the open step that it waits for

    def start(self, size: int, num_tokens: int) -> int:
        """The first block that queries from position `num_tokens` on can read."""
        return max(0, num_tokens - size + 1) // self._block_size

    # ── finding ──────────────────────────────────────────────────────────────────────────────

    def reach(self, found: Found) -> Found:
        """As much of a match as has all the companions that a query at its end can read.

        O(blocks in the windows + blocks that are left out), for each group.
        """
        blocks = found.blocks
        num_blocks = len(blocks)
        lows = [num_blocks] * len(self.sizes)  # from there on all companions are there
        is_settled = False
        while not is_settled:
            is_settled = True
            for group, companion in enumerate(self.companions):
                low = min(lows[group], num_blocks)
                while low > max(0, num_blocks - self.depths[group]):
                    low -= 1
                    if companion[blocks[low]] < 0:
                        num_blocks, is_settled = low, False
                lows[group] = low
        return _shorten(found, num_blocks)

    def companions_of(self, blocks: array[int]) -> list[array[int]]:
        """Of each group, the companions that a query right after these full blocks can read."""
        num_blocks = len(blocks)
        return [
            array("i", [companion[b] for b in blocks[max(0, num_blocks - depth) :]])
            for companion, depth in zip(self.companions, self.depths, strict=True)
        ]

    def num_new_blocks(self, num_found: int, num_total: int) -> list[int]:
        """Of each group, how many blocks a prompt gets at once: those of one window, at most."""
        return [min(num_total, max(num_found, depth) + 1) - num_found for depth in self.depths]

    def reused(self, companions: Iterable[int], fenced: dict[int, int]) -> int:
        """How many of these companions are cached; those that wait are added to their steps."""
        num_cached = 0
        for block in companions:
            if block in self.cached:
                num_cached += 1
            elif step := self.fenced.get(block):
                fenced[step] = fenced.get(step, 0) + 1
        return num_cached

    # ── holding ──────────────────────────────────────────────────────────────────────────────

    def hold(self, blocks: Iterable[int]) -> None:
        """Let one more table hold these companions."""
        for block in blocks:
            if block in self.cached or block in self.fenced:
                if step := self._leave_rest(block):
                    self._pool.touched[block] = step
            else:
                self._pool.share((block,))

    def give_up(self, blocks: Iterable[int], last_step: int) -> None:
        """Drop window blocks from a table that `last_step` was the last step to use."""
        for block in blocks:
            step = self._pool.let_go(block, last_step)
            if step is None:
                continue
            if self.full_block_of[block] < 0:
                self._pool.receive(block, step)
            elif step:
                self.fenced[block] = step
                self._runs.num_fenced += 1
            else:
                self._cache(block)

    def slide(self, sequence: Sequence) -> None:
        """Give up the blocks that no query from the committed length on can read."""
        for size, table in zip(self.sizes, sequence.windows, strict=True):
            start = self.start(size, sequence.num_committed)
            if start > table.start:
                self.give_up(table.cut(start), sequence.last_step)

    def open_tables(
        self, blocks: array[int], new: array[int], num_total: int
    ) -> tuple[WindowTable, ...]:
        """The tables of a sequence that has found these full blocks and holds their companions."""
        tables, at = [], 0
        num_new = self.num_new_blocks(len(blocks), num_total)
        for companions, num_blocks in zip(self.companions_of(blocks), num_new, strict=True):
            start = len(blocks) - len(companions)
            before = array("i", (-1,)) * start
            tables.append(WindowTable(before + companions + new[at : at + num_blocks], start))
            at += num_blocks
        return tuple(tables)

    def publish(self, sequence: Sequence, start: int) -> list[BlockMerge]:
        """Make the window blocks from `start` on companions of the full blocks just published.

        Where a companion is there already, the sequence adopts it and gives its own back.
        """
        merges: list[BlockMerge] = []
        if not sequence.run.is_kept:
            return merges  # what nobody can find needs no companion
        for group, table in enumerate(sequence.windows):
            companion = self.companions[group]
            for index in range(start, sequence.num_run_blocks):
                full, own = sequence.block_table[index], table.blocks[index]
                known = companion[full]
                if known < 0:
                    companion[full], self.full_block_of[own] = own, full
                else:
                    self.hold((known,))
                    table.blocks[index] = known
                    self.give_up((own,), sequence.last_step)
                    merges.append(BlockMerge(index, own, known, group + 1))
        return merges

    # ── resting and eviction ─────────────────────────────────────────────────────────────────

    def complete_step(self, step: int) -> None:
        """Turn companions that waited for steps up to `step` into cached ones."""
        for block in [block for block, fence in self.fenced.items() if fence <= step]:
            self._leave_rest(block)
            self._cache(block)

    def evict(self, num_blocks: int) -> array[int]:
        """Take cached blocks of all groups, in the order in which they were given up.

        Between the companion that was given up first and the leaf that the policy would have go
        next, the one that was given up longer ago goes; the leaf, if it was at once. No block may
        be free. O(blocks, and the log of the number of leaves for each that is cut).
        """
        taken = array("i")
        while len(taken) < num_blocks:
            has_leaf = self._runs.num_cached > len(self.cached)
            leaf = self._runs.queue.peek() if has_leaf else None
            older = self._given_up_before(leaf, num_blocks - len(taken))
            self._drop(older)
            taken.extend(older)
            missing = num_blocks - len(taken)
            if missing and leaf:
                # As many as are needed even if each brings a companion of every window.
                num_full = min(len(leaf.blocks), max(1, missing // (1 + len(self.sizes))))
                taken += self._runs.evict(num_full)
                companions = self._companions_at(taken[-num_full:])
                self._drop(companions)
                for block in companions:
                    self._pool.receive(block, 0)
                taken += self._pool.take(min(self._pool.num_free, num_blocks - len(taken)))
        return taken

    def forget(self, key: bytes) -> Forgotten:
        """Part what the namespaces whose keys begin so have, before their runs are forgotten.

        Companions in tables stay there, as blocks that nobody finds. O(blocks of these namespaces).
        """
        num_free = num_fenced = num_held = 0
        stack = [run for name, run in self._runs.root.children.items() if name.startswith(key)]
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            for block in self._companions_at(run.blocks):
                self._part(block)
                if block in self.cached or block in self.fenced:
                    step = self._leave_rest(block)
                    self._pool.receive(block, step)
                    num_fenced += 1 if step else 0
                    num_free += 0 if step else 1
                else:
                    num_held += 1
        return Forgotten(num_free, num_fenced, num_held)

    def state(self) -> tuple[object, ...]:
        """All that matters from now on, for comparison."""
        return (
            [companion.tolist() for companion in self.companions],
            (list(self.cached.items()), list(self.fenced.items())),
        )

    def _given_up_before(self, leaf: Run | None, most: int) -> list[int]:
        """Cached companions, up to so many, that were given up before a leaf was."""
        end = leaf.last_used if leaf else math.inf
        first = islice(self.cached.items(), most)
        return [block for block, given_up in takewhile(lambda item: item[1] < end, first)]

    def _companions_at(self, blocks: Iterable[int]) -> list[int]:
        return [c[block] for block in blocks for c in self.companions if c[block] >= 0]

    def _cache(self, block: int) -> None:
        self.cached[block] = self._runs.clock
        self._runs.num_cached += 1

    def _leave_rest(self, block: int) -> int:
        """Take a companion out of those that nobody holds; the step that it waited for, or 0."""
        if block in self.cached:
            del self.cached[block]
            self._runs.num_cached -= 1
            return 0
        self._runs.num_fenced -= 1
        return self.fenced.pop(block)

    def _part(self, block: int) -> None:
        """Let a companion be a block like any other."""
        full = self.full_block_of[block]
        self.full_block_of[block] = -1
        for companion in self.companions:
            if companion[full] == block:
                companion[full] = -1

    def _drop(self, companions: Iterable[int]) -> None:
        """Evict companions that are cached."""
        for block in companions:
            self._leave_rest(block)
            self._part(block)
            self._runs.num_evicted += 1


def read_windows(windows: Iterable[object]) -> tuple[int, ...]:
    """Check the sizes of window groups. `InvalidConfig`."""
    sizes = []
    for size in windows:
        if not isinstance(size, int) or size < 1:
            raise InvalidConfig(f"a window must be a number of at least 1 token, got {size!r}")
        sizes.append(size)
    return tuple(sizes)


def _shorten(found: Found, num_blocks: int) -> Found:
    """The first blocks of a match, as a match."""
    run, in_run = found.run, found.num_blocks
    surplus = len(found.blocks) - num_blocks
    if not surplus:
        return found
    while surplus >= in_run > 0:
        surplus -= in_run
        run = parent_of(run)
        in_run = len(run.blocks)
    return Found(run, in_run - surplus, found.blocks[:num_blocks])
