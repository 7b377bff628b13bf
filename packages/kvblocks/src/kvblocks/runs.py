"""The content index: runs of blocks that are found, held, fenced and evicted together.

A run is a stretch of full blocks that every holder holds whole. Runs form a tree: a path from the
root spells the tokens of a prefix, so that a match follows the true prefix exactly. Nothing is
hashed to find content, and nothing can collide.

    root ── [system prompt: 40 blocks] ─┬─ [question A: 3 blocks]          held by 2 sequences
                                        └─ [question B: 5 blocks] ── ...   cached: nobody holds it

Every operation costs what it does to runs: a comparison, a slice or a counter each, however many
blocks they have. A run is split when somebody needs a part of it.

A sequence holds the deepest run of its path; a run that is held holds its parent. So no run outlives
its parent, and eviction takes leaves only: the least recently given up first, its tail before its
head.

Knows tokens, runs and their order of eviction. Does not know sequences, or anything of blocks that
are not full and committed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from kvblocks.hashing import TOKEN_BYTES
from kvblocks.pool import BlockPool


class Run:
    """A stretch of blocks. `tokens` is empty where content cannot be found and is never kept."""

    __slots__ = (
        "blocks",
        "children",
        "fence",
        "holders",
        "key",
        "last_step",
        "parent",
        "queued",
        "serial",
        "stamp",
        "tokens",
    )

    def __init__(
        self,
        key: bytes,
        tokens: bytearray,
        blocks: array[int],
        parent: Run | None,
        serial: int,
    ) -> None:
        self.key = key  # its name among its parent's children: its first block's tokens
        self.tokens = tokens  # packed, all its blocks'
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self.holders = 0  # sequences whose path ends here, and children that are held
        self.last_step = 0  # the newest step that used it
        self.fence = 0  # the open step that it waits for, while nobody holds it
        self.stamp = 0  # when it was given up last
        self.queued = False  # whether it is in the queue of eviction
        self.serial = serial


class Found(NamedTuple):
    """A match: it ends in `run`, after its first `num_blocks` blocks; `blocks` are all of it."""

    run: Run
    num_blocks: int
    blocks: array[int]


_NOTHING = array("i")


class Published(NamedTuple):
    """Where a path ends now; `blocks` hold what came first and was here already."""

    run: Run
    blocks: array[int]


class RunTree:
    """The runs of one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._width = block_size * TOKEN_BYTES
        self._num_runs = 0
        self._clock = 0
        self._queue: list[tuple[int, int, Run]] = []  # of (stamp, serial, run), a heap
        self.root = self._make_run(b"", bytearray(), array("i"), None)
        self.root.holders = 1  # for good
        self.num_cached = 0  # blocks of runs that nobody holds and no step uses
        self.num_fenced = 0
        self.fenced: dict[int, dict[Run, None]] = {}  # step -> runs that wait for it
        self.num_evicted = 0

    # ── finding ──────────────────────────────────────────────────────────────────────────────

    def find(self, root: bytes, tokens: bytes) -> Found:
        """The longest prefix of `tokens`, packed full blocks, that is here. Changes nothing.

        One look-up and one comparison a run. `root` names the namespace.
        """
        return self._find_below(self.root, root, tokens)

    def _find_below(self, run: Run, root: bytes, tokens: bytes) -> Found:
        width, end, at = self._width, len(tokens), 0
        blocks = array("i")
        key = self._first_key(run, root)
        while at < end:
            child = run.children.get(key + tokens[at : at + width])
            if child is None:
                break
            if not tokens.startswith(child.tokens, at):
                num_blocks = self._num_common(child.tokens, tokens, at)
                blocks += child.blocks[:num_blocks]
                return Found(child, num_blocks, blocks)
            blocks += child.blocks
            at += len(child.tokens)
            run, key = child, b""
        return Found(run, len(run.blocks), blocks)

    def _first_key(self, run: Run, root: bytes) -> bytes:
        """What stands before the tokens in the keys of a run's children: below the root, a name."""
        return root if run is self.root else b""

    def _num_common(self, ours: bytearray, theirs: bytes, at: int) -> int:
        """How many blocks of `ours` stand in `theirs` from `at` on; the first is known to."""
        width = self._width
        low, high = 1, min(len(ours), len(theirs) - at) // width
        while low < high:
            middle = (low + high + 1) // 2
            stretch = slice(at + low * width, at + middle * width)
            if ours[low * width : middle * width] == theirs[stretch]:
                low = middle
            else:
                high = middle - 1
        return low

    # ── holding ──────────────────────────────────────────────────────────────────────────────

    def hold(self, found: Found) -> Run:
        """Hold what was found, and return its last run; a run found in part is split."""
        run = found.run
        if found.num_blocks < len(run.blocks):
            run = self._split(run, found.num_blocks)
        self.add_holder(run)
        return run

    def add_holder(self, run: Run) -> None:
        """Hold a run once more, and with it its path. O(runs that were not held)."""
        run.holders += 1
        while run.holders == 1:
            self._leave_rest(run)
            run = _parent(run)
            run.holders += 1

    def release(self, run: Run, last_step: int) -> None:
        """Give up a path that `last_step` was the last step to use. O(runs that nobody holds now).

        While that step is open, the whole path is marked: O(runs of the path).
        """
        if last_step > self._pool.completed_step:
            marked: Run | None = run
            while marked is not None:
                marked.last_step = max(marked.last_step, last_step)
                marked = marked.parent
        self._clock += 1
        run.holders -= 1
        while not run.holders:
            parent = _parent(run)
            self._rest(run)
            run = parent
            run.holders -= 1

    def publish(self, run: Run, root: bytes, tokens: bytes, blocks: array[int]) -> Published:
        """Make blocks findable after `run`, for a sequence whose path ends there.

        O(1) for who holds `run` alone: nobody's content can follow it. A run that an open step
        of one who left it used stays as it is: that step did not use what comes now.
        """
        is_in_flight = run.last_step > self._pool.completed_step
        if run.holders == 1 and not run.children and run.tokens and not is_in_flight:
            run.tokens += tokens
            run.blocks += blocks
            return Published(run, _NOTHING)
        found = self._find_below(run, root, tokens)
        num_known = len(found.blocks)
        if num_known:
            below = self.hold(found)
            run.holders -= 1  # the sequence holds it through the run below it now
            run = below
        if num_known < len(blocks):
            run = self._begin_run(run, root, tokens[num_known * self._width :], blocks[num_known:])
        return Published(run, found.blocks)

    def set_apart(self, run: Run, blocks: array[int]) -> Run:
        """Let a sequence whose path ends at `run` hold blocks as a run that cannot be found."""
        below = self._make_run(b"", bytearray(), blocks, run)
        below.holders = 1  # the sequence; its hold on `run` is the new run's now
        return below

    def _begin_run(self, run: Run, root: bytes, tokens: bytes, blocks: array[int]) -> Run:
        """Begin a run below another, for a sequence whose path ends there."""
        key = self._first_key(run, root) + tokens[: self._width]
        below = self._make_run(key, bytearray(tokens), blocks, run)
        below.holders = 1  # the sequence; its hold on `run` is the new run's now
        run.children[key] = below
        return below

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run in two and return the upper part; who holds the run holds both."""
        cut = num_blocks * self._width
        parent = _parent(run)
        upper = self._make_run(run.key, run.tokens[:cut], run.blocks[:num_blocks], parent)
        upper.holders = 1 if run.holders else 0
        upper.last_step, upper.stamp, upper.fence = run.last_step, run.stamp, run.fence
        if run.fence:
            self.fenced[run.fence][upper] = None
        parent.children[run.key] = upper
        run.key = bytes(run.tokens[cut : cut + self._width])
        run.tokens, run.blocks, run.parent = run.tokens[cut:], run.blocks[num_blocks:], upper
        upper.children[run.key] = run
        return upper

    def _make_run(
        self, key: bytes, tokens: bytearray, blocks: array[int], parent: Run | None
    ) -> Run:
        self._num_runs += 1
        return Run(key, tokens, blocks, parent, self._num_runs)

    # ── resting and eviction ─────────────────────────────────────────────────────────────────

    def complete_step(self, step: int) -> None:
        """Turn runs that waited for steps up to `step` into cached ones."""
        for fence in sorted(s for s in self.fenced if s <= step):
            for run in self.fenced.pop(fence):
                run.fence = 0
                self.num_fenced -= len(run.blocks)
                self._cache(run)

    def evict(self, num_blocks: int) -> array[int]:
        """Take cached blocks, in the order of eviction. The caller has made sure of enough.

        O(runs that are cut, and the log of the number of leaves for each).
        """
        taken = array("i")
        while len(taken) < num_blocks:
            stamp, _, run = heappop(self._queue)
            run.queued = False
            if run.holders or run.fence or run.children:
                continue  # it is queued again when it rests as a leaf
            if run.stamp != stamp:
                self._enqueue(run)
                continue
            taken += self._cut(run, num_blocks - len(taken))
        self.num_evicted += num_blocks
        self.num_cached -= num_blocks
        return taken

    def reused(self, found: Found) -> tuple[int, dict[int, int]]:
        """Of the blocks found: how many are cached, and how many wait for which step."""
        cached = 0
        fenced: dict[int, int] = {}
        run, num_blocks = found.run, found.num_blocks
        while not run.holders:
            if run.fence:
                fenced[run.fence] = fenced.get(run.fence, 0) + num_blocks
            else:
                cached += num_blocks
            run = _parent(run)
            num_blocks = len(run.blocks)
        return cached, fenced

    def path_tokens(self, run: Run) -> bytes:
        """The packed tokens from the root to the end of a run. O(tokens)."""
        stretches = []
        while run is not self.root:
            stretches.append(run.tokens)
            run = _parent(run)
        return b"".join(reversed(stretches))

    def state(self) -> tuple[object, ...]:
        """All that matters from now on, for comparison."""
        done = self._pool.completed_step
        runs = [
            (run.key, run.tokens, run.blocks, run.holders, run.fence, run.stamp)
            + ((run.last_step,) if run.last_step > done else ())
            for run in self
        ]
        return runs, self._clock, self.num_cached, self.num_fenced, self.num_evicted

    def __iter__(self) -> Iterator[Run]:
        """Every run but the root and those set apart, parents before children."""
        stack = [self.root]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def _rest(self, run: Run) -> None:
        """What becomes of a run that nobody holds any more."""
        run.stamp = self._clock
        if not run.tokens:
            self._pool.give_back(run.blocks, run.last_step)
        elif run.last_step > self._pool.completed_step:
            run.fence = run.last_step
            self.fenced.setdefault(run.fence, {})[run] = None
            self.num_fenced += len(run.blocks)
        else:
            self._cache(run)

    def _leave_rest(self, run: Run) -> None:
        if run.fence:
            del self.fenced[run.fence][run]
            self.num_fenced -= len(run.blocks)
            run.fence = 0
        else:
            self.num_cached -= len(run.blocks)

    def _cache(self, run: Run) -> None:
        self.num_cached += len(run.blocks)
        if not run.children:
            self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        """Queue a leaf once; an entry that is out of date is renewed when it comes up."""
        if not run.queued:
            run.queued = True
            heappush(self._queue, (run.stamp, run.serial, run))

    def _cut(self, run: Run, num_blocks: int) -> array[int]:
        """Take up to `num_blocks` blocks from a cached leaf, its tail first."""
        keep = max(0, len(run.blocks) - num_blocks)
        cut = run.blocks[keep:]
        cut.reverse()
        if keep:
            del run.blocks[keep:], run.tokens[keep * self._width :]
            self._enqueue(run)
        else:
            parent = _parent(run)
            del parent.children[run.key]
            if not (parent.holders or parent.fence or parent.children):
                self._enqueue(parent)
        return cut


def _parent(run: Run) -> Run:
    assert run.parent is not None, "the root is always held and never split"
    return run.parent
