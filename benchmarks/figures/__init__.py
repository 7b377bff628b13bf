"""The figures on the pages, written from results: `nox -s figures`, or `python -m benchmarks.figures`.

A page marks where a figure goes, and what stands between the marks is replaced:

    <!-- figures: engine/ratios -->
    ...
    <!-- /figures -->

Knows which table is made from which file of benchmarks/results. Does not know how anything was
measured: each file names the command that wrote it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import (
    allocator,
    attention_cpu,
    engine,
    engine_memory,
    memory,
    serve,
    simulate,
)
from benchmarks.figures.tables import RESULTS, ROOT, Figures, result

__all__ = ["FIGURES", "RESULTS", "ROOT", "main", "pages", "result", "written"]

_MARKED = re.compile(r"(<!-- figures: (\S+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
_ROOMS = (allocator, attention_cpu, engine, engine_memory, memory, serve, simulate)
FIGURES: Figures = {name: figure for room in _ROOMS for name, figure in room.FIGURES.items()}


def pages() -> list[Path]:
    """Every page that may hold figures."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    packages = (ROOT / "packages").glob("*/README.md")
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(packages), *sorted(docs)]


def written(text: str) -> str:
    """A page with its figures; KeyError names one that there is not."""

    def replace(mark: re.Match[str]) -> str:
        figure = FIGURES[mark[2]]()
        is_inline = "\n" not in mark[3]
        return f"{mark[1]}{figure}{mark[4]}" if is_inline else f"{mark[1]}\n{figure}\n{mark[4]}"

    return _MARKED.sub(replace, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pages, or with --check say which of them differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    options = parser.parse_args(arguments)
    differing = 0
    for page in pages():
        text = page.read_text("utf-8")
        if (new := written(text)) != text:
            differing += 1
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")
            if not options.check:
                page.write_text(new, "utf-8")
    return 1 if differing and options.check else 0
