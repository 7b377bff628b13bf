"""Counts what a replay finds, over the measured requests.

Knows which requests are measured. Does not know caches.
"""

from kvblocks.simulate.outcomes import Outcome
from kvblocks.simulate.prefixes import PrefixTree, Window


class Tally:
    """The counters of one replay of the prefix index."""

    def __init__(self, tree: PrefixTree, window: Window) -> None:
        self.tree = tree
        self.first = window.first
        self.hit_blocks = 0
        self.hit_tokens = 0
        self.evictions = 0

    def add(self, request: int, num_found: int, num_evicted: int) -> None:
        """Note one request, if it is measured."""
        if request >= self.first:
            self.hit_blocks += num_found
            self.hit_tokens += self.tree.hit_tokens(request, num_found)
            self.evictions += num_evicted

    def outcome(self, policy: str, capacity: int) -> Outcome:
        """The counters, with what was looked for."""
        return Outcome(
            policy=policy,
            semantics="index",
            capacity=capacity,
            hit_blocks=self.hit_blocks,
            total_blocks=sum(map(len, self.tree.paths[self.first :])),
            hit_tokens=self.hit_tokens,
            total_tokens=sum(self.tree.num_tokens[self.first :]),
            evictions=self.evictions,
        )
