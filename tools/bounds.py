"""The lowest versions that the packages' metadata declares: of libraries, and of each other.

Knows packages/*/pyproject.toml, constraints.txt and the tags of git. Knows no package index: pip says
whether a version can be had.

    python tools/bounds.py constraints PACKAGE ... > FILE     # library==lowest, for pip install -c
    python tools/bounds.py siblings PACKAGE --into DIR        # their sources, out of their tags

A version of a sibling that has no tag cannot be unpacked. That is well while it is the tree's own
version, which was not released yet, and a mistake (exit code 1) otherwise.
"""

import argparse
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
# Extras that no machine of the tests can use.
_LEFT_OUT = {"cuda12", "cuda13"}


def siblings(root: Path) -> list[str]:
    """The packages of a tree."""
    return sorted(path.parent.name for path in (root / "packages").glob("*/pyproject.toml"))


def requirements(root: Path, package: str) -> Iterator[Requirement]:
    """What a package asks for, its extras included."""
    path = root / "packages" / package / "pyproject.toml"
    project = tomllib.loads(path.read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    for name, texts in [("", project["dependencies"]), *extras.items()]:
        if name not in _LEFT_OUT:
            yield from map(Requirement, texts)


def lowest(requirement: Requirement) -> str:
    """The lowest version that a requirement allows."""
    bounds = [part.version for part in requirement.specifier if part.operator in {">=", "~=", "=="}]
    if not bounds:
        raise ValueError(f"a dependency must have a lowest version, got {requirement}")
    return max(bounds, key=Version)


def constraints(root: Path, packages: list[str]) -> Iterator[str]:
    """A line for each library: the highest of the lowest versions that the packages ask for.

    Libraries of `[tool.bounds] pinned` stay at the version of constraints.txt.
    """
    pinned = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["bounds"]["pinned"]
    versions: dict[str, str] = {}
    for package in packages:
        for requirement in requirements(root, package):
            if requirement.name not in siblings(root):
                found = [lowest(requirement), versions.get(requirement.name, "0")]
                versions[requirement.name] = max(found, key=Version)
    texts = (root / "constraints.txt").read_text("utf-8")
    for name, version in sorted(versions.items()):
        if name in pinned:
            [pin] = re.findall(rf"^{name}==(.+)$", texts, re.MULTILINE)
            yield f"# {name} {version} is not tried, but {pin}: {pinned[name]}"
            yield f"{name}=={pin}"
        else:
            yield f"{name}=={version}"


def unpack_siblings(root: Path, package: str, into: Path) -> bool:
    """Unpack the oldest sibling versions that a package declares; False if one can never be had."""
    is_well = True
    for requirement in requirements(root, package):
        name = requirement.name
        if name not in siblings(root):
            continue
        version = lowest(requirement)
        tag = f"{name}-v{version}"
        git = ("git", "-C", str(root))
        tags = subprocess.run([*git, "tag", "--list", tag], capture_output=True, check=True).stdout  # noqa: S603 -- git itself
        if tags:
            archive = [*git, "archive", "--format=zip", tag, f"packages/{name}"]
            data = subprocess.run(archive, capture_output=True, check=True).stdout  # noqa: S603 -- git itself
            with zipfile.ZipFile(io.BytesIO(data)) as archived:
                archived.extractall(into)
            print(f"{name} {version}: from the tag {tag}")
            continue
        text = (root / "packages" / name / "src" / name / "_version.py").read_text("utf-8")
        if f'"{version}"' in text:
            print(f"{name} {version}: not released yet, it is the tree's own version")
        else:
            print(
                f"{package} asks for {name} {version}, but there is no tag {tag}", file=sys.stderr
            )
            is_well = False
    return is_well


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("constraints", help="print a constraints file for pip")
    command.add_argument("packages", nargs="+", metavar="PACKAGE", choices=siblings(ROOT))
    command = commands.add_parser("siblings", help="unpack the oldest siblings out of their tags")
    command.add_argument("package", metavar="PACKAGE", choices=siblings(ROOT))
    command.add_argument("--into", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.command == "constraints":
        print("\n".join(constraints(ROOT, options.packages)))
        return 0
    return 0 if unpack_siblings(ROOT, options.package, options.into) else 1


if __name__ == "__main__":
    sys.exit(main())
