"""The figures on the pages are those of benchmarks/results, and each result names its command."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import figures
from benchmarks.memory.__main__ import ask
from benchmarks.memory.sharing import measure

PAGES = [page for page in figures.pages() if "<!-- figures: " in page.read_text("utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(figures.ROOT)))
def test_a_page_has_the_figures_of_the_results(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == figures.written(text), "nox -s figures writes them"


def test_every_mark_is_closed() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        marks = re.findall(r"<!-- (figures: |/figures)", text)
        assert marks == ["figures: ", "/figures"] * (len(marks) // 2), page


def test_every_figure_is_on_a_page() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"<!-- figures: (\S+)", page.read_text())
    }
    assert named == set(figures.FIGURES)


@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_how_it_was_made(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert found["command"].startswith(("nox -s bench -- ", "python -m benchmarks."))
    assert re.match(r"\d{4}-\d\d-\d\d", found["date"])


def test_check_says_which_page_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: engine/command -->?<!-- /figures -->\n", "utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "pages", lambda: [page])
    assert figures.main(["--check"]) == 1
    assert capsys.readouterr().out == "page.md\n"
    assert figures.main([]) == 0
    assert "`nox -s bench -- engine" in page.read_text("utf-8")
    assert figures.main(["--check"]) == 0


@pytest.mark.parametrize("name", ["waste with blocks of 16", "waste with blocks of 128"])
def test_a_command_still_answers_what_the_results_have(name: str) -> None:
    kept = figures.result("memory")["commands"][name]
    assert ask(kept["command"].split()[1:]) == kept["answer"]


def test_sharing_is_still_what_the_results_have() -> None:
    for row in figures.result("memory")["sharing"]:
        if row["load"] == "Alpaca-like" and row["width"] == 2:
            found = measure(row["load"], row["method"], row["width"])
            assert found.saved == pytest.approx(row["saved"], abs=1e-12)


def test_what_the_paper_shows_is_shown_again() -> None:
    memory = figures.result("memory")
    shares = [row["tokens"] for row in memory["commands"]["waste of sharegpt-like"]["answer"]]
    assert shares == sorted(shares)
    for load in ("ShareGPT-like", "Alpaca-like"):
        saved = [row["saved"] for row in memory["sharing"] if row["load"] == load]
        assert saved[:3] == sorted(saved[:3])
        assert saved[3:] == sorted(saved[3:])
        assert all(beams > samples for samples, beams in zip(saved[:3], saved[3:], strict=True))


@pytest.mark.parametrize("name", ["allocator", "block-size"])
def test_a_picture_was_drawn_from_the_results_that_are_there(name: str) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    assert set(plots.PLOTS) == {"allocator", "block-size"}
    _, results = plots.PLOTS[name]
    image = (plots.IMAGES / f"{name}.svg").read_text("utf-8")
    assert plots.digest(*results) in image, "nox -s plots draws it"


def test_every_picture_can_be_drawn() -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    for draw, _ in plots.PLOTS.values():
        assert draw().axes
