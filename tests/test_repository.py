"""What holds for the repository as a whole: versions and names that agree.

Who may import whom is checked by `nox -s contracts`.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
packages = pytest.mark.parametrize("package", ["kvblocks", "kvkernels", "kvruntime"])


def modules(package: str) -> list[Path]:
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


@packages
def test_version_is_the_newest_of_the_changelog(package: str) -> None:
    folder = ROOT / "packages" / package
    headings = re.findall(r"^## (\S+)", (folder / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == importlib.import_module(package).__version__


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


@pytest.fixture(scope="module")
def noxfile() -> Any:
    """The sessions, which can be imported once."""
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("given", "cuda"), [([], "cuda13"), (["cuda12"], "cuda12")])
def test_the_gpu_session_runs_everything_with_the_cuda_that_is_asked_for(
    tmp_path: Path, noxfile: Any, given: list[str], cuda: str
) -> None:
    commands = []

    class Session:
        posargs = (*given, "--json", "gpu.json")

        def create_tmp(self) -> str:
            return str(tmp_path)

        def install(self, *arguments: str) -> None:
            assert f"packages/kvruntime[{cuda}]" in arguments
            assert arguments[1] == str(tmp_path / "constraints.txt")

        def run(self, *command: str, env: dict[str, str]) -> None:
            assert env == {"KVKERNELS_GPU": "1"}
            assert all((ROOT / path).exists() for path in command if path.endswith(".py"))
            commands.append(command)
            if len(commands) < 3:
                raise noxfile.CommandFailed

        def error(self, message: str) -> None:
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=r"failed: benchmarks/gpu/run.py, packages/kvkernels"):
        noxfile.gpu.func(Session())
    assert commands[0][2:] == ("--json", "gpu.json")
    assert len(commands) == 3
    pins = (tmp_path / "constraints.txt").read_text("utf-8")
    assert "torch==" in pins
    assert "nvidia" not in pins


def test_contributing_lists_every_session() -> None:
    rows = []
    for node in ast.parse((ROOT / "noxfile.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found = [
                re.match(r"nox\.session\b(?:.*name='([\w-]+)')?", ast.unparse(decorator))
                for decorator in node.decorator_list
            ]
            for match in filter(None, found):
                says = (ast.get_docstring(node) or "").replace("|", "\\|")
                rows.append(f"| `{match[1] or node.name}` | {says} |")
    lines = (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    assert rows
    assert [line for line in lines if line.startswith("| `")] == rows
