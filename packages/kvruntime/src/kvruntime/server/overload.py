"""How busy the engine is, and how long somebody who is refused should wait.

Knows rates. Does not know what is refused, nor why.
"""

import math

from kvruntime.engine import Engine
from kvruntime.observer import Observer

__all__ = ["Throughput"]

_MEMORY_SECONDS = 30.0  # of work: what is older counts little
_LONGEST = 60  # what the clients of OpenAI follow; beyond, they wait as they like


class Throughput(Observer):
    """How many requests end a second while the engine works, of late.

    >>> throughput = Throughput()
    >>> throughput.seconds_for(3)
    1
    """

    def __init__(self) -> None:
        self._num_ended = 0.0
        self._seconds = 0.0

    def ended(self, seconds: float, reason: str, num_prompt_tokens: int, num_tokens: int) -> None:  # noqa: ARG002 -- the interface's
        """Count a request that ended, however it did: it leaves room for another."""
        self._num_ended += 1

    def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002 -- likewise
        """Count the time of a step, and forget a little of what was before."""
        kept = math.exp(-seconds / _MEMORY_SECONDS)
        self._num_ended *= kept
        self._seconds = self._seconds * kept + seconds

    def seconds_for(self, num_waiting: int) -> int:
        """When so many that wait will have been served: 1 to 60 seconds."""
        if not self._num_ended:
            return 1  # nothing has been measured
        return max(1, min(_LONGEST, math.ceil(num_waiting * self._seconds / self._num_ended)))
