"""What the commands share: a parser, types of options, a table, and a line of progress.

Knows argparse and terminals. Does not know any command.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

Subparsers = argparse._SubParsersAction  # noqa: SLF001 -- argparse publishes no name for it
_GAP = "  "


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one sentence, and keeps the lines of an example."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation that is clear today need not be so with the next option.
        options = {
            "allow_abbrev": False,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            **options,
        }
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """A type of option: a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return number


def listed(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type of option: values that commas separate."""
    return lambda text: [read(part) for part in text.split(",")]


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a rule, the first to the left and the others to the right.

    >>> print(render_table(["feature", "checks"], [["window", "2"]]))
    feature  checks
    ───────────────
    window        2
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for cells in (headers, *rows):
        first, *others = zip(cells, widths, strict=True)
        line = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append(_GAP.join(line).rstrip())
    lines.insert(1, "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    return "\n".join(lines)


class Progress:
    """A line on standard error, where that is a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = self._stream.isatty()
        self._width = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        """Say what is done and what comes; without a name the line goes away."""
        if not self._is_shown:
            return
        text = f"{name} ({done + 1}/{total})" if name else ""
        # Overwritten with blanks: not every terminal can clear a line.
        self._stream.write(f"\r{text.ljust(self._width)}\r{text}")
        self._stream.flush()
        self._width = len(text)
