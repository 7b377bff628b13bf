"""Reading the JSON files of a checkpoint's folder. Knows no key of any of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvruntime.errors import CheckpointError

__all__ = ["read_object", "unique_keys"]

# Parsed, a file is at most some thirty times as large.
_MAX_BYTES = 1 << 24


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object of at most 16 MiB. `CheckpointError` if not."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointError(f"{path} must have at most {_MAX_BYTES} bytes, got {size}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object")
    return value


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members; `ValueError` names one that comes twice.

    >>> unique_keys([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r:.40} comes twice")
        made[key] = value
    return made
