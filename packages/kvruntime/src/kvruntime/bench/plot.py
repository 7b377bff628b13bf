"""A picture of a load: when each request was served, and how its latencies are spread.

Knows matplotlib and records. Does not know servers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from kvruntime.bench.figures import METRICS, Outcome, Record
from kvruntime.errors import InvalidRequest

__all__ = ["check_format", "draw", "save_plot"]

_WAITING, _ANSWERING, _REFUSED, _LIMIT = "#bcd2e8", "#2b6ca3", "#c2410c", "#6b7280"
_CURVES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2el": "end to end",
}
_MOST_BARS = 400


def check_format(path: Path) -> None:
    """Refuse a file whose suffix says no format that can be written. `InvalidRequest`."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InvalidRequest(f"a plot is one of {', '.join(sorted(known))}, got {path.name}")


def save_plot(
    path: Path, records: Sequence[Record], *, title: str, limits: Mapping[str, float] | None = None
) -> None:
    """Write the picture to a file, in the format of its suffix. `OSError` if that fails."""
    draw(records, title=title, limits=limits or {}).savefig(path, dpi=120)


def draw(records: Sequence[Record], *, title: str, limits: Mapping[str, float]) -> Figure:
    """Requests as bars over time, above how many of them were faster than a time."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    figure.suptitle(title)
    places = figure.subplot_mosaic([["requests"] * len(_CURVES), [*_CURVES]], height_ratios=(3, 2))
    _draw_requests(places["requests"], records)
    places["ttft"].set_ylabel("share of requests")
    for name in _CURVES:
        _draw_share(places[name], records, name, limits.get(name))
    return figure


def _draw_requests(axes: Any, records: Sequence[Record]) -> None:
    """One bar a request: until its first token, and from there to its end."""
    sent = [record for record in records if record.sent is not None]
    shown = sent[:_MOST_BARS]
    for row, record in enumerate(shown):
        start, end = record.sent or 0.0, record.ended
        if record.outcome in {Outcome.REJECTED, Outcome.FAILED}:
            axes.plot(start, row, marker="x", color=_REFUSED, markersize=5)
        elif end is not None:
            first = record.chunk_times[0] if record.chunk_times else end
            axes.barh(row, first - start, left=start, height=0.8, color=_WAITING)
            axes.barh(row, end - first, left=first, height=0.8, color=_ANSWERING)
    for colour, label in ((_WAITING, "until the first token"), (_ANSWERING, "answering")):
        axes.barh(0, 0, color=colour, label=label)
    if any(record.outcome in {Outcome.REJECTED, Outcome.FAILED} for record in shown):
        axes.plot([], [], "x", color=_REFUSED, label="refused or failed")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests" if len(shown) == len(sent) else f"first {_MOST_BARS} requests")
    axes.set_ylim(max(len(shown), 1) - 0.3, -0.7)
    axes.legend(loc="upper right", fontsize="small")


def _draw_share(axes: Any, records: Sequence[Record], name: str, limit: float | None) -> None:
    """The share of completed requests that took no longer than a time."""
    values = sorted(
        1000 * value for record in records if record.is_completed for value in METRICS[name](record)
    )
    axes.set_title(_CURVES[name], fontsize="medium")
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if values:
        axes.ecdf(values, color=_ANSWERING)
    axes.set_xlim(left=0)
    if limit is not None:
        axes.axvline(1000 * limit, color=_LIMIT, linestyle="--", linewidth=1)
