"""The shell of a report: one HTML file that needs nothing else.

Style and script are written into it, colours follow the reader's choice of light and dark, and paper is
always light. An element with `data-tip` shows that text under a pointer and on focus; a chart shows the
values at the place nearest to a pointer, or steps through them with the arrow keys (see `page.js`).

Knows HTML, and what is common to all reports. Does not know charts or figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

NUM_COLOURS = 8  # classes c0, c1, ...: each sets `--c`, in light and in dark


class Section(NamedTuple):
    """A heading, and HTML below it."""

    heading: str
    body: str


def render_page(
    title: str, lead: str, sections: Sequence[Section], scripts: Sequence[str] = ()
) -> str:
    """A whole HTML file. `lead` is text; a section's body is HTML, of the functions here or one's own.

    `scripts` names files beside this one, for what only such a report can do.

    >>> page = render_page("A < B", "Why.", [Section("Figures", paragraph("None."))])
    >>> page.startswith("<!doctype html>"), "<title>A &lt; B</title>" in page
    (True, True)
    """
    body = "\n".join(
        f"<section>\n<h2>{escape(section.heading)}</h2>\n{section.body}\n</section>"
        for section in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{_part("page.css")}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<button type="button" id="theme" hidden>Light or dark</button>
<p class="lead">{escape(lead)}</p>
</header>
{body}
</main>
<div id="tip" role="status" hidden></div>
<script>
{"".join(map(_part, ("page.js", *scripts)))}</script>
</body>
</html>
"""


def paragraph(text: str) -> str:
    """A paragraph of text.

    >>> paragraph("a < b")
    '<p>a &lt; b</p>'
    """
    return f"<p>{escape(text)}</p>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, side by side."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs
    )
    return f'<dl class="facts">{items}</dl>'


def table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; the first cell of a row is its heading.

    >>> "lru</th><td>21 %</td>" in table("Hits", ["policy", "hits"], [["lru", "21 %"]])
    True
    """
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    # Focusable, so that a table wider than the window can be scrolled with keys.
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def figure(drawing: str, caption: str) -> str:
    """A drawing, as of `kvblocks.report.charts`, and what it shows in words."""
    return f"<figure>\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
