"""What must agree before a package is released: versions, file lists, metadata, licences, sizes.

Knows the tree as git tracks it and the two archives that were built from it; `[tool.release-check]` of
the root pyproject.toml states each package's bounds. Knows no network and no package index, and builds
nothing: `nox -s release-check` builds first, each wheel from its sdist, so that equal file lists show
that the sdist is complete, and lets twine render the descriptions as an index would.

    python tools/release_check.py [--root DIR] [--dist DIR] [--tag kvblocks-v0.1.0] [PACKAGE ...]

Exits with 0, with 1 and a line for every rule that is broken, or with 2 for wrong usage.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from packaging.metadata import Metadata

# What every package may be made of; a package's `data` in pyproject.toml comes to it.
_FILES = (
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "src/*.py",
    "src/*/py.typed",
    "tests/*.py",
)
# What hatchling adds to what a package's pyproject.toml names; the .gitignore is the root's.
_ADDED_TO_SDIST = {"PKG-INFO", "pyproject.toml", ".gitignore"}
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_HEADING = re.compile(r"^## (\S+)(?: \((.+)\))?$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Bounds:
    """What `[tool.release-check.PACKAGE]` states: patterns of file names, and a size in KiB."""

    data: tuple[str, ...]
    max_wheel_kib: int


class Package:
    """One package of the tree and where its archives lie."""

    def __init__(self, root: Path, name: str, dist: Path, bounds: Bounds) -> None:
        self.root = root
        self.name = name
        self.folder = root / "packages" / name
        self.dist = dist
        self.bounds = bounds

    @cached_property
    def version(self) -> str:
        """The version that `_version.py` states, or nothing."""
        found = _VERSION.search(self.text(f"src/{self.name}/_version.py"))
        return found.group(1) if found else ""

    @property
    def wheel(self) -> Path:
        """Where the wheel of this version lies."""
        return self.dist / f"{self.name}-{self.version}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        """Where the sdist of this version lies."""
        return self.dist / f"{self.name}-{self.version}.tar.gz"

    @cached_property
    def tracked(self) -> frozenset[str]:
        """The files that git tracks, relative to the package's folder."""
        return frozenset(
            git(self.root, "ls-files", "-z", f"{self.folder}/", sep="\0", cut=self.folder)
        )

    def text(self, path: str) -> str:
        """A file of the package's folder, or nothing if it is not there."""
        file = self.folder / path
        return file.read_text("utf-8") if file.is_file() else ""


