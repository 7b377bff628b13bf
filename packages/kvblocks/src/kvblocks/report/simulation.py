"""What `kvblocks simulate` found, as a page: hit rates against capacity, and a table of all figures.

Knows outcomes and how to show them. Does not replay anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvblocks.report.charts import Guide, Series, line_chart
from kvblocks.report.page import Section, facts, figure, paragraph, render_page, table
from kvblocks.simulate import LruCurve, Outcome, Simulation

_NUM_CURVE_POINTS = 120
_SHARE_OF_CEILING = 0.95

_SEMANTICS = {
    "index": "index: the prefix index alone; every block that the trace names counts, a last one "
    "that is not full too, and a prompt that came before is found whole.",
    "engine": "engine: the real block manager, as an engine drives it; full blocks only are found, at "
    "least one token of a prompt is computed, and a running request holds its blocks.",
}


def simulation_page(name: str, simulation: Simulation, outcomes: Sequence[Outcome]) -> str:
    """The report of a replay as one HTML file. `name` says which trace it was."""
    curve = simulation.curve() if simulation.trace.has_content else None
    sections = [Section("Overview", _overview(simulation, curve))]
    drawn = _curves(curve, outcomes)
    if drawn:
        sections.append(Section("Hit rate against capacity", drawn))
    sections.append(Section("All figures", _figures(outcomes)))
    loads = [outcome for outcome in outcomes if outcome.load]
    if loads:
        sections.append(Section("While requests overlapped", _load_table(loads)))
    return render_page("What this traffic would hit", name, sections)


def _overview(simulation: Simulation, curve: LruCurve | None) -> str:
    trace, first = simulation.trace, simulation.window.first
    pairs = [
        ("requests", f"{len(trace.requests):,}"),
        ("of them measured", f"{len(trace.requests) - first:,}"),
        ("tokens a block", f"{simulation.block_size:,}"),
    ]
    if curve is not None and curve.total_tokens:
        share = curve.ceiling_tokens / curve.total_tokens
        pairs += [
            ("distinct blocks", f"{curve.num_distinct_blocks:,}"),
            ("ceiling: never evict (index)", f"{100 * share:.2f} %"),
            ("blocks for 95 % of it (lru)", f"{curve.capacity_for(_SHARE_OF_CEILING):,}"),
        ]
    left_out = len(trace.malformed)
    if left_out:
        pairs.append(("malformed rows left out", f"{left_out:,}"))
    measured = "All requests are measured."
    if first:
        measured = f"The first {first:,} requests only fill the cache; the others are measured."
    return facts(pairs) + paragraph(measured) + "".join(map(paragraph, trace.warnings))


def _curves(curve: LruCurve | None, outcomes: Sequence[Outcome]) -> str | None:
    capacities = sorted({outcome.capacity for outcome in outcomes})
    if curve is None or not curve.total_tokens:
        return None
    by_name: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for outcome in outcomes:
        points = by_name.setdefault((outcome.policy, outcome.semantics), [])
        points.append((outcome.capacity, 100 * outcome.hit_rate))
    by_name.pop(("lru", "index"), None)  # the curve goes through them
    through = _curve_capacities(min(capacities), max(*capacities, curve.num_distinct_blocks))
    through = sorted({*through, *capacities})
    lru = [(float(size), 100 * curve.outcome(size).hit_rate) for size in through]
    is_engine = any(semantics == "engine" for _, semantics in by_name)
    series = [Series("lru, index" if is_engine else "lru", lru, is_marked=False)]
    for (policy, semantics), points in by_name.items():
        name = f"{policy}, {semantics}" if is_engine else policy
        series.append(Series(name, sorted(set(points))))
    ceiling = 100 * curve.ceiling_tokens / curve.total_tokens
    drawing = line_chart(
        series,
        label="Hit rate in per cent against the capacity of the cache in blocks.",
        x_label="blocks",
        y_label="hit rate, % of tokens",
        guides=[Guide(f"never evict: {ceiling:.2f} %", ceiling)],
        show_y="{:.2f} %".format,
    )
    used = sorted({"index", *(outcome.semantics for outcome in outcomes)}, reverse=True)
    caption = (
        f"Hit tokens of {curve.total_tokens:,} measured. The line of lru holds at every capacity and "
        "comes out of one pass; marks are replays at one capacity."
    )
    rates = table("Hit rate, % of tokens", *_rates(outcomes, capacities))
    return figure(drawing, caption) + "".join(paragraph(_SEMANTICS[name]) for name in used) + rates


def _curve_capacities(low: int, high: int) -> list[int]:
    ratio = high / low
    steps = _NUM_CURVE_POINTS - 1
    return sorted({round(low * ratio ** (step / steps)) for step in range(_NUM_CURVE_POINTS)})


def _rates(
    outcomes: Sequence[Outcome], capacities: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    """A row for each policy, a column for each capacity."""
    found: dict[str, dict[int, str]] = {}
    for outcome in outcomes:
        row = found.setdefault(f"{outcome.policy} ({outcome.semantics})", {})
        row[outcome.capacity] = f"{100 * outcome.hit_rate:.2f}"
    headers = ["blocks", *(f"{capacity:,}" for capacity in capacities)]
    return headers, [
        [name, *(row.get(capacity, "") for capacity in capacities)] for name, row in found.items()
    ]


def _figures(outcomes: Sequence[Outcome]) -> str:
    headers = [
        "policy",
        "capacity",
        "hit rate",
        "hit blocks",
        "of",
        "hit tokens",
        "of",
        "evictions",
    ]
    rows = [
        [
            f"{outcome.policy} ({outcome.semantics})",
            f"{outcome.capacity:,}",
            f"{100 * outcome.hit_rate:.3f} %",
            f"{outcome.hit_blocks:,}",
            f"{outcome.total_blocks:,}",
            f"{outcome.hit_tokens:,}",
            f"{outcome.total_tokens:,}",
            f"{outcome.evictions:,}",
        ]
        for outcome in outcomes
    ]
    if any(outcome.refused_requests for outcome in outcomes):
        headers.append("not served")
        for row, outcome in zip(rows, outcomes, strict=True):
            row.append(f"{outcome.refused_requests:,}")
    return table("One row for each replay; capacity and hits in blocks", headers, rows)


def _load_table(outcomes: Sequence[Outcome]) -> str:
    headers = ["policy", "capacity", "requests at once", "blocks held", "waited", "mean wait"]
    rows = []
    for outcome in outcomes:
        load = outcome.load
        assert load is not None, "the caller has looked"
        rows.append(
            [
                outcome.policy,
                f"{outcome.capacity:,}",
                f"{load.peak_running_requests:,}",
                f"{load.peak_held_blocks:,}",
                f"{load.num_waited:,}",
                f"{load.mean_wait_seconds:.2f} s",
            ]
        )
    return table("The most at one time, and how long requests waited for room", headers, rows)
