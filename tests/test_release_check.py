"""Each rule of `nox -s release-check`, broken in a small tree of its own."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import release_check
from hatchling import build

ROOT = Path(__file__).parent.parent
FILES = {
    "LICENSE": "As is.\n",
    ".gitignore": "dist/\n*.py[co]\n",
    "pyproject.toml": """
        [tool.release-check.tiny]
        data = ["src/tiny/*.css"]
        max-wheel-kib = 8
    """,
    "packages/tiny/pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [project]
        name = "tiny"
        readme = "README.md"
        license = "Apache-2.0"
        requires-python = ">=3.11"
        dynamic = ["version"]
        [project.scripts]
        tiny = "tiny:main"
        [tool.hatch.version]
        path = "src/tiny/_version.py"
        [tool.hatch.build.targets.sdist]
        include = ["src", "tests", "README.md", "CHANGELOG.md", "LICENSE"]
    """,
    "packages/tiny/LICENSE": "As is.\n",
    "packages/tiny/README.md": "# tiny\n",
    "packages/tiny/CHANGELOG.md": "# Changelog\n\n## 1.2.0 (unreleased)\n\n## 1.1.0 (2026-01-31)\n",
    "packages/tiny/src/tiny/__init__.py": "",
    "packages/tiny/src/tiny/_version.py": '__version__ = "1.2.0"\n',
    "packages/tiny/src/tiny/page.css": "p { margin: 0 }\n",
    "packages/tiny/src/tiny/py.typed": "",
    "packages/tiny/tests/test_tiny.py": "",
}


