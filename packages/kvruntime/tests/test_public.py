"""The public names, which are imported when they are first asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvruntime

SLOW_TO_IMPORT = {"numba", "numpy", "tokenizers", "torch", "transformers"}


def test_type_checkers_see_the_names_where_they_are_imported_from() -> None:
    tree = ast.parse(Path(kvruntime.__file__).read_text("utf-8"))
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"kvruntime.{home}" for name, home in kvruntime._HOME.items()}


def test_all_is_what_can_be_imported() -> None:
    assert set(kvruntime.__all__) == {*kvruntime._HOME, "__version__"}
    assert set(kvruntime.__all__) <= set(dir(kvruntime))
    for name in kvruntime.__all__:
        assert getattr(kvruntime, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvruntime' has no attribute 'LMM'"):
        kvruntime.LMM  # type: ignore[attr-defined] # noqa: B018 -- that is the test


@pytest.mark.parametrize("module", ["kvruntime", "kvruntime.errors", "kvruntime.cli"])
def test_help_and_errors_wait_for_no_large_library(module: str) -> None:
    # The modules of all commands are imported with the command line.
    program = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert SLOW_TO_IMPORT.isdisjoint(answer.split())


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["generate", "--prompt", "a", "--n", "0"], "n must be at least 1, got 0"),
        (["serve", "--port", "99999"], "less than or equal to 65535"),
    ],
)
def test_a_usage_error_waits_for_no_large_library(arguments: list[str], rule: str) -> None:
    program = (
        "import sys, kvruntime.cli\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try: kvruntime.cli.main()\n"
        "finally: print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, rule in done.stderr) == (2, True)
    assert SLOW_TO_IMPORT.isdisjoint(done.stdout.split())
