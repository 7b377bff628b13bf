"""Tables for people: aligned columns, or one record a row where a terminal is too narrow.

Knows text and widths. Does not know what is shown.
"""

import textwrap
from collections.abc import Sequence

_GAP = "  "


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Right-aligned columns under a rule. `width`: the columns of a terminal, None for no limit.

    >>> print(render_table(["block size", "blocks"], [["8", "16"], ["16", "9"]], None))
    block size  blocks
    ──────────────────
             8      16
            16       9
    >>> print(render_table(["block size", "blocks"], [["8", "16"], ["16", "9"]], 12))
    block size  8
    blocks     16
    <BLANKLINE>
    block size 16
    blocks      9
    """
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    total = sum(widths) + len(_GAP) * (len(widths) - 1)
    if width is not None and total > width:
        return _records(headers, rows)
    lines = [_line(headers, widths), "─" * total, *(_line(row, widths) for row in rows)]
    return "\n".join(lines)


def render_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """A name and a value a line.

    >>> print(render_pairs([("pool", "16 MiB"), ("sequences", "4")]))
    pool       16 MiB
    sequences  4
    """
    label = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(label)}{_GAP}{value}".rstrip() for name, value in pairs)


def render_text(text: str, width: int | None) -> str:
    """A paragraph, no wider than a terminal and than is easy to read."""
    return textwrap.fill(text, min(width or 100, 100))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))


def _records(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    label = max(map(len, headers))
    value = max((len(cell) for row in rows for cell in row), default=0)
    return "\n\n".join(
        "\n".join(
            f"{name.ljust(label)} {cell.rjust(value)}"
            for name, cell in zip(headers, row, strict=True)
        )
        for row in rows
    )
