"""Pictures of results, for the pages: `nox -s plots`, or `python -m benchmarks.plots`.

Each picture carries the digest of the result that it was drawn from, so that a test can tell when one
is old without drawing it.

Knows matplotlib and which result a picture shows. Does not know how anything was measured.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks import figures
from benchmarks.figures.allocator import allocator_ratios
from benchmarks.figures.attention_cpu import speed_by_block_size
from benchmarks.figures.memory import tokens_by_block_size

IMAGES = figures.ROOT / "docs" / "images"
COLORS = ("#0b62b0", "#b8480b", "#0b7a5b", "#8a3ab9")


def digest(*names: str) -> str:
    """Names the results that a picture is drawn from."""
    texts = [(figures.RESULTS / f"{name}.json").read_bytes() for name in names]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def allocator() -> Figure:
    """How many times as long the block managers of others take."""
    rows = allocator_ratios()
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    peers = list(next(iter(rows.values())))
    height = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        places = [row + number * height for row in range(len(rows))]
        ratios = [of_peer[peer] for of_peer in rows.values()]
        bars = axes.barh(places, ratios, height * 0.92, label=peer, color=COLORS[number])
        axes.bar_label(bars, [f"{ratio:.3g}x" for ratio in ratios], padding=3, fontsize=8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, 200)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlabel("how many times the processor time of kvblocks")
    figure.legend(loc="outside upper right", ncols=len(peers), frameon=False, fontsize=8)
    _finish(axes)
    return figure


def block_size() -> Figure:
    """What a block size leaves empty, and how fast a kernel of the CPU reads it."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    sizes, tokens = zip(*tokens_by_block_size().items(), strict=True)
    memory.plot(sizes, tokens, "o-", color=COLORS[0])
    memory.set_ylabel("% of the memory holds tokens")
    memory.set_ylim(70, 100)
    for number, (dtype, shares) in enumerate(speed_by_block_size().items()):
        places = sorted(shares)
        values = [100 * shares[size] for size in places]
        speed.plot(places, values, "o-", color=COLORS[number], label=dtype)
    speed.set_ylabel("% of a linear read")
    speed.set_ylim(0, 100)
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("tokens a block")
        _finish(axes)
    speed.legend(frameon=False, fontsize=8)
    return figure


def _finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#d7dde3", linewidth=0.6)
    axes.set_axisbelow(True)


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "allocator": (allocator, ("allocator",)),
    "block-size": (block_size, ("attention-cpu", "memory")),
}


def main() -> int:
    """Draw all."""
    for name, (draw, results) in PLOTS.items():
        path = IMAGES / f"{name}.svg"
        about = {"Description": digest(*results), "Date": None, "Creator": None}
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            draw().savefig(path, metadata=about, facecolor="white")
        sys.stdout.write(f"{path.relative_to(Path.cwd())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
