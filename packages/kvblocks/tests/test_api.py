"""The public surface: names, imports, types, documentation, version."""

import ast
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
# From the bottom up: each imports only what stands before it.
MODULES = (
    "_version",
    "results",
    "errors",
    "units",
    "files",
    "sizing",
    "planning",
    "config_fields",
    "layer_kinds",
    "model_config",
    "contiguous",
    "views",
    "hashing",
    "events",
    "memory",
    "lifetimes",
    "policies",
    "pool",
    "runs",
    "tree",
    "sequence",
    "host",
    "windows",
    "pins",
    "ledger",
    "append",
    "reservations",
    "prompts",
    "explain",
    "swap",
    "insight",
    "checks",
    "decode",
    "snapshots",
    "queries",
    "manager",
    "recording",
    "replay",
    "facades.held",
    "facades.sglang",
    "facades.vllm",
    "facades",
    "__init__",
    "traces.records",
    "traces.rows",
    "traces.sessions",
    "traces.operations",
    "traces.formats",
    "traces",
    "simulate.outcomes",
    "simulate.prefixes",
    "simulate.progress",
    "simulate.tally",
    "simulate.fifo",
    "simulate.leaves",
    "simulate.stack_distance",
    "simulate.engine",
    "simulate",
    "baselines",
    "waste",
    "report",
    "report.page",
    "report.charts",
    "report.simulation",
    "report.waste",
    "block_map",
    "report.replay",
    "cli.parser",
    "cli.progress",
    "cli.tables",
    "cli.plan_inputs",
    "cli.plan_text",
    "cli.plan",
    "cli.waste",
    "cli.simulate",
    "cli.replay",
    "cli",
    "__main__",
)
# What few need is imported when it is needed: importing the package must stay quick.
LAZY = {
    "recording",
    "replay",
    "snapshots",
    "units",
    "files",
    "sizing",
    "planning",
    "config_fields",
    "layer_kinds",
    "model_config",
    "contiguous",
}


def path_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(module: str) -> set[str]:
    tree = ast.parse(path_of(module).read_text("utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name.removeprefix("kvblocks.") in MODULES else node.module)
    return names


def test_all_is_sorted_and_is_what_exists() -> None:
    public = {
        name
        for name, value in vars(kvblocks).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert kvblocks.__all__ == sorted(public | {"__version__"})


def test_every_module_is_known() -> None:
    assert set(SOURCE.rglob("*.py")) == {path_of(module) for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_only_the_standard_library_is_imported(module: str) -> None:
    roots = {name.partition(".")[0] for name in imports_of(module)}
    assert roots <= sys.stdlib_module_names | {"kvblocks"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    ours = {name for name in imports_of(module) if name.startswith("kvblocks.")}
    assert ours <= {f"kvblocks.{name}" for name in MODULES[: MODULES.index(module)]}


def test_importing_the_package_does_not_import_what_few_need() -> None:
    code = "import sys, kvblocks; print(*(name for name in sys.modules if 'kvblocks.' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.removeprefix("kvblocks.") for name in done.stdout.split()}
    below = MODULES[: MODULES.index("__init__")]
    facades = {name for name in below if name.startswith("facades")}
    assert imported == set(below) - LAZY - facades


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
