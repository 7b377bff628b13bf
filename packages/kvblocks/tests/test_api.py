"""The public surface: names, imports, types, documentation, version."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvblocks

SOURCE = Path(kvblocks.__file__).parent
PACKAGE = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)
# What few need is imported when it is needed: importing the package must stay quick.
LAZY = {
    "__init__",
    "__main__",
    "baselines",
    "block_map",
    "cli",
    "config_fields",
    "contiguous",
    "facades",
    "files",
    "layer_kinds",
    "model_config",
    "planning",
    "readings",
    "recording",
    "replay",
    "report",
    "simulate",
    "sizing",
    "snapshots",
    "traces",
    "units",
    "waste",
}


def test_all_is_sorted_and_is_what_exists() -> None:
    public = {
        name
        for name, value in vars(kvblocks).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert kvblocks.__all__ == sorted(public | {"__version__"})


def test_importing_the_package_does_not_import_what_few_need() -> None:
    code = "import sys, kvblocks; print(*(name for name in sys.modules if 'kvblocks.' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.removeprefix("kvblocks.") for name in done.stdout.split()}
    assert imported == {name.partition(".")[0] for name in MODULES} - LAZY


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    name = "kvblocks" if module == "__init__" else f"kvblocks.{module}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_of_the_readme_are_true() -> None:
    readme = (PACKAGE / "README.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert examples
    runner = doctest.DocTestRunner()
    for number, text in enumerate(examples):
        example = doctest.DocTestParser().get_doctest(text, {}, f"README {number}", None, None)
        assert example.examples
        assert runner.run(example).failed == 0


@pytest.mark.parametrize("page", ["facades.md"])
def test_the_examples_of_the_docs_are_true(page: str) -> None:
    docs = Path(__file__).parents[3] / "docs"
    if not docs.exists():
        pytest.skip("the package was taken out of its repository")
    done = doctest.testfile(str(docs / page), module_relative=False)
    assert done.attempted
    assert done.failed == 0


def test_every_public_name_is_documented() -> None:
    for name in kvblocks.__all__:
        value = getattr(kvblocks, name)
        if not inspect.isclass(value) or not value.__module__.startswith("kvblocks."):
            continue
        assert value.__doc__, name
        for member_name, member in vars(value).items():
            if inspect.isfunction(member) and not member_name.startswith("_"):
                assert member.__doc__, f"{name}.{member_name}"


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


def test_the_version_is_the_newest_heading_of_the_changelog() -> None:
    changelog = (PACKAGE / "CHANGELOG.md").read_text("utf-8")
    heading = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert heading is not None
    assert heading[1] == kvblocks.__version__


def test_sequence_ids_are_found_by_in() -> None:
    manager = kvblocks.BlockManager(1)
    assert "A" not in manager
    manager.allocate("A", [1])
    assert "A" in manager


def test_a_fresh_manager_hands_out_blocks_in_order() -> None:
    manager = kvblocks.BlockManager(5, 2)
    assert manager.allocate("A", range(10)).block_ids == (0, 1, 2, 3, 4)
