"""Which physical blocks are free, held, cached or in flight.

    free ──take──► held ──last reference released──► fenced ──step completes──► cached or free
                    ▲                                   │                           │
                    └────────────── acquire ────────────┴───────────────────────────┘

Every block is in exactly one state. Fenced blocks are unreferenced, but a step that is still open
reads or writes them. Cached blocks are unreferenced, but hold content that the index can find.

Knows ids, reference counts and steps. Does not know tokens, tables or why a block is kept.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from kvblocks.errors import InvalidStep
from kvblocks.results import Verdict, When


class BlockPool:
    """Reference counts and states of the blocks 0..num_blocks-1.

    A fresh pool hands out 0, 1, 2, ...; a block that came back is handed out next.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: the last is handed out next
        # In the order in which they were given up. No plain dict: to find its first item, that
        # walks over all that were deleted before.
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.fenced: dict[int, dict[int, None]] = {}  # step -> blocks, in the same order
        self.keyed: set[int] = set()  # blocks with content worth keeping, whatever their state
        self.step = 0  # the newest step begun: changes belong to it, if it is open
        self.completed_step = 0
        self.touched: dict[int, int] = {}  # block -> the newest open step in which a holder used it
        self.num_held = 0
        self.peak_held = 0

    @property
    def num_fenced(self) -> int:
        """Blocks that wait for an open step. O(open steps)."""
        return sum(map(len, self.fenced.values()))

    def take(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one reference. The caller has made sure of enough."""
        blocks = [self.free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self.ref_counts[block] = 1
        self._hold(num_blocks)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, whatever state it is in. O(blocks)."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unpark(block)
                self._hold(1)
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int], last_step: int) -> None:
        """Drop a reference to each block; `last_step` is the last step in which the holder used it.

        O(blocks). Give the tail of a sequence first: what is given up first is evicted first.
        """
        in_flight = last_step > self.completed_step
        for block in blocks:
            if in_flight:
                self.touched[block] = max(last_step, self.touched.get(block, 0))
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.num_held -= 1
                self._park(block)

    def keep(self, block: int) -> None:
        """Mark a held block as worth keeping: once given up it is cached, not free."""
        self.keyed.add(block)

    def drop_oldest(self) -> int:
        """Turn the cached block that was given up longest ago into a free one, and return it."""
        block, _ = self.cached.popitem(last=False)
        self.keyed.remove(block)
        self.free.append(block)
        return block

    def begin_step(self) -> int:
        """Open the next step and return its number."""
        self.step += 1
        return self.step

    def complete_step(self, step: int) -> None:
        """Complete all steps up to `step`; what only they used becomes cached or free."""
        if not 0 < step <= self.step:
            raise InvalidStep(f"step must have been begun (1..{self.step}), got {step}")
        if step <= self.completed_step:
            return
        self.completed_step = step
        self.touched = {b: s for b, s in self.touched.items() if s > step}
        for fence in sorted(s for s in self.fenced if s <= step):
            for block in self.fenced.pop(fence):
                self._settle(block)

    def judge(
        self, num_needed: int, num_total: int, reused: AbstractSet[int] = frozenset()
    ) -> Verdict:
        """Judge a need for blocks besides `reused`, `num_total` in all for one sequence.

        O(reused + open steps), and O(fenced) if it cannot be served now.
        """
        evictable = len(self.cached) - sum(block in self.cached for block in reused)
        available = len(self.free) + evictable
        if num_total > self.num_blocks:
            return Verdict(When.NEVER, num_needed, available)
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available)
        within_reach = available
        for step in sorted(self.fenced):
            within_reach += len(self.fenced[step].keys() - reused)
            if num_needed <= within_reach:
                return Verdict(When.AFTER_STEP, num_needed, available, step)
        return Verdict(When.LATER, num_needed, available)

    def _hold(self, num_blocks: int) -> None:
        self.num_held += num_blocks
        self.peak_held = max(self.peak_held, self.num_held)

    def _park(self, block: int) -> None:
        step = self.touched.get(block, 0)
        if step > self.completed_step:
            self.fenced.setdefault(step, {})[block] = None
        else:
            self._settle(block)

    def _settle(self, block: int) -> None:
        if block in self.keyed:
            self.cached[block] = None
        else:
            self.free.append(block)

    def _unpark(self, block: int) -> None:
        if block in self.cached:
            del self.cached[block]
        else:
            del self.fenced[self.touched[block]][block]