class Tree:
    """A repository with one package, and what the check says of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "packages" / "tiny"

    def git(self, *arguments: str) -> None:
        name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", "-C", str(self.root), *name, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--allow-empty", "-m", "A change")

    def build(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.package)
            build.build_sdist(str(self.root / "dist"))
            build.build_wheel(str(self.root / "dist"))

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.package / path
        text = file.read_text("utf-8")
        assert old in text
        file.write_text(text.replace(old, new), "utf-8")

    def complaints(self, tag: str | None = None) -> list[str]:
        packages = release_check.load(self.root, self.root / "dist")
        return release_check.complaints(packages["tiny"], tag)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = Tree(tmp_path_factory.mktemp("release") / "tree")
    for name, text in FILES.items():
        file = tree.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.strip() for line in text.splitlines()) + "\n", "utf-8")
    tree.git("init", "-q")
    tree.commit()
    tree.build()
    return tree.root


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Tree:
    return Tree(shutil.copytree(pristine, tmp_path / "tree"))


def test_a_tree_in_order_has_no_complaints(tree: Tree) -> None:
    assert tree.complaints() == []


def test_the_newest_heading_of_the_changelog_is_the_version(tree: Tree) -> None:
    tree.edit("CHANGELOG.md", "## 1.2.0 (unreleased)\n", "")
    assert tree.complaints() == ["the newest heading of CHANGELOG.md must be 1.2.0, got 1.1.0"]


def test_the_archives_are_those_of_the_version(tree: Tree) -> None:
    tree.edit("src/tiny/_version.py", "1.2.0", "1.3.0")
    tree.edit("CHANGELOG.md", "1.2.0", "1.3.0")
    assert tree.complaints() == [
        "dist must hold the archives of 1.3.0 alone, got tiny-1.2.0-py3-none-any.whl",
        "dist must hold the archives of 1.3.0 alone, got tiny-1.2.0.tar.gz",
        "not built: tiny-1.3.0-py3-none-any.whl, tiny-1.3.0.tar.gz",
    ]


def test_a_tag_is_that_of_the_version(tree: Tree) -> None:
    tree.edit("CHANGELOG.md", "unreleased", "2026-11-30")
    tree.build()
    tree.commit()
    tree.git("tag", "tiny-v1.2.1")
    assert tree.complaints() == ["the tag must be tiny-v1.2.0, got tiny-v1.2.1"]
    assert tree.complaints("v1.2.0")[-1] == "the tag must be tiny-v1.2.0, got v1.2.0"


def test_a_tagged_version_has_a_date(tree: Tree) -> None:
    assert tree.complaints("tiny-v1.2.0") == [
        "a tagged version has its date in CHANGELOG.md, as (2026-01-31), got (unreleased)"
    ]


def test_what_is_out_does_not_change(tree: Tree) -> None:
    tree.git("tag", "tiny-v1.2.0")
    (tree.package / "src/tiny/__init__.py").write_text("x = 1\n", "utf-8")
    tree.build()
    tree.commit()
    changed = "packages/tiny/src/tiny/__init__.py"
    assert tree.complaints() == [
        f"tiny-v1.2.0 is out, and {changed} has changed since: state the next version"
    ]


def test_tags_of_other_packages_say_nothing(tree: Tree) -> None:
    tree.git("tag", "other-v9.0.0")
    assert tree.complaints() == []


@pytest.mark.parametrize("name", ["src/tiny/notes.py", "tests/notes.py"])
def test_a_file_that_git_does_not_track_is_in_no_archive(tree: Tree, name: str) -> None:
    (tree.package / name).write_text("", "utf-8")
    tree.build()
    found = {complaint.rpartition(" ")[2] for complaint in tree.complaints()}
    assert found == ({name.removeprefix("src/"), name} if name.startswith("src/") else {name})


def test_a_file_of_no_expected_kind_is_noticed(tree: Tree) -> None:
    (tree.package / "src/tiny/_version.py.orig").write_text("", "utf-8")
    tree.build()
    tree.commit()
    assert tree.complaints() == [
        "src/tiny/_version.py.orig is neither source nor test nor among the package's data"
    ]


def test_archives_lack_nothing(tree: Tree) -> None:
    (tree.package / "src/tiny/page.css").unlink()
    tree.build()
    assert tree.complaints() == [
        "the wheel must hold tiny/page.css",
        "the sdist must hold src/tiny/page.css",
    ]


def test_the_description_is_the_readme(tree: Tree) -> None:
    tree.edit("README.md", "# tiny", "# Tiny")
    assert tree.complaints() == ["the description must be the package's README.md"]


def test_the_description_is_markdown(tree: Tree) -> None:
    (tree.package / "README.md").rename(tree.package / "README.txt")
    tree.edit("pyproject.toml", "README.md", "README.txt")
    (tree.package / "README.md").write_text("# tiny\n", "utf-8")
    tree.build()
    assert "the description must be Markdown, got text/plain" in tree.complaints()


def test_metadata_is_valid(tree: Tree) -> None:
    wheel = tree.root / "dist" / "tiny-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as old:
        files = {name: old.read(name) for name in old.namelist()}
    files["tiny-1.2.0.dist-info/METADATA"] = b"Metadata-Version: 2.4\nName: tiny\n"
    with zipfile.ZipFile(wheel, "w") as new:
        for name, data in files.items():
            new.writestr(name, data)
    assert tree.complaints() == ["METADATA is not valid: 'version' is a required field"]


def test_the_licence_is_named(tree: Tree) -> None:
    tree.edit("pyproject.toml", "Apache-2.0", "MIT")
    tree.build()
    assert tree.complaints() == [
        "METADATA must state ('tiny', '1.2.0', 'Apache-2.0'), got ('tiny', '1.2.0', 'MIT')"
    ]


def test_the_licence_is_that_of_the_repository(tree: Tree) -> None:
    (tree.root / "LICENSE").write_text("With warranty.\n", "utf-8")
    assert tree.complaints() == ["LICENSE must be that of the repository"]


def test_a_package_without_a_licence_is_noticed(tree: Tree) -> None:
    (tree.package / "LICENSE").unlink()
    tree.build()
    tree.commit()
    assert tree.complaints() == [
        "the wheel must hold tiny-1.2.0.dist-info/licenses/LICENSE",
        "LICENSE must be that of the repository",
    ]


def test_a_wheel_is_no_larger_than_allowed(tree: Tree) -> None:
    # Bytes that do not shrink, under a name that the package may hold.
    (tree.package / "src/tiny/page.css").write_text(
        "".join(f"{i * i * i:x}" for i in range(9000)), "utf-8"
    )
    tree.build()
    [complaint] = tree.complaints()
    assert complaint.startswith("the wheel must have at most 8 KiB, got ")


def test_every_package_of_the_repository_is_checked() -> None:
    names = {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")}
    assert set(release_check.load(ROOT, ROOT / "dist")) == names


def test_a_tag_names_its_own_package(
    tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ["--root", str(tree.root)]
    assert release_check.main([*root, "--tag", "tiny-v1.2.1"]) == 1
    assert "tiny: the tag must be tiny-v1.2.0, got tiny-v1.2.1" in capsys.readouterr().err
    assert release_check.main(root) == 0
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        release_check.main([*root, "--tag", "huge-v1.2.1"])
    assert stop.value.code == 2
    assert "no package huge; there are tiny" in capsys.readouterr().err
