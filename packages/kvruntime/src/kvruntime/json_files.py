"""Reading the JSON files of a checkpoint's folder. Knows no key of any of them."""

import json
from pathlib import Path
from typing import Any

from kvruntime.errors import CheckpointError

__all__ = ["read_object"]


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object. `CheckpointError` if it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object")
    return value
