"""The package's surface and its import."""

import doctest
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvkernels
from kvkernels import attention, cache, capabilities, dtypes, errors, plans, states


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_all_is_sorted_and_complete() -> None:
    public = {
        name
        for name, value in vars(kvkernels).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert kvkernels.__all__ == sorted(public | {"__version__"})


def test_every_error_has_the_base_and_a_builtin() -> None:
    for name in kvkernels.__all__:
        error = getattr(kvkernels, name)
        if isinstance(error, type) and issubclass(error, Exception):
            assert issubclass(error, errors.KVKernelsError)
            if error is not errors.KVKernelsError:
                assert issubclass(error, TypeError | ValueError | IndexError)
                assert f"{name} (" in (errors.__doc__ or "")


def test_import_needs_neither_torch_nor_cupy_nor_yet_numba() -> None:
    run_python(
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'cupy', 'numba']))\n"
        "import kvkernels\n"
        "assert all(sys.modules[name] is None for name in ('torch', 'cupy', 'numba'))"
    )


def test_attention_needs_neither_torch_nor_cupy() -> None:
    run_python(
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'cupy']))\n"
        "import numpy as np, kvkernels\n"
        "q, cache = np.ones((1, 1, 4), 'f4'), np.ones((1, 1, 2, 4), 'f4')\n"
        "out = kvkernels.paged_attention(q, cache, cache, np.zeros((1, 1), 'i4'), np.ones(1, 'i4'))\n"
        "assert (out == 1).all()"
    )


@pytest.mark.parametrize("module", [attention, cache, capabilities, dtypes, plans, states])
def test_examples_of_the_docstrings_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_example_of_the_readme_runs() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    code = readme.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert run_python(code) == "(3, 8, 64)\n"
