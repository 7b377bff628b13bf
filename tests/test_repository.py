"""What holds for the repository as a whole: versions, imports and names that agree."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each package may import besides the standard library and itself.
MAY_IMPORT = {
    "kvblocks": set(),
    "kvkernels": {"cupy", "llvmlite", "numba", "numpy"},
    "kvruntime": {
        "gguf",
        "httpx",
        "jinja2",
        "kvblocks",
        "kvkernels",
        "llguidance",
        "matplotlib",
        "numpy",
        "platformdirs",
        "prometheus_client",
        "pydantic",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "typer",
        "uvicorn",
    },
}
# Distributions under another name than what is imported from them; nothing is from a bare library.
MODULES = {
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "nvidia-cuda-nvrtc": None,
    "nvidia-cuda-nvrtc-cu12": None,
    "prometheus-client": "prometheus_client",
}
packages = pytest.mark.parametrize("package", sorted(MAY_IMPORT))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def imports(path: Path) -> set[tuple[str, str | None]]:
    """Every (module, name) that a file imports."""
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return found


@packages
def test_version_is_the_newest_of_the_changelog(package: str) -> None:
    folder = ROOT / "packages" / package
    headings = re.findall(r"^## (\S+)", (folder / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == importlib.import_module(package).__version__


@packages
def test_imports_go_one_way(package: str) -> None:
    for path in modules(package):
        roots = {module.partition(".")[0] for module, _ in imports(path)}
        foreign = roots - sys.stdlib_module_names - {package}
        assert foreign <= MAY_IMPORT[package], path


@packages
def test_siblings_are_used_by_their_public_names(package: str) -> None:
    for path in modules(package):
        for module, name in imports(path):
            root = module.partition(".")[0]
            if root in MAY_IMPORT and root != package:
                assert module == root, path
                assert name in importlib.import_module(root).__all__, path


@packages
def test_dependencies_are_those_imported(package: str) -> None:
    path = ROOT / "packages" / package / "pyproject.toml"
    project = tomllib.loads(path.read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    declared = [*project["dependencies"], *chain.from_iterable(extras)]
    distributions = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    names = {MODULES.get(name, name) for name in distributions} - {None}
    imported = {
        module.partition(".")[0] for path in modules(package) for module, _ in imports(path)
    }
    assert names >= imported & MAY_IMPORT[package]


@packages
def test_all_names_what_is_public(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)  # kvruntime imports what is asked for
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "TYPE_CHECKING"
    }
    assert set(module.__all__) == public | {"__version__"}


@packages
def test_every_module_says_what_it_knows(package: str) -> None:
    for path in modules(package):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path
