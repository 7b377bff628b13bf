"""How long work tells its caller where it is."""

from typing import Protocol

__all__ = ["Progress", "no_progress"]


class Progress(Protocol):
    """Called from time to time during slow work, in the thread that does it."""

    def __call__(self, description: str, done: int, total: int) -> None:
        """Take note that `done` of `total` units are done; `description` is for a person."""


def no_progress(description: str, done: int, total: int) -> None:
    """Take no note."""
