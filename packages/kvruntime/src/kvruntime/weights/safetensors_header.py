"""The header of a safetensors file, held against the file before the library opens it.

Knows the container (github.com/huggingface/safetensors: eight bytes of length, a JSON object, the data)
and distrusts it: what a header claims costs memory only as far as the file is long, and the header
itself is bounded. Knows no model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvruntime.errors import CheckpointError
from kvruntime.json_files import unique_keys

__all__ = ["StoredTensor", "read_header"]

_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 8
# An entry takes about a hundred bytes, so that this is some eighty thousand tensors; parsed, it is
# at most some thirty times as large.
_MAX_HEADER_BYTES = 1 << 23
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of a tensor: its shape, and where its bytes are in the data."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> Mapping[str, StoredTensor]:
    """Read the tensors that a file declares by their names; O(size of the header).

    Their bytes fill the data without a gap or an overlap, and are as many as types and shapes say.

    Raises:
        CheckpointError: it is not a whole safetensors file, or a tensor is of a type that is not
            supported.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise _damaged(
                    path,
                    f"its header must be 1 to {_MAX_HEADER_BYTES} bytes within the file's {size}, "
                    f"got {length}",
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    tensors = [
        _stored(path, name, entry)
        for name, entry in _parsed(path, header).items()
        if name != "__metadata__"
    ]
    position = 0
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.end)):
        if tensor.begin != position:
            raise _damaged(
                path,
                f"tensor {tensor.name!r:.80} must begin at byte {position} of the data, "
                f"got {tensor.begin}",
            )
        position = tensor.end
    if position != size - _LENGTH_BYTES - length:
        raise _damaged(
            path, f"its data must be {position} bytes, got {size - _LENGTH_BYTES - length}"
        )
    return {tensor.name: tensor for tensor in tensors}


def _parsed(path: Path, header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header: {error}") from error
    if not isinstance(value, dict):
        raise _damaged(path, "its header must be a JSON object")
    return value


def _stored(path: Path, name: str, entry: object) -> StoredTensor:
    """Check one entry of a header by itself."""
    shown = f"tensor {name!r:.80}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{shown} must have a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(path, f"{shown} must have a shape of at most {_MAX_DIMENSIONS} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{shown} must have two data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise CheckpointError(
            f"{path}: {shown} must be one of {', '.join(_ITEM_SIZES)}, got {dtype!s:.40}"
        )
    begin, end = offsets
    if end - begin != prod(shape) * _ITEM_SIZES[dtype]:
        raise _damaged(
            path,
            f"{shown} must have {prod(shape) * _ITEM_SIZES[dtype]:.6g} bytes, got {end - begin:.6g}",
        )
    return StoredTensor(name, tuple(shape), begin, end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value
    )


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole safetensors file ({reason})")
