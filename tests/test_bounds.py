"""The lowest versions that are declared, read from a small tree and from this one."""

import subprocess
from pathlib import Path

import bounds
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two packages: `upper` asks for `lower` from 1.1 on; both ask for numpy."""
    projects = {
        "lower": ('"numpy>=2.1"', "1.2.0"),
        "upper": ('"lower~=1.1.0", "numpy>=1.26,<3", "torch>=2.6"', "0.3.0"),
    }
    for name, (dependencies, version) in projects.items():
        source = tmp_path / "packages" / name / "src" / name
        source.mkdir(parents=True)
        (source / "_version.py").write_text(f'__version__ = "{version}"\n', "utf-8")
        (tmp_path / "packages" / name / "pyproject.toml").write_text(
            f"[project]\ndependencies = [{dependencies}]\n"
            '[project.optional-dependencies]\nserve = ["uvicorn>=0.35"]\ncuda12 = ["cupy>=14"]\n',
            "utf-8",
        )
    (tmp_path / "pyproject.toml").write_text('[tool.bounds.pinned]\ntorch = "why"\n', "utf-8")
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n", "utf-8")
    git(tmp_path, "init", "-q")
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(tree), *name, *arguments], check=True)  # noqa: S607 -- git


def release(tree: Path, tag: str) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "-q", "-m", "A release")
    git(tree, "tag", tag)


def test_the_lowest_version_is_that_of_the_specifier() -> None:
    assert bounds.lowest(Requirement("a>=1.2,<3")) == "1.2"
    assert bounds.lowest(Requirement("a~=1.2.3")) == "1.2.3"


def test_a_dependency_without_a_lowest_version_is_refused() -> None:
    with pytest.raises(ValueError, match="a dependency must have a lowest version, got a<3"):
        bounds.lowest(Requirement("a<3"))


def test_what_several_ask_for_is_tried_at_the_highest_of_their_lowest(tree: Path) -> None:
    lines = list(bounds.constraints(tree, ["lower", "upper"]))
    assert lines == [
        "numpy==2.1",
        "# torch 2.6 is not tried, but 2.13.0: why",
        "torch==2.13.0",
        "uvicorn==0.35",
    ]


def test_the_oldest_sibling_comes_from_its_tag(tree: Path, tmp_path: Path) -> None:
    release(tree, "lower-v1.1.0")
    assert bounds.unpack_siblings(tree, "upper", tmp_path / "out")
    assert (tmp_path / "out/packages/lower/src/lower/_version.py").is_file()
    assert not (tmp_path / "out/packages/upper").exists()


def test_a_sibling_that_was_never_released_is_a_mistake(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not bounds.unpack_siblings(tree, "upper", tmp_path / "out")
    assert "upper asks for lower 1.1.0, but there is no tag lower-v1.1.0" in capsys.readouterr().err


def test_a_sibling_before_its_first_release_is_the_trees_own(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = tree / "packages/lower/src/lower/_version.py"
    version.write_text('__version__ = "1.1.0"\n', "utf-8")
    assert bounds.unpack_siblings(tree, "upper", tmp_path / "out")
    assert "not released yet" in capsys.readouterr().out


def test_every_dependency_of_the_packages_has_a_lowest_version() -> None:
    assert list(bounds.constraints(ROOT, bounds.siblings(ROOT)))
