"""Reading a GGUF file: its metadata, its table of tensors, and one tensor at a time.

Knows the container (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian) and
distrusts it: every length is held against what is left of the file before it is believed, so a
truncated or mislabelled file costs a sentence, not memory. The quantised types themselves are those
of the `gguf` package. Knows no model.
"""

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvruntime.errors import CheckpointError, MissingDependency

__all__ = ["GGUFFile", "GGUFTensor", "Metadata"]

_T = TypeVar("_T")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


def _gguf() -> ModuleType:
    try:
        import gguf  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise MissingDependency(
            "GGUF files need the package gguf, which is not installed: pip install 'kvruntime[gguf]'"
        ) from error
    return gguf


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor is: its shape outermost dimension first, its type, its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a GGUF file: `values` maps keys to Python values, arrays to lists."""

    values: Mapping[str, Any]

    def one(self, key: str, kind: type[_T]) -> _T | None:
        """Return the value of `key`, or None; raise `CheckpointError` if it is not a `kind`."""
        value = self.values.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise CheckpointError(f"{key} must be of type {kind.__name__}, got {value!r:.40}")

    def many(self, key: str, kind: type[_T]) -> list[_T]:
        """Return the list under `key`, or an empty one; raise if an item is not a `kind`."""
        items = self.one(key, list) or []
        for item in items:
            if not isinstance(item, kind):
                raise CheckpointError(f"{key} must hold {kind.__name__} only, got {item!r:.40}")
        return items


class GGUFFile:
    """A GGUF file, mapped into memory; opening it costs a walk over its metadata.

    `tensors` maps names to `GGUFTensor`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and check all but the contents of its tensors.

        Raises:
            CheckpointError: it is not a GGUF file, or not a whole one.
            MissingDependency: the package `gguf` is not installed.
        """
        self.path = path
        self._gguf = _gguf()
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        cursor = _Cursor(path, self._data, len(_MAGIC))
        version = cursor.scalar(4)
        if version not in _VERSIONS:
            raise CheckpointError(f"{path}: the GGUF version must be 2 or 3, got {version}")
        num_tensors, num_values = cursor.scalar(10), cursor.scalar(10)
        self.metadata = Metadata(_distinct(path, cursor, num_values))
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(
                f"{path}: general.alignment must be positive, got {alignment!r:.80}"
            )
        start = -(-cursor.position // alignment) * alignment
        self.tensors: Mapping[str, GGUFTensor] = {
            name: self._locate(name, shape, type_id, start + offset)
            for name, shape, type_id, offset in entries
        }
        if len(self.tensors) != num_tensors:
            raise CheckpointError(f"{path} names a tensor twice")
        _refuse_overlaps(path, self.tensors.values())

    def read(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        """Return the tensor's values in its shape, dequantised; costs four bytes a value.

        Raises:
            CheckpointError: the `gguf` package cannot dequantise its type.
        """
        kind = self._gguf.GGMLQuantizationType(tensor.type_id)
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        try:
            # The scales of a damaged block may be any bits, infinity included.
            with np.errstate(all="ignore"):
                values = self._gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r:.80} is stored as {kind.name}, "
                "which cannot be dequantised"
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)

    def _locate(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        try:
            kind = self._gguf.GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r:.80} is of the unknown quantisation type {type_id}"
            ) from error
        block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: a row of tensor {name!r:.80} must be a multiple of {block_size} values "
                f"as {kind.name}, got {shape[-1]}"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if offset + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r:.80} ends at byte {offset + num_bytes}, "
                f"the file at {len(self._data)}"
            )
        return GGUFTensor(name, shape, type_id, offset, num_bytes)


def _distinct(path: Path, cursor: "_Cursor", count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key, value = cursor.key_value()
        if key in values:
            raise CheckpointError(f"{path} has the key {key!r:.80} twice")
        values[key] = value
    return values


def _refuse_overlaps(path: Path, tensors: Iterable[GGUFTensor]) -> None:
    """Each byte is of one tensor, so that what is read is no more than the file."""
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    for tensor, following in pairwise(by_offset):
        if tensor.offset + tensor.num_bytes > following.offset:
            raise CheckpointError(
                f"{path}: tensors {tensor.name!r:.80} and {following.name!r:.80} overlap"
            )


class _Cursor:
    """Reads the header from front to back and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self._path = path
        self._data = data
        self.position = position

    def _take(self, num_bytes: int) -> int:
        """Move on by `num_bytes` and return where they begin."""
        start = self.position
        if num_bytes > len(self._data) - start:
            raise CheckpointError(
                f"{self._path} is truncated: its header needs {num_bytes} bytes at byte {start}, "
                f"the file ends at {len(self._data)}"
            )
        self.position = start + num_bytes
        return start

    def scalar(self, type_id: int) -> Any:
        """Read one value of a scalar type."""
        return self._scalars(type_id, 1)[0]

    def _scalars(self, type_id: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[type_id])
        start = self._take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._data, dtype, count, start).tolist()
        return values

    def string(self) -> str:
        """Read a length and as many bytes of UTF-8."""
        (length,) = struct.unpack_from("<Q", self._data, self._take(8))
        start = self._take(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path} is damaged: the text at byte {start} is not UTF-8"
            ) from error

    def key_value(self) -> tuple[str, Any]:
        """Read one entry of the metadata."""
        key = self.string()
        type_id = self.scalar(4)
        if type_id != _ARRAY:
            return key, self._value(key, type_id)
        item_type, count = self.scalar(4), self.scalar(10)
        if item_type in _SCALARS:
            return key, self._scalars(item_type, count)
        # Every item takes a byte at least, so a count beyond the file ends at the file's end.
        return key, [self._value(key, item_type) for _ in range(count)]

    def _value(self, key: str, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id in _SCALARS:
            return self.scalar(type_id)
        raise CheckpointError(f"{self._path}: {key!r:.80} is of the unknown value type {type_id}")

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read one row of the tensor table: name, shape, type and offset within the data."""
        name = self.string()
        num_dimensions = self.scalar(4)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r:.80} must have 1 to {_MAX_DIMENSIONS} dimensions, "
                f"got {num_dimensions}"
            )
        innermost_first = self._scalars(10, num_dimensions)
        if not all(innermost_first):
            raise CheckpointError(f"{self._path}: tensor {name!r:.80} has an empty dimension")
        return name, tuple(reversed(innermost_first)), self.scalar(4), self.scalar(10)
