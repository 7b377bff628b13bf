"""Reports in HTML: what stands in them, and what a browser makes of them."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from kvblocks.baselines import make_baseline
from kvblocks.report.charts import Bar, Guide, Series, bar_chart, line_chart, linear_ticks
from kvblocks.report.page import Section, figure, paragraph, render_page, table
from kvblocks.report.simulation import simulation_page
from kvblocks.report.waste import waste_page
from kvblocks.simulate import Service, Simulation
from kvblocks.traces import MalformedRow, Request, Trace
from kvblocks.waste import STATES, measure_waste, sharegpt_like

from .naive_cache import trace_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
VOID = {"meta", "br", "link", "input"}


class Elements(HTMLParser):
    """Counts elements, and notes the first end tag that closes something else."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.wrong = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if self.open.pop() != tag:
            self.wrong = self.wrong or tag


def replays() -> Simulation:
    return Simulation(trace_of(["abc", "abd", "abc", "xyz", "abd"], 4), measure_last=0.8)


def example(name: str = "a trace") -> str:
    simulation = replays()
    outcomes = [simulation.index(policy, size) for policy in ("lru", "fifo") for size in (2, 4)]
    return simulation_page(name, simulation, [*outcomes, simulation.engine("lru", 4)])


def waste_example() -> str:
    memory = make_baseline("pow2", 4096, max_length=512)
    found = {"pow2": measure_waste(memory, sharegpt_like(0, 512), max_steps=100)}
    row = ["baseline", *STATES, "at once"]
    return waste_page(found, [("requests", "some")], "about", [row, ["pow2", *"1234567"]])


def chart(label: str = "Hits.") -> str:
    lines = [Series("one", [(1, 2), (10, 4)]), Series("two", [(10, 3)], is_marked=False)]
    return line_chart(
        lines, label=label, x_label="blocks", y_label="%", guides=[Guide("most", 5.0)]
    )


@pytest.mark.parametrize("page", [example, waste_example])
def test_every_element_is_closed(page: Callable[[], str]) -> None:
    found = Elements(page())
    assert (found.wrong, found.open) == ("", [])


def test_a_report_needs_no_network() -> None:
    page = example()
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(", page, re.IGNORECASE)
    assert not {"src", "href"} & {name for found in Elements(page).attributes for name in found}


def test_text_of_others_is_shown_and_not_obeyed() -> None:
    evil = "<script>alert('1\")</script>&"
    page = render_page(
        evil,
        evil,
        [
            Section(evil, paragraph(evil) + table(evil, [evil], [[evil]])),
            Section(
                "drawn", figure(chart(evil), evil) + bar_chart([Bar(evil, [1])], [evil], label=evil)
            ),
        ],
    )
    assert evil not in page
    assert Elements(page).tags.count("script") == 1
    assert Elements(page).open == []


def test_each_stop_of_a_chart_names_all_values_at_its_place() -> None:
    (stops,) = [a["data-stops"] for a in Elements(chart()).attributes if "data-stops" in a]
    assert stops is not None
    assert [stop["text"] for stop in json.loads(stops)] == [
        "1 blocks\none: 2.0",
        "10 blocks\none: 4.0\ntwo: 3.0",
    ]


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    lines = [Series(str(index), [(1, 1), (2, 5)]) for index in range(6)]
    drawn = line_chart(lines, label="", x_label="", y_label="")
    heights = sorted(float(y) for y in re.findall(r'class="name [^>]* y="([\d.]+)"', drawn))
    assert len(heights) == 6
    assert min(below - above for above, below in pairwise(heights)) >= 17


def test_a_bar_without_a_part_draws_none() -> None:
    drawn = bar_chart([Bar("a", [3, 0]), Bar("b", [1, 2])], ["held", "lost"], label="Waste.")
    assert drawn.count("<rect") == 3
    assert 'data-tip="b\nlost: 2.0 %"' in drawn


def test_bars_of_nothing_are_drawn() -> None:
    assert "<rect" not in bar_chart([Bar("a", [0])], ["held"], label="Waste.")


@pytest.mark.parametrize("largest", [0.003, 0.9, 1, 1.01, 7, 12.6, 39.8, 99, 100, 12_345])
def test_ticks_reach_the_largest_value_in_four_to_seven_steps(largest: float) -> None:
    ticks = linear_ticks(largest)
    assert ticks[-2] < largest <= ticks[-1]
    assert 4 <= len(ticks) <= 7


def test_the_report_shows_every_figure_with_its_semantics() -> None:
    page = example()
    assert "lru (engine)" in page
    assert "fifo (index)" in page
    assert "The first 1 requests only fill the cache" in page


def test_the_report_says_what_was_left_out_or_not_served_or_waited() -> None:
    requests = tuple(Request(second, 3, 2, "abc") for second in (0.0, 0.1))
    trace = Trace("mooncake", 1, requests, (MalformedRow("line 1", "why"),), ("odd lengths",))
    simulation = Simulation(trace)
    outcomes = [simulation.engine("lru", size, service=Service(1, 1)) for size in (2, 4)]
    page = simulation_page("a trace", simulation, outcomes)
    for text in ("malformed rows left out", "odd lengths", "not served", "mean wait"):
        assert text in page


def test_a_trace_of_lengths_has_no_curve() -> None:
    simulation = Simulation(Trace("azure", None, (Request(0.0, 20, 2),)))
    page = simulation_page("lengths", simulation, [simulation.engine("lru", 9)])
    assert "<svg" not in page
    assert "All figures" in page


def browse(tmp_path: Path, page: str, script: str, *options: str) -> str:
    """What a browser makes of a page after a script of ours."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


KEYS = """
const svg = document.querySelector("svg[data-stops]");
const note = (name) => document.body.setAttribute(name, document.getElementById("tip").textContent);
const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
svg.focus(); press("Home"); press("ArrowRight"); press("ArrowLeft"); note("data-first");
press("End"); note("data-last");
document.body.dataset.shown = !document.getElementById("tip").hidden;
press("Escape"); document.body.dataset.gone = document.getElementById("tip").hidden;
const colour = () => getComputedStyle(document.body).backgroundColor;
const before = colour(); document.getElementById("theme").click();
document.body.dataset.changed = before !== colour();
document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth;
"""


@needs_chromium
@pytest.mark.parametrize("width", [400, 1000])
def test_a_browser_shows_values_by_keys_and_changes_its_colours(tmp_path: Path, width: int) -> None:
    page = browse(tmp_path, example(), KEYS, f"--window-size={width},800")
    body = next(a for a in Elements(page).attributes if "data-gone" in a)
    lru, fifo = (100 * replays().index(policy, 2).hit_rate for policy in ("lru", "fifo"))
    assert body["data-first"] == f"2 blocks\nlru, index: {lru:.2f} %\nfifo, index: {fifo:.2f} %"
    assert str(body["data-last"]).startswith("7 blocks\nlru, index: ")
    assert (body["data-shown"], body["data-gone"], body["data-changed"]) == ("true",) * 3
    assert body["data-fits"] == "true"


@needs_chromium
@pytest.mark.parametrize("page", [example, waste_example])
def test_a_browser_draws_and_prints_the_report(page: Callable[[], str], tmp_path: Path) -> None:
    browse(tmp_path, page(), "", f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    browse(tmp_path, page(), "", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_a_part_that_is_too_narrow_for_its_size_shows_it_on_focus_alone() -> None:
    drawn = bar_chart([Bar("a", [1000, 1])], ["held", "lost"], label="Waste.")
    assert drawn.count('text-anchor="middle"') == 1
