"""What tables are made of: a result, a row, a number of three digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Figures = dict[str, Callable[[], str]]


def result(name: str) -> dict[str, Any]:
    """What a benchmark wrote."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table of Markdown: `left` columns of words, then figures."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines).replace("|  |", "| |")


def number(value: float) -> str:
    """Three digits.

    >>> number(0.0473), number(5.236), number(42.72), number(127.1)
    ('0.05', '5.24', '42.7', '127')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def command(name: str) -> Callable[[], str]:
    """A figure that names the command and the day of a result."""

    def render() -> str:
        found = result(name)
        return f"`{found['command']}`, {found['date'][:10]}"

    return render
