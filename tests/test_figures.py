"""The figures on the pages are those of benchmarks/results, and each result names its command."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import figures

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
    assert "`python -m benchmarks.engine" in page.read_text("utf-8")
    assert figures.main(["--check"]) == 0
