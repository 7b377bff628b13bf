"""The Numba types of kernels' arguments, so that each kernel is compiled once, for every caller.

A read-only type takes writable arrays too, and an "A" layout takes dense ones.
"""

from numba import types

FLOAT = types.float32
INT = types.int64
BOOL = types.boolean
# Arrays of items as `kvkernels.arrays.flatten` makes them, with the strides of all axes but the
# last.
ITEMS = types.Array(FLOAT, 1, "C", readonly=True)
WRITABLE_ITEMS = types.Array(FLOAT, 1, "C")
STRIDES_2 = types.UniTuple(INT, 2)  # type: ignore[no-untyped-call]  # Numba leaves it untyped
STRIDES_3 = types.UniTuple(INT, 3)  # type: ignore[no-untyped-call]  # Numba leaves it untyped
INT_3 = STRIDES_3
# Lengths, offsets, tables and slots.
INT32_1D = types.Array(types.int32, 1, "A", readonly=True)
INT32_2D = types.Array(types.int32, 2, "A", readonly=True)
INT64_1D = types.Array(INT, 1, "A", readonly=True)
# Results.
OUT = types.Array(FLOAT, 3, "C")
LSE = types.Array(FLOAT, 2, "C")
