"""Contiguous memory without compaction: what paging is compared with.

Knows addresses, free runs and why a request is refused. Does not know requests, tokens or bytes: a unit
is whatever the caller counts in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvblocks.sizing import require


class Segment(NamedTuple):
    """Consecutive units that are all free or all in use."""

    size: int
    is_free: bool


class Fragmentation(NamedTuple):
    """What is free, in the runs that it lies in."""

    free_runs: tuple[int, ...]

    @property
    def num_free(self) -> int:
        """All that is free."""
        return sum(self.free_runs)

    @property
    def largest_run(self) -> int:
        """The most that can be had in one piece."""
        return max(self.free_runs, default=0)

    def fits(self, size: int) -> bool:
        """Whether a request for one piece can be served."""
        return size <= self.largest_run

    def is_fragmented_for(self, size: int) -> bool:
        """Whether enough is free, and not in one piece: external fragmentation."""
        return self.largest_run < size <= self.num_free


def fragmentation(segments: Iterable[Segment]) -> Fragmentation:
    """The free runs of segments in the order of their addresses; neighbours coalesce. `InvalidSize`.

    >>> found = fragmentation([Segment(128, True), Segment(64, False), Segment(128, True), Segment(64, True)])
    >>> found.free_runs, found.num_free, found.fits(256), found.is_fragmented_for(256)
    ((128, 192), 320, False, True)
    """
    runs = [0]
    for size, is_free in segments:
        require("the size of a segment", size, least=0)
        if is_free:
            runs[-1] += size
        else:
            runs.append(0)
    return Fragmentation(tuple(run for run in runs if run))
