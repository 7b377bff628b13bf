"""Text that somebody named by a path, or that comes through standard input.

Knows paths and UTF-8. Does not know formats.
"""

import sys
from pathlib import Path

from kvblocks.errors import UnreadableFile


def read_text(path: str) -> str:
    """A whole file; `-` is standard input. `UnreadableFile`."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # bytes that are no UTF-8, and a path with a null byte
        raise UnreadableFile(f"{path} cannot be read as text: {error}") from error
