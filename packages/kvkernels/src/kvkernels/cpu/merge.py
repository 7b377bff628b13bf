"""Folding the states of an item's pieces, which several threads computed. It knows no keys."""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from typing import Any, TypeAlias

import numpy as np

from kvkernels.arrays import Array
from kvkernels.cpu import signatures as sig
from kvkernels.cpu.compiled import compiled, inlined
from kvkernels.cpu.lanes import Batch, Rules, fold, new_lanes, start_lanes, write_result
from kvkernels.cpu.work import Item

# Scalars are Numba's: int64, bool and float32.
Int: TypeAlias = Any
Bool: TypeAlias = Any
Float: TypeAlias = Any


@inlined
def _same_lanes(one: Array, other: Array) -> Bool:
    """Whether two items have the same rows and heads of one sequence."""
    return one[0] == other[0] and one[1] == other[1] and one[3] == other[3]


@compiled(
    *(sig.INT32_2D, sig.INT32_1D, sig.INT32_1D, sig.INT, sig.INT),
    *(sig.items(), sig.FLOAT, sig.ITEM_TABLE, sig.STATES, sig.OUT, sig.LSE),
)
def merge(
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    num_kv_heads: Int,
    block_size: Int,
    sinks: Array,
    v_scale: Float,
    items: Array,
    states: Array,
    out: Array,
    lse: Array,
) -> None:
    """Write the results of those items that left the states of single pieces.

    Pieces of one item stand together in `items`, in the order of the context, and are folded in it.
    """
    head_dim, group = out.shape[2], out.shape[1] // num_kv_heads
    batch = Batch(block_table, seq_lens, cu_seqlens_q, num_kv_heads, group, head_dim, block_size, 0)
    rules = Rules(True, -1, np.float32(0), sinks[:0], sinks, v_scale)
    lanes = new_lanes(batch, items)
    for n in range(items.shape[0]):
        row = items[n]
        item = Item(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])
        if item.slot < 0:
            continue
        is_first = n == 0 or not _same_lanes(items[n - 1], row)
        is_last = n + 1 == items.shape[0] or not _same_lanes(items[n + 1], row)
        if is_first:
            start_lanes(lanes)
        for lane in range(item.num_kv_heads * item.num_rows * group):
            state = states[item.slot + lane]
            fold(lanes, lane, head_dim, state, 0, state[head_dim], state[head_dim + 1])
        if is_last:
            write_result(lanes, item, batch, rules, out, lse)
