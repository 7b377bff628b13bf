"""What `kvblocks simulate --waste` measured, as a page: bars of what memory held, and a table under them.

Knows shares and how to show them. Does not measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvblocks.report.charts import Bar, bar_chart
from kvblocks.report.page import Section, facts, figure, paragraph, render_page, table
from kvblocks.waste import STATES, Waste

_KINDS = [state.replace("_", "-") for state in STATES]


def waste_page(
    found: Mapping[str, Waste],
    pairs: Sequence[tuple[str, str]],
    about: str,
    rows: Sequence[Sequence[str]],
) -> str:
    """The report as one HTML file: `found` by who handed out memory.

    `pairs` are facts about requests and memory, `about` says what the shares mean, and `rows` are the
    table: its headers, and a row for each of `found`; names come first, then the states.
    """
    shares = bar_chart(
        [
            Bar(name, [100 * getattr(waste, state) for state in STATES])
            for name, waste in found.items()
        ],
        _KINDS,
        label="Shares of the memory in per cent.",
    )
    batches = bar_chart(
        [Bar(name, [waste.mean_batch]) for name, waste in found.items()],
        ["requests at once"],
        label="Requests that run at once, on average.",
        show="{:,.1f}".format,
    )
    # In one table they would be wider than a page.
    end = 1 + len(STATES)
    shared = [row[:end] for row in rows]
    counted = [[row[0], *row[end:]] for row in rows]
    held = figure(shares, "Each bar is all of the memory.")
    held += table("Shares in per cent of the memory", shared[0], shared[1:]) + paragraph(about)
    ran = figure(batches, "In the same memory, on average.")
    ran += table("Requests over all steps, and tokens that were copied", counted[0], counted[1:])
    sections = [
        Section("Overview", facts(pairs)),
        Section("What the memory held", held),
        Section("How many requests ran", ran),
    ]
    return render_page("How much of the memory holds tokens", pairs[0][1], sections)
