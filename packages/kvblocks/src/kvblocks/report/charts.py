"""Charts as inline SVG: lines over a logarithmic axis, and bars of several parts.

Lines differ in colour, dash and mark, so that they stay apart in grey, and are named where they end.
Each chart can be read without a script; with that of `page`, the arrow keys and the pointer show values.

Knows scales and shapes. Does not know what the numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import NamedTuple

from kvblocks.report.page import NUM_COLOURS

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 130, 16, 52
_NAME_HEIGHT = 17
_DASHES = ("", "7 4", "2 3", "10 3 2 3")
_ROW, _BAR, _BAR_LEFT = 34, 22, 210


class Series(NamedTuple):
    """A line through points (x, y) in the order of x. `is_marked`: its points are drawn too."""

    name: str
    points: Sequence[tuple[float, float]]
    is_marked: bool = True


class Guide(NamedTuple):
    """A level that is named on the chart."""

    name: str
    y: float


class Bar(NamedTuple):
    """A name, and the size of each part."""

    name: str
    parts: Sequence[float]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_label: str,
    guides: Sequence[Guide] = (),
    show_x: Callable[[float], str] = "{:,.0f}".format,
    show_y: Callable[[float], str] = "{:,.1f}".format,
) -> str:
    """Lines over a logarithmic x axis; y begins at 0. All x must be above 0. O(points).

    `label` is what a screen reader says; `show_x` and `show_y` write numbers.
    """
    xs = sorted({x for line in series for x, _ in line.points})
    values = [y for line in series for _, y in line.points]
    y_ticks = linear_ticks(max([*values, *(guide.y for guide in guides)]))
    low, high = log10(xs[0]), log10(xs[-1])
    span = high - low or 1.0

    def place_x(x: float) -> float:
        return round(_LEFT + (log10(x) - low) / span * (_WIDTH - _LEFT - _RIGHT), 1)

    def place_y(y: float) -> float:
        return round(_HEIGHT - _BOTTOM - y / y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = _y_axis(y_ticks, place_y, y_label)
    parts += _x_axis(log_ticks(xs[0], xs[-1]), place_x, show_x, x_label)
    end = _WIDTH - _RIGHT
    for guide in guides:
        y = place_y(guide.y)
        parts.append(f'<line class="guide" x1="{_LEFT}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT + 6}" y="{y - 6}">{escape(guide.name)}</text>')
    for index, line in enumerate(series):
        placed = [(place_x(x), place_y(y)) for x, y in line.points]
        parts.append(_line(index, placed, is_marked=line.is_marked))
    ends = [(place_x(line.points[-1][0]), place_y(line.points[-1][1])) for line in series]
    for index, (line, (x, _), y) in enumerate(
        zip(series, ends, _spread([y for _, y in ends]), strict=True)
    ):
        parts.append(
            f'<text class="name {_colour(index)}" x="{x + 9}" y="{y + 4}">{escape(line.name)}</text>'
        )
    texts = {x: [f"{show_x(x)} {x_label}"] for x in xs}
    for line in series:
        for x, y_value in line.points:
            texts[x].append(f"{line.name}: {show_y(y_value)}")
    stops = [{"x": place_x(x), "text": "\n".join(texts[x])} for x in xs]
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    hint = f"{label} Arrow keys step through the values."
    return _svg(_HEIGHT, parts, hint, f' data-stops="{escape(json.dumps(stops))}"')


def area_chart(
    kinds: Sequence[tuple[str, str]],
    points: Sequence[tuple[float, Sequence[float]]],
    *,
    label: str,
    x_label: str,
    y_label: str,
) -> str:
    """The sizes of several kinds on top of each other, over a linear x axis. O(points).

    A kind is a name and a class that gives its colour; a point is x, and the size of each kind there.
    """
    y_ticks = linear_ticks(max(sum(sizes) for _, sizes in points))
    low, high = points[0][0], points[-1][0]
    end, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place_x(x: float) -> float:
        return round(_LEFT + (x - low) / (high - low or 1.0) * (end - _LEFT), 1)

    def place_y(y: float) -> float:
        return round(bottom - y / y_ticks[-1] * (bottom - _TOP), 1)

    parts, names = [], []
    below: Sequence[float] = [0.0] * len(points)
    for index, (name, colour) in enumerate(kinds):
        sizes = [size[index] for _, size in points]
        above = [base + size for base, size in zip(below, sizes, strict=True)]
        edges = [(place_x(x), place_y(y)) for (x, _), y in zip(points, above, strict=True)]
        edges += [
            (place_x(x), place_y(y)) for (x, _), y in reversed([*zip(points, below, strict=True)])
        ]
        path = "L".join(f"{x} {y}" for x, y in edges)
        parts.append(f'<path class="fill {colour}" d="M{path}Z"/>')
        if any(sizes):
            names.append((name, colour, place_y((below[-1] + above[-1]) / 2)))
        below = above
    heights = _spread([y for *_, y in names])
    for (name, colour, _), y in zip(names, heights, strict=True):
        parts.append(f'<text class="name {colour}" x="{end + 9}" y="{y + 4}">{escape(name)}</text>')
    parts += _y_axis(y_ticks, place_y, y_label)
    ticks = [tick for tick in linear_ticks(high) if low <= tick <= high]
    parts += _x_axis(ticks, place_x, "{:,.0f}".format, x_label)
    stops = []
    for x, each in points:
        shown = [
            f"{name}: {size:,.0f}" for (name, _), size in zip(kinds, each, strict=True) if size
        ]
        stops.append({"x": place_x(x), "text": "\n".join([f"{x_label} {x:,.0f}", *shown])})
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{bottom}"/>')
    hint = f"{label} Arrow keys step through the values."
    return _svg(_HEIGHT, parts, hint, f' data-stops="{escape(json.dumps(stops))}"')


def bar_chart(
    bars: Sequence[Bar],
    kinds: Sequence[str],
    *,
    label: str,
    show: Callable[[float], str] = "{:,.1f} %".format,
) -> str:
    """Bars that lie, each of several parts, on one scale that begins at 0; with a key of the kinds.

    A part shows its size under a pointer and on focus, and as text where it has room.
    """
    longest = max(sum(bar.parts) for bar in bars) or 1.0
    scale = (_WIDTH - _BAR_LEFT) / longest
    drawn = []
    for row, bar in enumerate(bars):
        y, x = _ROW * row + 6, float(_BAR_LEFT)
        drawn.append(
            f'<text class="ink" x="{_BAR_LEFT - 10}" y="{y + 16}" text-anchor="end">'
            f"{escape(bar.name)}</text>"
        )
        for index, (kind, size) in enumerate(zip(kinds, bar.parts, strict=True)):
            if size <= 0:
                continue
            tip = escape(f"{bar.name}\n{kind}: {show(size)}")
            wide = size * scale
            drawn.append(
                f'<rect class="fill {_colour(index)}" tabindex="0" data-tip="{tip}" x="{x:.1f}" '
                f'y="{y}" width="{max(wide - 1, 0.5):.1f}" height="{_BAR}"/>'
            )
            if wide > 60:
                drawn.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 16}" text-anchor="middle" '
                    f'pointer-events="none" style="fill: var(--paper)">{escape(show(size))}</text>'
                )
            x += wide
    coloured = [(kind, _colour(index)) for index, kind in enumerate(kinds)]
    return key(coloured) + _svg(_ROW * len(bars) + 6, drawn, label)


def key(kinds: Sequence[tuple[str, str]]) -> str:
    """Which colour means what: names, each with the class that gives its colour."""
    items = "".join(f'<li class="{colour}"><i></i>{escape(kind)}</li>' for kind, colour in kinds)
    return f'<ul class="key">{items}</ul>'


def _svg(height: float, parts: Sequence[str], label: str, more: str = "") -> str:
    role = f'role="img" tabindex="0"{more}' if more else 'role="group"'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" {role} aria-label="{escape(label)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _colour(index: int) -> str:
    return f"c{index % NUM_COLOURS}"


def _y_axis(ticks: Sequence[float], place: Callable[[float], float], label: str) -> list[str]:
    parts = []
    for value in ticks:
        y = place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    return parts


def _x_axis(
    ticks: Sequence[float],
    place: Callable[[float], float],
    show: Callable[[float], str],
    label: str,
) -> list[str]:
    parts, bottom = [], _HEIGHT - _BOTTOM
    for value in ticks:
        x = place(value)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{escape(show(value))}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>'
    )
    return parts


def _line(index: int, placed: Sequence[tuple[float, float]], *, is_marked: bool) -> str:
    path = "M" + "L".join(f"{x} {y}" for x, y in placed)
    dash = _DASHES[index % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    marks = "".join(_mark(index, x, y) for x, y in placed) if is_marked else ""
    return f'<g class="{_colour(index)}"><path class="line"{dashed} d="{path}"/>{marks}</g>'


def _mark(index: int, x: float, y: float) -> str:
    shapes = (
        f'<circle class="mark" cx="{x}" cy="{y}" r="4.5"/>',
        f'<rect class="mark" x="{x - 4}" y="{y - 4}" width="8" height="8"/>',
        f'<path class="mark" d="M{x} {y - 6}l5.5 9.5h-11z"/>',
        f'<path class="mark" d="M{x} {y - 6}l6 6l-6 6l-6 -6z"/>',
    )
    return shapes[index % len(shapes)]


def linear_ticks(largest: float) -> list[float]:
    """Round numbers from 0 up to the first that is not below `largest`: four to seven of them.

    >>> linear_ticks(39.8)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    >>> linear_ticks(0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    largest = largest or 1.0
    power = 10.0 ** floor(log10(largest) - 1)
    step = next(power * nice for nice in (2, 2.5, 5, 10, 20, 25) if power * nice * 6 >= largest)
    return [round(step * index, 12) for index in range(ceil(largest / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: 1, 2 and 5 in each power of ten, or 1 only if those are many.

    >>> log_ticks(40, 1500)
    [50, 100, 200, 500, 1000]
    >>> log_ticks(3, 4)
    [3]
    """
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) < 5 else (1,)
    ticks = [digit * 10**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high] or [low]


def _spread(wanted: Sequence[float]) -> list[float]:
    """Heights for names, in the order and near the heights that are wanted, without overlap."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    heights = list(wanted)
    for above, below in pairwise(order):
        heights[below] = max(heights[below], heights[above] + _NAME_HEIGHT)
    limit = float(_HEIGHT - _BOTTOM)
    for index in reversed(order):
        heights[index] = min(heights[index], limit)
        limit = heights[index] - _NAME_HEIGHT
    return heights
