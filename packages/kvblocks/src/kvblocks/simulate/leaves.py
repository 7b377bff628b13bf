"""A cache of single blocks that evicts leaves, in the order of any policy of `kvblocks.policies`.

A request finds the longest prefix that is cached. The rest of its blocks is taken in from the front,
each in the place of the leaf that ranks lowest; the request's own blocks are not evicted for it.
What is left of a request when only its own blocks remain is not taken in.

As in the manager, a block that comes behind one that no full block follows goes on what was begun there:
it has the same `created`. Hits are counted for each block.

`Belady` ranks by the next use and so needs to know the future: it is no policy for an engine, and says
what the best one could hit. It declines what would itself be the next to go.

Knows leaves, ranks and one request at a time. Does not know pins, fences or partial blocks: the
`engine` semantics do.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from kvblocks.policies import Policy
from kvblocks.simulate.outcomes import Outcome
from kvblocks.simulate.prefixes import NO_PARENT, PrefixTree, Window, next_uses
from kvblocks.simulate.progress import Progress, silent
from kvblocks.simulate.tally import Tally


class Block:
    """One cached block, with what a policy may ask of it; times are numbers of requests."""

    __slots__ = (
        "created",
        "is_cached",
        "is_full",
        "last_used",
        "next_use",
        "num_children",
        "num_full_children",
        "num_hits",
        "parent",
        "priority",
    )

    def __init__(self, parent: Block | None) -> None:
        self.parent = parent
        self.is_full = True
        self.num_children = 0
        self.num_full_children = 0
        self.is_cached = False
        self.last_used = 0
        self.created = 0
        self.num_hits = 0
        self.priority = 0
        self.next_use = 0


class Belady:
    """The offline optimum for leaf-first caches: what is used again last goes first."""

    def rank(self, block: Block) -> int:
        """How soon it is used again, counted backwards."""
        return -block.next_use


class LeafCache:
    """The cached blocks of one replay, and the queue of their leaves."""

    def __init__(self, tree: PrefixTree, capacity: int, policy: Policy | Belady) -> None:
        self.capacity = capacity
        self.num_cached = 0
        self.rank: Callable[[Any], Any] = policy.rank
        self.may_decline = isinstance(policy, Belady)
        self._leaves: list[tuple[Any, int, int, Block]] = []  # rank, serial, last_used, block
        self._serial = 0
        self.blocks: list[Block] = []
        for parent in tree.parents:
            self.blocks.append(Block(None if parent == NO_PARENT else self.blocks[parent]))
        for path, num_tokens in zip(tree.paths, tree.num_tokens, strict=True):
            for node in path[num_tokens // tree.block_size :]:
                self.blocks[node].is_full = False

    def replay(
        self, now: int, path: tuple[int, ...], next_use: list[int] | None
    ) -> tuple[int, int]:
        """One request: (blocks found, blocks evicted for it)."""
        blocks = [self.blocks[node] for node in path]
        found = 0
        for block in blocks:
            if not block.is_cached:
                break
            block.last_used = now
            block.num_hits += 1
            found += 1
        if next_use is not None:
            for block, use in zip(blocks, next_use, strict=True):
                block.next_use = use
        evicted, held = 0, found
        for block in blocks[found:]:
            if self.num_cached == self.capacity:
                if not self._evict(now, block):
                    break
                evicted += 1
            self._admit(now, block)
            held += 1
        if held:
            self._rest(blocks[held - 1])
        return found, evicted

    def _admit(self, now: int, block: Block) -> None:
        block.is_cached = True
        block.last_used = block.created = now
        block.num_hits = 0
        self.num_cached += 1
        parent = block.parent
        if parent is not None:
            if block.is_full and not parent.num_full_children:
                block.created = parent.created
            parent.num_children += 1
            parent.num_full_children += block.is_full

    def _rest(self, block: Block) -> None:
        """Queue a block that may have become a leaf."""
        if not block.num_children:
            self._serial += 1
            heappush(self._leaves, (self.rank(block), self._serial, block.last_used, block))

    def _evict(self, now: int, candidate: Block) -> bool:
        """Make room for a block, unless nothing may go for it."""
        while self._leaves:
            rank, _, last_used, block = self._leaves[0]
            if not block.is_cached or block.num_children or block.last_used != last_used:
                heappop(self._leaves)
                continue
            if self.may_decline and self.rank(candidate) <= rank:
                return False
            heappop(self._leaves)
            block.is_cached = False
            self.num_cached -= 1
            parent = block.parent
            if parent is not None:
                parent.num_children -= 1
                parent.num_full_children -= block.is_full
                if parent.last_used != now:  # what this request found stays for it
                    self._rest(parent)
            return True
        return False


def leaf_outcome(
    tree: PrefixTree,
    window: Window,
    capacity: int,
    *,
    name: str,
    policy: Policy | Belady,
    progress: Progress = silent,
) -> Outcome:
    """Replay a trace under a policy. O(blocks + evictions * log leaves)."""
    tally = Tally(tree, window)
    cache = LeafCache(tree, capacity, policy)
    upcoming = next_uses(tree) if isinstance(policy, Belady) else None
    for request, path in enumerate(tree.paths):
        next_use = upcoming[request] if upcoming is not None else None
        tally.add(request, *cache.replay(request, path, next_use))
        progress(request + 1)
    return tally.outcome(name, capacity)
