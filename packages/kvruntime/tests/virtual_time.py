"""An event loop whose clock moves only when everybody sleeps, and then at once.

Knows asyncio. What runs in it measures exact times and takes none.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Instead of waiting, tells the loop how long it would have waited."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self.waited += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in which an hour of sleep takes no time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.waited


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
