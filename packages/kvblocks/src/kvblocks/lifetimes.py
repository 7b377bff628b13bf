"""How long evicted blocks had been in the cache, by a clock of the caller's.

Knows times and numbers of blocks. Does not know runs, nor what a unit of time is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvblocks.results import Durations

Clock: TypeAlias = Callable[[], float]


class Lifetimes:
    """The time as it was read last, and what was counted by it."""

    def __init__(self, clock: Clock) -> None:
        self.clock: Clock | None = clock
        self.now = float(clock())
        self.idle = Durations()
        self.lifetime = Durations()

    def tick(self) -> None:
        """Read the clock; time never goes back. First in a call, since a clock may raise."""
        if self.clock is not None:
            self.now = max(self.now, float(self.clock()))

    def note_evicted(self, num_blocks: int, born: float, rested: float) -> None:
        """Note that blocks leave that were computed and given up at these times. O(1)."""
        self.idle = self.idle.plus(num_blocks, self.now - rested)
        self.lifetime = self.lifetime.plus(num_blocks, self.now - born)
