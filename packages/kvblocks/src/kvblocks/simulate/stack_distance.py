"""Hits of leaf-first LRU at every capacity, from one pass over a trace.

The stack holds all blocks seen so far, the last used on top. A request puts its tail on the stack
first and its root last, so that no block lies above the block before it, and leaf-first LRU with room
for C blocks always holds the top C (Mattson et al., 1970). A block is found by every cache that is
larger than its distance from the top was when the request came.

    after A B C, then A B D:     top  A B D | C      the second request owns A B D, the first only C
                                      0 1 2   3      a third request A B C finds its blocks at 0, 1, 3

What one request put on the stack and nobody used since is a **segment**: the rest of its path, in
order, without gaps. So distances are found for whole segments: one sum over the sizes of all younger
segments, in a binary indexed tree, and the blocks of the segment count on from there.

Knows distances and counts. Does not know any other policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from kvblocks.errors import InvalidTrace
from kvblocks.simulate.outcomes import Outcome
from kvblocks.simulate.prefixes import PrefixTree, Window
from kvblocks.simulate.progress import Progress, silent


class LruCurve:
    """What leaf-first LRU hits at any capacity: each answer is O(1)."""

    def __init__(self, tree: PrefixTree, window: Window, counts: Counts) -> None:
        self.num_distinct_blocks = tree.num_nodes
        self.total_blocks = sum(map(len, tree.paths[window.first :]))
        self.total_tokens = sum(tree.num_tokens[window.first :])
        self.num_whole_requests = counts.num_whole_requests
        self._num_seen_before = counts.num_seen_before
        self._hits = _sums(accumulate(counts.hit_steps))
        missing = _sums(counts.missing_tokens)
        size = tree.block_size
        self._tokens = [h * size - less for h, less in zip(self._hits, missing, strict=True)]
        self._admissible = _sums(_num_longer(tree, window))

    @property
    def ceiling_blocks(self) -> int:
        """Hits of a cache that never evicts."""
        return self._hits[-1]

    @property
    def ceiling_tokens(self) -> int:
        """The tokens in them."""
        return self._tokens[-1]

    def outcome(self, capacity: int) -> Outcome:
        """All figures at one capacity. O(1). `InvalidTrace` for less than one block."""
        if capacity < 1:
            raise InvalidTrace(f"capacity must be at least 1, got {capacity}")
        at = min(capacity, self.num_distinct_blocks)
        growth = at - min(capacity, self._num_seen_before)
        # What lies deeper in a request than there is room for is never taken in.
        admitted = self._admissible[min(capacity, len(self._admissible) - 1)] - self._hits[at]
        return Outcome(
            policy="lru",
            semantics="index",
            capacity=capacity,
            hit_blocks=self._hits[at],
            total_blocks=self.total_blocks,
            hit_tokens=self._tokens[at],
            total_tokens=self.total_tokens,
            evictions=admitted - growth,
        )

    def capacity_for(self, share: float) -> int:
        """The fewest blocks that hit this share of the ceiling's tokens. O(log blocks)."""
        return max(1, bisect_left(self._tokens, share * self.ceiling_tokens))


class Counts:
    """What one pass notes, by distance; a step at d counts for all distances from d on."""

    def __init__(self, num_nodes: int) -> None:
        self.hit_steps = [0] * (num_nodes + 1)
        self.missing_tokens = [0] * (num_nodes + 1)  # of blocks that were found and are not full
        self.num_whole_requests = 0
        self.num_seen_before = 0


def lru_curve(tree: PrefixTree, window: Window, progress: Progress = silent) -> LruCurve:
    """Replay a trace once. O(blocks + segments * log requests).

    >>> from kvblocks.simulate.prefixes import Window, build_tree
    >>> from kvblocks.traces import Request, Trace
    >>> rows = [Request(None, 3, 0, blocks) for blocks in ("abc", "abd", "abc")]
    >>> tree = build_tree(Trace("tokens", 1, tuple(rows)))
    >>> [lru_curve(tree, Window(0)).outcome(c).hit_blocks for c in (1, 2, 3, 4)]
    [2, 4, 4, 5]
    """
    counts = Counts(tree.num_nodes)
    owner = [-1] * tree.num_nodes  # the last request that used each node
    younger = SuffixSums(len(tree.paths))
    num_seen = 0
    for request, path in enumerate(tree.paths):
        if request == window.first:
            counts.num_seen_before = num_seen
        is_measured = request >= window.first
        at = 0
        for last_user, length in _segments(path, owner):
            if is_measured:
                # The first `at` blocks of this request lay above, and are taken out already.
                above = younger.sum_after(last_user)
                counts.hit_steps[above + at] += 1
                counts.hit_steps[above + at + length] -= 1
                _note_missing(counts, tree, request, above, range(at, at + length))
            younger.add(last_user, -length)
            at += length
        if is_measured and at == len(path):
            counts.num_whole_requests += 1
        num_seen += len(path) - at
        younger.add(request, len(path))
        for node in path:
            owner[node] = request
        progress(request + 1)
    return LruCurve(tree, window, counts)


def _segments(path: tuple[int, ...], owner: list[int]) -> Iterator[tuple[int, int]]:
    """The part of a path that was seen before: (who used it last, number of blocks) in order."""
    current, length = -1, 0
    for node in path:
        last_user = owner[node]
        if last_user != current:
            if length:
                yield current, length
            current, length = last_user, 0
        if last_user < 0:
            return
        length += 1
    if length:
        yield current, length


def _note_missing(
    counts: Counts, tree: PrefixTree, request: int, above: int, blocks: range
) -> None:
    """Tokens that found blocks lack: only blocks at the end of a prompt are not full."""
    num_full = tree.num_tokens[request] // tree.block_size
    for block in range(max(blocks.start, num_full), blocks.stop):
        held = tree.hit_tokens(request, block + 1) - tree.hit_tokens(request, block)
        counts.missing_tokens[above + block] += tree.block_size - held


def _sums(values: Iterator[int] | list[int]) -> list[int]:
    """At i, the sum of the first i values."""
    return list(accumulate(values, initial=0))


def _num_longer(tree: PrefixTree, window: Window) -> list[int]:
    """At i, the measured requests that have more than i blocks."""
    lengths = sorted(map(len, tree.paths[window.first :]))
    return [len(lengths) - bisect_left(lengths, i + 1) for i in range(max(lengths, default=0))]


class SuffixSums:
    """A number for each index, and sums of all numbers after one: a binary indexed tree.

    Each operation is O(log size).
    """

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, number: int) -> None:
        """Add to the number at an index."""
        self._total += number
        tree, at = self._tree, index + 1
        while at < len(tree):
            tree[at] += number
            at += at & -at

    def sum_after(self, index: int) -> int:
        """The sum of the numbers after an index."""
        tree, at, until = self._tree, index + 1, 0
        while at:
            until += tree[at]
            at &= at - 1
        return self._total - until
