"""Replays a trace against a cache of blocks: how much of it would have hit.

Two semantics, and every figure names its own:

- `index`: the prefix index alone. Every block that the trace names counts, a last one that is not
  full too; a request that ran before is found whole.
- `engine`: the real `BlockManager`, as an engine drives it. Full blocks only are keyed, at least one
  token of a prompt is computed, and what runs holds its blocks.

`lru` is leaf-first in both. In `index`, `fifo` evicts any block, `belady` knows the future, and every
other name is a policy of `kvblocks.policies`, over single blocks; in `engine` all names are the
manager's.

Knows policies, semantics and which part of a trace is measured. Does not know files or how figures
are shown.
"""

from __future__ import annotations

from math import inf

from kvblocks.errors import InvalidTrace
from kvblocks.policies import make_policy
from kvblocks.simulate.engine import Job, Service, run_by_timestamps, run_one_by_one
from kvblocks.simulate.fifo import fifo_outcome
from kvblocks.simulate.leaves import Belady, leaf_outcome
from kvblocks.simulate.outcomes import Load, Outcome
from kvblocks.simulate.prefixes import PrefixTree, build_tree, measured
from kvblocks.simulate.progress import Progress, silent
from kvblocks.simulate.stack_distance import LruCurve, lru_curve
from kvblocks.traces.records import Trace, by_time

__all__ = [
    "Load",
    "LruCurve",
    "Outcome",
    "Service",
    "Simulation",
]

BELADY = "belady"
LENGTHS_BLOCK_SIZE = 16  # where a trace has lengths only and nobody says


class Simulation:
    """One trace, to be replayed as often as one likes.

    `measure_last` is the share of the requests that is counted; those before only fill the cache.

    >>> from kvblocks.traces import Request, Trace
    >>> chats = [Request(None, 8, 0, ["hello", name]) for name in ("ann", "bob", "ann")]
    >>> simulation = Simulation(Trace("mooncake", 4, tuple(chats)))
    >>> simulation.index("lru", capacity=2).hit_blocks  # "hello", twice
    2
    >>> simulation.curve().capacity_for(1.0)
    3
    """

    def __init__(
        self, trace: Trace, *, measure_last: float = 1.0, block_size: int | None = None
    ) -> None:
        self.trace = trace
        self.window = measured(len(trace.requests), measure_last)
        self.block_size = trace.block_size or block_size or LENGTHS_BLOCK_SIZE
        self.tree = build_tree(trace) if trace.has_content else None
        self._curve: LruCurve | None = None

    def index(self, policy: str, capacity: int, progress: Progress = silent) -> Outcome:
        """Replay against the prefix index alone; `lru` at a second capacity is free.

        O(blocks), times log(leaves) for most policies. `InvalidTrace`, `InvalidConfig`.
        """
        tree = self._content()
        if policy == "lru":
            return self.curve(progress).outcome(capacity)
        if capacity < 1:
            raise InvalidTrace(f"capacity must be at least 1, got {capacity}")
        if policy == "fifo":
            return fifo_outcome(tree, self.window, capacity, progress)
        order = Belady() if policy == BELADY else make_policy(policy)
        return leaf_outcome(
            tree, self.window, capacity, name=policy, policy=order, progress=progress
        )

    def curve(self, progress: Progress = silent) -> LruCurve:
        """Leaf-first LRU at every capacity, `index` semantics; computed once. `InvalidTrace`."""
        if self._curve is None:
            self._curve = lru_curve(self._content(), self.window, progress)
        return self._curve

    def engine(
        self,
        policy: str,
        capacity: int,
        *,
        holds_outputs: bool = False,
        service: Service | None = None,
        progress: Progress = silent,
    ) -> Outcome:
        """Replay through a `BlockManager` of `capacity` blocks.

        One request at a time in the order of the trace, or, with a `service`, when they came.
        `holds_outputs`: generated tokens take blocks too. `InvalidTrace`, `InvalidConfig`.
        """
        if policy == BELADY:
            raise InvalidTrace(f"{BELADY} knows the future, which the engine semantics cannot")
        for name, rate in service._asdict().items() if service else ():
            if not 0 < rate < inf:
                raise InvalidTrace(f"{name} must be above 0 tokens a second, got {rate}")
        job = Job(
            self.trace.requests,
            self.tree,
            self.block_size,
            self.window,
            capacity,
            policy,
            holds_outputs,
        )
        if service is None:
            return run_one_by_one(job, progress)
        return run_by_timestamps(self._in_time(job), service, progress)

    def _content(self) -> PrefixTree:
        return self.tree if self.tree is not None else build_tree(self.trace)

    def _in_time(self, job: Job) -> Job:
        if not self.trace.has_timestamps:
            raise InvalidTrace(
                "requests overlap where it is known when they came, and some do not say"
            )
        ordered = tuple(by_time(job.requests))
        if ordered == job.requests:
            return job
        again = self.trace._replace(requests=ordered)
        return job._replace(requests=ordered, tree=build_tree(again) if again.has_content else None)
