"""A run, and the queue of those that may be evicted.

Knows what is noted of a run, and in which order leaves are given up. Does not know how runs hang
together: that is the tree's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from kvblocks.policies import Policy


class Run:
    """A stretch of blocks.

    Its record of use (last_used, created, num_hits, priority) is what a policy goes by.
    """

    __slots__ = (
        "blocks",
        "born",
        "children",
        "created",
        "fence",
        "hashes",
        "holders",
        "is_kept",
        "key",
        "last_step",
        "last_used",
        "num_hits",
        "parent",
        "priority",
        "queued",
        "rested",
        "serial",
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
        self.hashes: list[bytes] = []  # its blocks' keys, if anybody asks and it can be found
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self.holders = 0  # sequences whose path ends here, and children that are held
        self.is_kept: bool = parent is None or parent.is_kept  # when nobody holds it any more
        self.last_step = 0  # the newest step that used it
        self.fence = 0  # the open step that it waits for, while nobody holds it
        self.last_used = 0  # when it was given up last
        self.created = 0  # when it was begun, or the run it was once split from
        self.num_hits = 0  # how many prompts found it
        self.priority = 0  # the highest of all who held it
        self.queued = 0  # the `last_used` with which it is in the queue of eviction, or 0
        self.serial = serial
        self.born = 0.0  # when its content was first there, by the caller's clock
        self.rested = 0.0  # when it was given up last, likewise

    @property
    def is_resting_leaf(self) -> bool:
        """Whether nobody holds it, no step uses it and nothing follows it."""
        return not (self.holders or self.fence or self.children)


class Stretch(NamedTuple):
    """Packed full blocks, and what stands before them: a namespace, media that begin, or nothing."""

    key: bytes
    tokens: bytes


class Found(NamedTuple):
    """A match: it ends in `run`, after its first `num_blocks` blocks; `blocks` are all of it."""

    run: Run
    num_blocks: int
    blocks: array[int]


class Partial(NamedTuple):
    """A block whose first `num_tokens` tokens go on a match: that after `num_blocks` of `run`."""

    run: Run
    num_blocks: int
    num_tokens: int


class Published(NamedTuple):
    """Where a path ends now; `blocks` hold what came first and was here already."""

    run: Run
    blocks: array[int]


class LeafQueue:
    """The leaves that may be evicted, in the order of a policy.

    A run is in it once, with the rank of its last rest at the time. Who is used again stays, and is
    put in its place when its turn comes: that keeps the order, since a rank never falls.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.entries: list[tuple[Any, int, Run]] = []  # of (rank, serial, run), a heap

    def push(self, run: Run) -> None:
        """Queue a run that has come to rest as a leaf. O(log leaves)."""
        if not run.queued:
            run.queued = run.last_used
            heappush(self.entries, (self.policy.rank(run), run.serial, run))

    def pop(self) -> Run:
        """Take the leaf that goes first. O(log leaves), amortised."""
        while True:
            _, _, run = heappop(self.entries)
            queued, run.queued = run.queued, 0
            if run.is_resting_leaf:
                if run.last_used == queued:
                    return run
                self.push(run)

    def peek(self) -> Run:
        """The leaf that goes first, left where it is. O(log leaves), amortised."""
        run = self.pop()
        self.push(run)
        return run

    def drop_forgotten(self) -> None:
        """Take out what is not kept any more. O(leaves)."""
        self.entries = [entry for entry in self.entries if entry[2].is_kept]
        heapify(self.entries)


def path_of(run: Run) -> Iterator[Run]:
    """A run and all above it but the root."""
    while run.parent is not None:
        yield run
        run = run.parent


def parent_of(run: Run) -> Run:
    """The parent of a run that is not the root."""
    assert run.parent is not None, "the root is always held and never split"
    return run.parent


def cut_stretches(
    tokens: bytes, start: int, keys: Mapping[int, bytes], width: int
) -> list[Stretch]:
    """Cut packed blocks, the first of which has the index `start`, where something stands before one."""
    if len(keys) == 1:  # the namespace, before block 0
        return [Stretch(b"" if start else keys[0], tokens)]
    num_blocks = len(tokens) // width
    cuts = [start, *(index for index in sorted(keys) if start < index < start + num_blocks)]
    return [
        Stretch(keys.get(cut, b""), tokens[(cut - start) * width : (end - start) * width])
        for cut, end in zip(cuts, [*cuts[1:], start + num_blocks], strict=True)
    ]
