"""Writing into a caller's buffer: block tables and slots, without a copy in between.

    rows of int32                          out, shape (3, 4), before: whatever
    [7 3]                                    7  3 -1 -1
    [7 5 6]                                  7  5  6 -1
                                            -1 -1 -1 -1

A buffer is what offers the buffer protocol: a NumPy array, an `array`, a memoryview, `tensor.numpy()` of
a torch tensor on the CPU, pinned memory. It is filled with -1 by one memcpy, then each row is one.

Knows buffers, their formats and shapes. Does not know what is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvblocks.errors import InvalidBuffer

_FORMATS = {"i": "int32", "q": "int64"}


def write_rows(out: object, rows: Sequence[array[int]]) -> None:
    """Write int32 rows one below the other, and -1 everywhere else. `InvalidBuffer`."""
    view = _open(out, "i", num_dimensions=2)
    num_rows, num_columns = view.shape  # type: ignore[misc]  # two dimensions have a shape
    longest = max(map(len, rows), default=0)
    if len(rows) > num_rows or longest > num_columns:
        raise InvalidBuffer(
            f"out must have room for {len(rows)} rows of up to {longest} blocks, got the shape "
            f"{view.shape}"
        )
    if view.nbytes:  # pragma: no branch -- only NumPy has two dimensions and no bytes
        flat = _flatten(view, "i")
        for number, row in enumerate(rows):
            start = number * num_columns
            flat[start : start + len(row)] = memoryview(row)


def write_row(out: object, row: array[int]) -> None:
    """Write one row of int64, and -1 behind it. `InvalidBuffer`."""
    view = _open(out, "q", num_dimensions=1)
    if len(row) > len(view):
        raise InvalidBuffer(f"out must have room for {len(row)} slots, got {len(view)}")
    if view.nbytes:
        _flatten(view, "q")[: len(row)] = memoryview(row)


def _open(out: object, typecode: str, *, num_dimensions: int) -> memoryview:
    """Check that a buffer can be written to as what it must be."""
    try:
        view = memoryview(out)  # type: ignore[arg-type]  # which refuses what is none
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidBuffer(
            f"out must offer the buffer protocol, as NumPy arrays do, got {type(out).__name__}: "
            f"{error}"
        ) from None
    size = array(typecode).itemsize
    # A signed integer of that size has one letter on one platform, and another elsewhere.
    if view.format.lstrip("@") not in {"i", "l", "q"} or view.itemsize != size:
        raise InvalidBuffer(
            f"out must be {_FORMATS[typecode]}, got the format {view.format!r} of "
            f"{view.itemsize} bytes"
        )
    if view.ndim != num_dimensions:
        raise InvalidBuffer(
            f"out must have {num_dimensions} dimensions, got {view.ndim} of the shape {view.shape}"
        )
    if view.readonly:
        raise InvalidBuffer("out must be writable, got a buffer that can only be read")
    if not view.c_contiguous:
        raise InvalidBuffer(
            f"out must be contiguous, got the strides {view.strides} for the shape {view.shape}"
        )
    return view


def _flatten(view: memoryview, typecode: str) -> memoryview:
    """A buffer as one row, filled with -1."""
    view.cast("B")[:] = b"\xff" * view.nbytes  # what -1 is in any signed format
    return view.cast("B").cast("i" if typecode == "i" else "q")
