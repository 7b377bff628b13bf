"""One line on a terminal that says how far a long run is, and goes away when it ends.

Knows terminals and the clock. Does not know what runs.
"""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

_SECONDS_BETWEEN = 0.1


class ProgressLine:
    """A line on standard error, where that is a terminal; silent elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_shown = self._stream.isatty()
        self._width = 0
        self._next = 0.0
        self._label, self._total = "", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # Also after Ctrl-C: what is said next begins on a clean line.
        self._write("")

    def begin(self, label: str, total: int) -> None:
        """Say what runs from here on, and how many steps it has."""
        self._label, self._total = label, max(total, 1)
        self._next = 0.0

    def __call__(self, done: int) -> None:
        """Note how many steps are done; shown ten times a second at most."""
        if self._is_shown and monotonic() >= self._next:
            self._next = monotonic() + _SECONDS_BETWEEN
            self._write(f"{self._label} {100 * done // self._total} %")

    def _write(self, text: str) -> None:
        if self._is_shown and (text or self._width):
            # Overwritten with blanks: not every terminal can clear a line.
            self._stream.write(f"\r{text.ljust(self._width)}\r{text}")
            self._stream.flush()
            self._width = len(text)
