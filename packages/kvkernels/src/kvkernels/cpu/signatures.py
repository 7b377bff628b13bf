"""The Numba types of kernels' arguments, so that each kernel is compiled once, for every caller.

A read-only type takes writable arrays too, and an "A" layout takes dense ones.
"""

from typing import Any

from numba import types

FLOAT = types.float32
INT = types.int64
BOOL = types.boolean


def ints(count: int) -> Any:
    """Return the type of a tuple of so many int64."""
    return types.UniTuple(INT, count)  # type: ignore[no-untyped-call]  # Numba leaves it untyped


def items(item: Any = FLOAT, *, writable: bool = False) -> Any:
    """Return the type of an array that `kvkernels.arrays.flatten` makes."""
    return types.Array(item, 1, "C", readonly=not writable)


# Lengths, offsets, tables and slots.
INT32_1D = types.Array(types.int32, 1, "A", readonly=True)
INT32_2D = types.Array(types.int32, 2, "A", readonly=True)
INT64_1D = types.Array(INT, 1, "A", readonly=True)
# Items of work, and the number of the next one.
ITEM_TABLE = types.Array(INT, 2, "C")
COUNTER = types.Array(INT, 1, "C")
# Results, of items and of their lanes.
STATES = types.Array(FLOAT, 2, "C")
OUT = types.Array(FLOAT, 3, "C")
LSE = types.Array(FLOAT, 2, "C")
# What results over disjoint keys are merged from and to.
RESULT = types.Array(FLOAT, 2, "C", readonly=True)
SUMS = types.Array(FLOAT, 2, "C")
LOG_SUMS = types.Array(FLOAT, 2, "C", readonly=True)
SHARES = types.Array(types.float64, 2, "C")
SHARES_OF_ONE = types.Array(types.float64, 1, "C", readonly=True)
