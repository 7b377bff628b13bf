"""The blocks of a trace as a tree of prefixes: equal numbers are equal content after equal content.

Knows which block is which. Does not know caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvblocks.errors import InvalidTrace
from kvblocks.traces.records import Trace

NO_PARENT = -1


class Window(NamedTuple):
    """Which requests are measured: all from `first` on. Those before only fill the cache."""

    first: int


def measured(num_requests: int, share: float) -> Window:
    """The last share of the requests, rounded up. `InvalidTrace` unless 0 < share <= 1.

    >>> measured(5, 0.5)
    Window(first=2)
    """
    if not 0 < share <= 1:
        raise InvalidTrace(f"measure_last must be above 0 and at most 1, got {share}")
    # A share such as 0.9 is a little less or more than it says.
    return Window(int(num_requests * (1 - share) + 1e-9))


class PrefixTree(NamedTuple):
    """Each request as a path of nodes, 0, 1, 2, ... in the order in which they were first seen.

    `parents` is the node before each node. A block holds `block_size` tokens.
    """

    paths: tuple[tuple[int, ...], ...]
    parents: Sequence[int]
    num_tokens: tuple[int, ...]
    block_size: int

    @property
    def num_nodes(self) -> int:
        """How many distinct blocks there are."""
        return len(self.parents)

    def hit_tokens(self, request: int, num_hits: int) -> int:
        """The tokens in the first blocks of a request: its last block need not be full."""
        return min(num_hits * self.block_size, self.num_tokens[request])


def build_tree(trace: Trace) -> PrefixTree:
    """Number the blocks of a trace. O(blocks). `InvalidTrace` for lengths without content.

    >>> from kvblocks.traces import Request
    >>> rows = (Request(None, 12, 0, ["a", "b", "c"]), Request(None, 8, 0, ["a", "d"]))
    >>> build_tree(Trace("mooncake", 4, rows)).paths
    ((0, 1, 2), (0, 3))
    """
    if trace.block_size is None:
        raise InvalidTrace(
            f"hits need to know which blocks are equal, and a trace in the format {trace.format} has "
            f"lengths only"
        )
    edges: dict[tuple[int, Hashable], int] = {}
    roots: dict[Hashable, int] = {}
    parents: list[int] = []
    paths: list[tuple[int, ...]] = []
    for request in trace.requests:
        # Roots are numbered below all nodes, so that an edge out of one is no edge out of a node.
        node = roots.setdefault(request.scope, NO_PARENT - len(roots))
        path = []
        for name in request.blocks:
            found = edges.setdefault((node, name), len(parents))
            if found == len(parents):
                parents.append(max(node, NO_PARENT))
            path.append(found)
            node = found
        paths.append(tuple(path))
    lengths = tuple(request.num_input_tokens for request in trace.requests)
    return PrefixTree(tuple(paths), parents, lengths, trace.block_size)


def next_uses(tree: PrefixTree) -> list[list[int]]:
    """For each block of each request, the next request that uses it; their number if none does."""
    never = len(tree.paths)
    upcoming = [never] * tree.num_nodes
    found: list[list[int]] = []
    for request in range(never - 1, -1, -1):
        path = tree.paths[request]
        found.append([upcoming[node] for node in path])
        for node in path:
            upcoming[node] = request
    found.reverse()
    return found
