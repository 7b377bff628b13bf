"""The content index: runs of blocks that are found, held, fenced and evicted together.

A run is a stretch of full blocks that every holder holds whole. Runs form a tree: a path from the
root spells the tokens of a prefix, so that a match follows the true prefix exactly. Nothing is
hashed to find content, and nothing can collide.

    root ── [system prompt: 40 blocks] ─┬─ [question A: 3 blocks]          held by 2 sequences
                                        └─ [question B: 5 blocks] ── ...   cached: nobody holds it

Every operation costs what it does to runs: a comparison, a slice or a counter each, however many
blocks they have. A run is split when somebody needs a part of it.

The namespace of a prompt, and the media that begin in a block, stand before the tokens in the key of a
run: content of two namespaces, or behind two pictures, is not found for each other. A run holds media
in its first block only.

What is forgotten by a reset moves below a run that is set apart: nobody finds it from the root, who
holds it keeps it, and it goes when nobody does.

A sequence holds the deepest run of its path; a run that is held holds its parent. So no run outlives
its parent, and eviction takes leaves only, in the order of a policy, a tail before its head.

Knows tokens, runs and their order of eviction, and says what leaves. Does not know sequences, or
anything of blocks that are not full and committed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from kvblocks.events import EventLog
from kvblocks.hashing import TOKEN_BYTES, num_common_tokens
from kvblocks.lifetimes import Lifetimes
from kvblocks.memory import Departure, Memory
from kvblocks.policies import Policy
from kvblocks.pool import BlockPool
from kvblocks.results import Forgotten
from kvblocks.runs import Found, LeafQueue, Partial, Published, Run, Stretch, parent_of

_NOTHING = array("i")
_MAX_SIBLINGS = 32


class RunTree:
    """The runs of one pool."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: Policy,
        *,
        log: EventLog | None,
        memory: Memory | None,
        lifetimes: Lifetimes | None,
    ) -> None:
        self._pool = pool
        self._log = log
        self._memory = memory
        self._lifetimes = lifetimes
        self._width = block_size * TOKEN_BYTES
        self._num_runs = 0
        self._clock = 0  # how often a path was given up
        self.queue = LeafQueue(policy)
        self.root = self._make_run(b"", bytearray(), array("i"), None, [])
        self.root.holders = 1  # for good
        # Blocks that can be found and that nobody holds: of runs, and what windows keep beside them.
        self.num_cached = 0
        self.num_fenced = 0  # those that wait for a step
        self.fenced: dict[int, dict[Run, None]] = {}  # step -> runs that wait for it
        self.num_evicted = 0

    @property
    def clock(self) -> int:
        """How often a path was given up: the time by which `last_used` goes."""
        return self._clock

    # ── finding ──────────────────────────────────────────────────────────────────────────────

    def find(self, stretches: Iterable[Stretch], start: Run | None = None) -> Found:
        """The longest prefix of a prompt that is here. Changes nothing.

        One look-up and one comparison a run. The key of the first stretch is the namespace. A path
        may `start` at a run that is set apart instead of the root.
        """
        found = Found(start or self.root, 0, array("i"))
        for stretch in stretches:
            if found.num_blocks < len(found.run.blocks):
                break  # the run goes on without what begins here
            below = self._find_below(found.run, stretch)
            found = Found(below.run, below.num_blocks, found.blocks + below.blocks)
            if len(below.blocks) * self._width < len(stretch.tokens):
                break
        return found

    def _find_below(self, run: Run, stretch: Stretch) -> Found:
        key, tokens = stretch
        width, end, at = self._width, len(tokens), 0
        blocks = array("i")
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

    def find_partial(self, found: Found, stretch: Stretch) -> Partial | None:
        """Of the blocks that follow a match, that which begins most like the packed tokens given.

        Where many follow, only those that came last are looked at: O(1).
        """
        run, start = found.run, found.num_blocks * self._width
        if start < len(run.tokens):
            following = [] if stretch.key else [(run, start)]
        else:
            newest = islice(reversed(run.children.values()), _MAX_SIBLINGS)
            is_like = len(stretch.key) + self._width
            following = [
                (child, 0)
                for child in newest
                if len(child.key) == is_like and child.key.startswith(stretch.key)
            ]
        best = None
        for other, at in following:
            theirs = other.tokens[at : at + self._width]
            num_tokens = num_common_tokens(theirs, stretch.tokens)
            if num_tokens > (best.num_tokens if best else 0):
                best = Partial(other, at // self._width, num_tokens)
        return best

    # ── holding ──────────────────────────────────────────────────────────────────────────────

    def hold(self, found: Found, priority: int) -> Run:
        """Hold what was found, and return its last run; a run found in part is split.

        The path has at least this priority from now on.
        """
        run = found.run
        if found.num_blocks < len(run.blocks):
            run = self._split(run, found.num_blocks)
        self.add_holder(run)
        raised = run
        while raised.priority < priority and raised is not self.root:
            raised.priority = priority
            raised = parent_of(raised)
        return run

    def hold_source(self, partial: Partial) -> Run:
        """Hold the block of a partial match, whose match is held: it is the last of what it returns."""
        run = partial.run  # what the match took of it is a run of its own by now
        return self.hold(Found(run, 1, _NOTHING), run.priority)

    def count_hit(self, run: Run) -> None:
        """Note that a prompt found the path that ends here. O(runs of the path)."""
        while run is not self.root:
            run.num_hits += 1
            run = parent_of(run)

    def add_holder(self, run: Run) -> None:
        """Hold a run once more, and with it its path. O(runs that were not held)."""
        run.holders += 1
        while run.holders == 1:
            self._leave_rest(run)
            run = parent_of(run)
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
            parent = parent_of(run)
            self._rest(run)
            run = parent
            run.holders -= 1

    def publish(
        self, run: Run, stretch: Stretch, blocks: array[int], priority: int, hashes: list[bytes]
    ) -> Published:
        """Make blocks findable after `run`, for a sequence whose path ends there.

        `hashes` are their keys, or none if nobody asks for keys. They join `run`, and its record of
        use, if the sequence holds it alone and nothing follows it: O(1), since nobody's content can
        be found there.
        """
        if self.can_grow(run) and not stretch.key:
            self.grow(run, stretch.tokens, blocks, hashes)
            return Published(run, _NOTHING)
        found = self._find_below(run, stretch)
        num_known = len(found.blocks)
        if num_known:
            below = self.hold(found, priority)
            run.holders -= 1  # the sequence holds it through the run below it now
            run = below
            stretch = Stretch(b"", stretch.tokens[num_known * self._width :])
            hashes = hashes[num_known:]
        if num_known < len(blocks):
            blocks = blocks[num_known:]
            if self.can_grow(run) and not stretch.key:
                self.grow(run, stretch.tokens, blocks, hashes)
            else:
                run = self._begin_run(run, stretch, blocks, hashes)
                run.priority = priority
        return Published(run, found.blocks)

    def can_grow(self, run: Run) -> bool:
        """Whether what its only holder publishes now may join it, unless that has a key of its own.

        A run that an open step of one who left it used stays as it is: that step did not use what
        comes now.
        """
        is_alone = run.holders == 1 and not run.children
        return is_alone and run.last_step <= self._pool.completed_step

    def grow(self, run: Run, tokens: bytes, blocks: array[int], hashes: list[bytes]) -> None:
        """Let blocks join the run of their only holder. O(1)."""
        run.tokens += tokens
        run.blocks += blocks
        run.hashes += hashes

    def set_apart(self, run: Run, blocks: array[int]) -> Run:
        """Let a sequence whose path ends at `run` hold blocks as a run that cannot be found."""
        below = self._make_run(b"", bytearray(), blocks, run, [])
        below.is_kept = False
        below.holders = 1  # the sequence; its hold on `run` is the new run's now
        return below

    def move_holder(self, run: Run) -> None:
        """Let one who holds the root hold a run below it instead."""
        self.add_holder(run)
        self.root.holders -= 1

    def _begin_run(
        self, run: Run, stretch: Stretch, blocks: array[int], hashes: list[bytes]
    ) -> Run:
        """Begin a run below another, for a sequence whose path ends there."""
        key = stretch.key + stretch.tokens[: self._width]
        below = self._make_run(key, bytearray(stretch.tokens), blocks, run, hashes)
        self._clock += 1
        below.created = self._clock
        below.holders = 1  # the sequence; its hold on `run` is the new run's now
        run.children[key] = below
        return below

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run in two and return the upper part; who holds the run holds both."""
        cut = num_blocks * self._width
        parent = parent_of(run)
        tokens, blocks, hashes = run.tokens[:cut], run.blocks[:num_blocks], run.hashes[:num_blocks]
        upper = self._make_run(run.key, tokens, blocks, parent, hashes)
        upper.holders = 1 if run.holders else 0
        upper.last_step, upper.fence = run.last_step, run.fence
        upper.last_used, upper.created = run.last_used, run.created
        upper.num_hits, upper.priority = run.num_hits, run.priority
        upper.born, upper.rested = run.born, run.rested
        if run.fence:
            self.fenced[run.fence][upper] = None
        parent.children[run.key] = upper
        run.key = bytes(run.tokens[cut : cut + self._width])
        run.tokens, run.blocks, run.parent = run.tokens[cut:], run.blocks[num_blocks:], upper
        run.hashes = run.hashes[num_blocks:]
        upper.children[run.key] = run
        return upper

    def _make_run(
        self,
        key: bytes,
        tokens: bytearray,
        blocks: array[int],
        parent: Run | None,
        hashes: list[bytes],
    ) -> Run:
        self._num_runs += 1
        run = Run(key, tokens, blocks, parent, self._num_runs)
        if hashes:
            run.hashes = hashes
        if self._lifetimes:
            run.born = self._lifetimes.now
        return run

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
        gone: list[bytes] = []
        while len(taken) < num_blocks:
            run = self.queue.pop()
            cut = self._cut(run, num_blocks - len(taken), gone)
            if self._lifetimes:
                self._lifetimes.note_evicted(len(cut), run.born, run.rested)
            taken += cut
        self.num_evicted += num_blocks
        self.num_cached -= num_blocks
        if gone:
            self._note_gone(gone, is_eviction=True)
        return taken

    def forget(self, key: bytes) -> tuple[Run, Forgotten]:
        """Let nobody find the content again of the namespaces whose keys begin so.

        The runs move below a run that is set apart, where those that hold them go on as before: what
        they publish is found by each other, and given back when nobody holds it. Returns that run,
        for those whose path is still empty. O(runs and leaves of all namespaces).
        """
        apart = self.set_apart(self.root, array("i"))
        apart.holders = 0
        for name in [name for name in self.root.children if name.startswith(key)]:
            run = self.root.children.pop(name)
            apart.children[name], run.parent = run, apart
            if run.holders:
                self.move_holder(apart)
        num_free = num_fenced = num_held = 0
        gone: list[bytes] = []
        stack = list(apart.children.values())
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            run.is_kept = False
            gone += run.hashes
            run.hashes = []
            if run.holders:
                num_held += len(run.blocks)
                continue
            fence = run.fence
            num_fenced += len(run.blocks) if fence else 0
            num_free += 0 if fence else len(run.blocks)
            self._leave_rest(run)
            del parent_of(run).children[run.key]
            self._pool.give_back(run.blocks, fence)
        self.queue.drop_forgotten()
        self._note_gone(gone[::-1], is_eviction=False, is_all=not key)
        return apart, Forgotten(num_free, num_fenced, num_held)

    def _note_gone(self, keys: list[bytes], *, is_eviction: bool, is_all: bool = False) -> None:
        """Tell and remember that blocks can be found no longer, those that follow others first."""
        if self._log and is_all:
            self._log.cleared()
        elif self._log and keys:
            self._log.removed(keys)
        if self._memory and keys:
            departure = Departure(is_eviction, self.num_evicted, self._pool.step)
            self._memory.note_departure(keys, departure)

    def reused(self, run: Run, num_blocks: int) -> tuple[int, dict[int, int]]:
        """Of a path up to the first blocks of `run`: how many are cached, and wait for which step."""
        cached = 0
        fenced: dict[int, int] = {}
        while not run.holders:
            if run.fence:
                fenced[run.fence] = fenced.get(run.fence, 0) + num_blocks
            else:
                cached += num_blocks
            run = parent_of(run)
            num_blocks = len(run.blocks)
        return cached, fenced

    def path_tokens(self, run: Run) -> bytes:
        """The packed tokens from the root to the end of a run. O(tokens)."""
        stretches = []
        while run is not self.root:
            stretches.append(run.tokens)
            run = parent_of(run)
        return b"".join(reversed(stretches))

    def path_state(self, run: Run) -> list[tuple[object, ...]]:
        """What matters of a path that cannot be found from the root, for comparison."""
        state: list[tuple[object, ...]] = []
        while not run.is_kept:
            is_open = run.last_step > self._pool.completed_step
            state.append((run.tokens, run.last_step if is_open else 0))
            run = parent_of(run)
        return state

    def state(self) -> tuple[object, ...]:
        """All that matters from now on of what can be found, for comparison."""
        done = self._pool.completed_step
        runs = [
            (run.key, run.tokens, run.blocks, run.holders, run.fence)
            + (run.last_used, run.created, run.num_hits, run.priority)
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
        run.last_used = self._clock
        if self._lifetimes:
            run.rested = self._lifetimes.now
        if not run.is_kept:
            parent_of(run).children.pop(run.key, None)
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
            self.queue.push(run)

    def _cut(self, run: Run, num_blocks: int, gone: list[bytes]) -> array[int]:
        """Take up to `num_blocks` blocks from a cached leaf, its tail first; likewise their keys."""
        keep = max(0, len(run.blocks) - num_blocks)
        cut = run.blocks[keep:]
        cut.reverse()
        if run.hashes:
            gone += run.hashes[keep:][::-1]
            del run.hashes[keep:]
        if keep:
            del run.blocks[keep:], run.tokens[keep * self._width :]
            self.queue.push(run)
        else:
            parent = parent_of(run)
            del parent.children[run.key]
            if parent.is_resting_leaf:
                self.queue.push(parent)
        return cut