def git(root: Path, *arguments: str, sep: str = "\n", cut: Path | None = None) -> list[str]:
    """Ask git; `cut` is a folder to which the answered paths are made relative."""
    command = ["git", "-C", str(root), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 -- git itself
    lines = [line for line in answer.split(sep) if line]
    if cut is None:
        return lines
    return [(root / line).relative_to(cut).as_posix() for line in lines]


def check_versions(package: Package, tag: str | None) -> Iterator[str]:
    """The tag, `_version.py`, the changelog's newest heading and both archives state one version."""
    version = package.version
    heading = _HEADING.search(package.text("CHANGELOG.md"))
    newest, when = heading.groups() if heading else (None, None)
    if newest != version:
        yield f"the newest heading of CHANGELOG.md must be {version}, got {newest}"
    for archive in sorted(package.dist.glob(f"{package.name}-*")):
        if archive not in {package.wheel, package.sdist}:
            yield f"dist must hold the archives of {version} alone, got {archive.name}"
    here = git(package.root, "tag", "--points-at", "HEAD", "--list", f"{package.name}-v*")
    for found in dict.fromkeys([*here, *([tag] if tag else [])]):
        if found != f"{package.name}-v{version}":
            yield f"the tag must be {package.name}-v{version}, got {found}"
        if not (when and _DATE.fullmatch(when)):
            yield f"a tagged version has its date in CHANGELOG.md, as (2026-01-31), got ({when})"
    released = git(package.root, "tag", "--list", f"{package.name}-v{version}")
    if released and not here:
        command = ("diff", "--name-only", released[0], "--", str(package.folder))
        changed = git(package.root, *command)
        if changed:
            yield f"{released[0]} is out, and {changed[0]} has changed since: state the next version"


def check_files(package: Package) -> Iterator[str]:
    """Both archives hold what git tracks and nothing else, under names that are expected."""
    for path in sorted(package.tracked):
        if not any(fnmatch(path, pattern) for pattern in (*_FILES, *package.bounds.data)):
            yield f"{path} is neither source nor test nor among the package's data"
    source = {path for path in package.tracked if path.startswith("src/")}
    with zipfile.ZipFile(package.wheel) as wheel:
        names = set(wheel.namelist())
    info = f"{package.name}-{package.version}.dist-info"
    scripts = "[project.scripts]" in package.text("pyproject.toml")
    expected = {path.removeprefix("src/") for path in source}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    expected |= {f"{info}/entry_points.txt"} if scripts else set()
    yield from _differences("the wheel", names, expected)
    with tarfile.open(package.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    yield from _differences("the sdist", names, package.tracked | _ADDED_TO_SDIST)


def _differences(what: str, names: set[str], expected: set[str] | frozenset[str]) -> Iterator[str]:
    for name in sorted(names - expected):
        yield f"{what} must hold only what git tracks, got {name}"
    for name in sorted(expected - names):
        yield f"{what} must hold {name}"


def check_metadata(package: Package) -> Iterator[str]:
    """The metadata is valid, says what the tree says, and its description is the README."""
    with zipfile.ZipFile(package.wheel) as wheel:
        text = wheel.read(f"{package.name}-{package.version}.dist-info/METADATA")
    try:
        metadata = Metadata.from_email(text)
    except ExceptionGroup as group:  # one error a field
        yield from (f"METADATA is not valid: {error}" for error in group.exceptions)
        return
    found = (metadata.name, str(metadata.version), metadata.license_expression)
    expected = (package.name, package.version, "Apache-2.0")
    if found != expected:
        yield f"METADATA must state {expected}, got {found}"
    description = (metadata.description or "").strip()
    if description != package.text("README.md").strip():
        yield "the description must be the package's README.md"
    if metadata.description_content_type != "text/markdown":
        yield f"the description must be Markdown, got {metadata.description_content_type}"


def check_licence(package: Package) -> Iterator[str]:
    """The package carries the repository's licence; that archives do is a matter of their files."""
    if package.text("LICENSE") != (package.root / "LICENSE").read_text("utf-8"):
        yield "LICENSE must be that of the repository"


def check_size(package: Package) -> Iterator[str]:
    """The wheel is not larger than the tree's configuration allows."""
    kib = package.wheel.stat().st_size / 1024
    if kib > package.bounds.max_wheel_kib:
        yield f"the wheel must have at most {package.bounds.max_wheel_kib} KiB, got {kib:.0f}"


def complaints(package: Package, tag: str | None = None) -> list[str]:
    """Every rule that is broken, as a sentence; none if the package may be released."""
    found = list(check_versions(package, tag))
    missing = [path.name for path in (package.wheel, package.sdist) if not path.is_file()]
    if missing:
        return [*found, f"not built: {', '.join(missing)}"]
    for check in (check_files, check_metadata, check_licence, check_size):
        found += check(package)
    return found


def load(root: Path, dist: Path) -> dict[str, Package]:
    """The packages of a tree by name, as `[tool.release-check]` lists them."""
    tables = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["release-check"]
    packages = {}
    for name, table in tables.items():
        bounds = Bounds(tuple(table["data"]), table["max-wheel-kib"])
        packages[name] = Package(root, name, dist, bounds)
    return packages


def main(arguments: list[str] | None = None) -> int:
    """Check the packages that were named, or all; a tag names its own package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="all, when none is named")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--dist", type=Path, help="where the archives lie  [default: ROOT/dist]")
    parser.add_argument("--tag", help="the tag to release under, as kvblocks-v0.1.0")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    packages = load(root, (options.dist or root / "dist").resolve())
    wanted = options.packages or list(packages)
    if options.tag:
        wanted = options.packages or [options.tag.rpartition("-v")[0]]
    unknown = set(wanted) - set(packages)
    if unknown:
        parser.error(f"no package {', '.join(sorted(unknown))}; there are {', '.join(packages)}")
    broken = 0
    for name in wanted:
        package = packages[name]
        found = complaints(package, options.tag)
        broken += len(found)
        for complaint in found:
            print(f"{name}: {complaint}", file=sys.stderr)
        if not found:
            kib = package.wheel.stat().st_size / 1024
            print(
                f"{name} {package.version}: wheel of {kib:.0f} KiB, {len(package.tracked)} files, in order"
            )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
