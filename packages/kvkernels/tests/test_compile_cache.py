"""Compiled code on disk: what names it, what two processes do to it, and what happens without a folder."""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import pytest
from numba import types

from kvkernels.cpu import compiled
from kvkernels.cpu.compiled import SUFFIX, kernel

Function = Callable[[Any], Any]


def _twice(x: Any) -> Any:
    return 2 * x


def fresh() -> Function:
    """The same function as one that this process has not compiled."""
    copy = FunctionType(_twice.__code__, globals(), "twice")
    copy.__module__, copy.__qualname__ = __name__, "twice"
    return copy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for compiled code."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_each_signature_has_a_file_and_no_other_is_left(folder: Path) -> None:
    assert kernel(fresh(), (types.int64,))(3) == 6
    assert kernel(fresh(), (types.float32,))(1.5) == 3
    found = files(folder)
    assert len(found) == 2
    assert all(path.name.startswith("kvkernels-twice-") for path in found)
    assert all(path.suffix == SUFFIX for path in found)


def test_what_is_on_disk_is_not_compiled_again(folder: Path) -> None:
    kernel(fresh(), (types.int64,))
    before = files(folder)[0].stat().st_mtime_ns
    assert kernel(fresh(), (types.int64,))(3) == 6
    assert [path.stat().st_mtime_ns for path in files(folder)] == [before]


@pytest.mark.parametrize("content", [b"", b"\x80\x05garbage", None])
def test_a_damaged_file_is_compiled_anew(folder: Path, content: bytes | None) -> None:
    kernel(fresh(), (types.int64,))
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert kernel(fresh(), (types.int64,))(3) == 6
    assert len(files(folder)) == 1
    assert path.stat().st_size > len(whole) // 2


@pytest.mark.parametrize("change", ["version", "processor"])
def test_other_versions_and_other_processors_have_files_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    kernel(fresh(), (types.int64,))
    if change == "version":
        monkeypatch.setattr(compiled, "_environment", lambda: "f" * 64)
    else:
        # Numba's key has the processor's name and features; here another name stands for both.
        own = compiled._KernelFiles.path
        monkeypatch.setattr(compiled._KernelFiles, "path", lambda self, key: own(self, rename(key)))
    kernel(fresh(), (types.int64,))
    assert len(files(folder)) == 2


def rename(key: Any) -> Any:
    """A key as a processor without a feature would have it."""
    text = repr(key)
    assert "x86_64" in text or "arm64" in text or "aarch64" in text
    features = next(word for word in text.split(",") if word.lstrip("'( ").startswith("+"))
    return text.replace(features, "")


def test_a_changed_source_of_a_kernel_changes_all_names_and_another_module_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(compiled.__file__).parent, tmp_path / "cpu")
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "cpu" / "compiled.py"))
    digest = compiled._environment.__wrapped__
    before = digest()
    for name, is_changed in (("steps.py", False), ("tiles.py", True)):
        path = tmp_path / "cpu" / name
        path.write_text(path.read_text("utf-8") + "\n# changed\n", "utf-8")
        assert (digest() != before) is is_changed


def test_two_processes_at_once_compile_to_whole_files(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = (
        "import sys, time, pathlib, numpy as np\n"
        "from kvkernels.cpu.cache import find_bad_slot\n"
        "from kvkernels.cpu.compiled import PREPARE\n"
        "print('ready', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "assert find_bad_slot(np.array([0, 5, 9]), 9) == 2\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", code, str(gate)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    gate.touch()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    found = files(tmp_path / "cache")
    assert [path.suffix for path in found] == [SUFFIX]
    before = found[0].stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True)
    assert [path.stat().st_mtime_ns for path in files(tmp_path / "cache")] == [before]


def test_without_a_folder_to_write_to_kernels_work_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiled, "_KernelCache", refuse)
    with pytest.warns(RuntimeWarning, match=r"^compiled kernels are not kept.*NUMBA_CACHE_DIR may"):
        assert kernel(fresh(), (types.int64,))(3) == 6


def test_a_folder_that_went_read_only_is_warned_of_and_the_kernel_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # A real read-only folder does not stop the root user, whom containers are.
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.warns(RuntimeWarning, match="not kept.*Permission denied"):
        assert kernel(fresh(), (types.int64,))(3) == 6
    assert files(folder) == []


def test_loading_from_a_read_only_folder_needs_no_warning(folder: Path) -> None:
    kernel(fresh(), (types.int64,))
    (path,) = files(folder)
    path.parent.chmod(0o555)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kernel(fresh(), (types.int64,))(3) == 6
    finally:
        path.parent.chmod(0o755)


def test_files_are_current_for_the_version_that_wrote_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(fresh(), (types.int64,))
    (path,) = files(folder)
    assert compiled.is_current(path)
    monkeypatch.setattr(compiled, "_environment", lambda: "f" * 64)
    assert not compiled.is_current(path)


def test_compiling_stops_no_other_thread_from_waiting_for_a_kernel(folder: Path) -> None:
    # Two threads that ask for one kernel at once both get it.

    function = fresh()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(kernel, function, (types.int64,)) for _ in range(2)]
        assert [call.result()(3) for call in calls] == [6, 6]
    assert len(files(folder)) == 1
