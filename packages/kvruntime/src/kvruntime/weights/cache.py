"""Folders built once from a file and found again by the file's content.

Knows nothing of what is in them. A folder is built beside its place and renamed into it, so that
it is whole or absent for every process; two processes that build the same one at once both
succeed. A process that is killed leaves its `incomplete-` folder behind, which nobody reads.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from kvruntime.errors import CheckpointError
from kvruntime.weights.progress import Progress

__all__ = ["cached_folder"]

_CHUNK = 1 << 22


def cached_folder(
    path: Path,
    *,
    version: int,
    build: Callable[[Path], None],
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress,
) -> Path:
    """Return the folder that `build` makes of the file at `path`, building it the first time.

    The key is the SHA-256 of the content and `version`, so a renamed file is found again and a
    changed one is not. Every call reads the file once. If `build` fails nothing is kept.

    Raises:
        CheckpointError: the file cannot be read or the cache cannot be written; and what `build`
            raises.
    """
    root = _root(cache_dir)
    final = root / f"{_digest(path, progress)}-{version}"
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="incomplete-", dir=root))
    except OSError as error:
        raise _not_writable(root, error) from error
    try:
        build(unfinished)
        _publish(unfinished, final)
    except OSError as error:
        raise _not_writable(root, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def _root(cache_dir: str | os.PathLike[str] | None) -> Path:
    chosen = cache_dir or os.environ.get("KVRUNTIME_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("kvruntime"))


def _digest(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                progress("Checking", min(file.tell(), size), size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _publish(unfinished: Path, final: Path) -> None:
    try:
        unfinished.rename(final)
    except OSError:
        # Another process was first; its folder has the same content.
        if not final.is_dir():
            raise


def _not_writable(root: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or error
    return CheckpointError(f"the cache {root} cannot be written ({reason}); see KVRUNTIME_CACHE")
