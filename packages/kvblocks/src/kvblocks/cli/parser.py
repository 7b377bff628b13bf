"""What the parsers of all commands share.

Knows argparse. Does not know any command.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvblocks.errors import InvalidUsage, KVBlocksError

Subparsers = argparse._SubParsersAction  # noqa: SLF001 -- argparse publishes no name for it

T = TypeVar("T")


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


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type for `add_argument` whose own error becomes the parser's sentence."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except KVBlocksError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for values that commas separate."""
    return typed(lambda text: [read(part) for part in text.split(",")])


def page_path(text: str) -> Path:
    """A type for a file to be written at the end: what cannot be must be said at the beginning."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text!r}")
    return path


def refuse_as_page(page: Path | None, inputs: Iterable[str | Path]) -> None:
    """Refuse to write a page over a file that is read, also one in a folder. `InvalidUsage`."""
    if page is None or not page.is_file():
        return
    for path in map(Path, inputs):
        for file in path.iterdir() if path.is_dir() else [path]:
            if file.exists() and page.samefile(file):
                raise InvalidUsage(f"--html must not be a file that is read, got {str(page)!r}")


def write_page(page: Path, text: str) -> None:
    """Write a file whole; half a character, as ids may have, becomes its escape."""
    page.write_bytes(text.encode("utf-8", "backslashreplace"))


def terminal_width() -> int | None:
    """How many columns standard output has, or None where it is no terminal."""
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns
