"""First in, first out, over single blocks: what came first goes first, wherever it stands in a prompt.

A block may go before the blocks after it, which cannot be found without it and stay until their turn.

Knows an order of arrival. Does not know prefixes beyond finding the first block that is missing.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from kvblocks.simulate.outcomes import Outcome
from kvblocks.simulate.prefixes import PrefixTree, Window
from kvblocks.simulate.progress import Progress, silent
from kvblocks.simulate.tally import Tally


def fifo_outcome(
    tree: PrefixTree, window: Window, capacity: int, progress: Progress = silent
) -> Outcome:
    """Replay a trace. O(blocks)."""
    tally = Tally(tree, window)
    is_cached = bytearray(tree.num_nodes)
    arrivals: deque[int] = deque()
    for request, path in enumerate(tree.paths):
        num_found = sum(1 for _ in takewhile(is_cached.__getitem__, path))
        num_evicted = 0
        for node in path[num_found:]:
            if is_cached[node]:
                continue
            if len(arrivals) == capacity:
                is_cached[arrivals.popleft()] = False
                num_evicted += 1
            is_cached[node] = True
            arrivals.append(node)
        tally.add(request, num_found, num_evicted)
        progress(request + 1)
    return tally.outcome("fifo", capacity)
