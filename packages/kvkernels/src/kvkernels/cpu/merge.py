"""Folding states of pieces that several threads computed, and results over disjoint keys.

It knows no keys.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

import math
from typing import Any, TypeAlias

import numpy as np

from kvkernels.arrays import Array
from kvkernels.cpu import signatures as sig
from kvkernels.cpu.compiled import compiled, inlined
from kvkernels.cpu.lanes import (
    Batch,
    Rules,
    fold,
    keep_lanes,
    new_lanes,
    start_lanes,
    write_result,
)
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
    *(sig.items(), sig.FLOAT, sig.ITEM_TABLE, sig.STATES, sig.STATES, sig.BOOL),
    *(sig.OUT, sig.LSE),
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
    shared: Array,
    is_shared: Bool,
    out: Array,
    lse: Array,
) -> None:
    """Write the results of those items that left the states of single pieces.

    Pieces of one item stand together in `items`, in the order of the context, and are folded in it,
    after the states `shared`. With `is_shared` the items themselves are of keys that all sequences
    share: what is folded goes to `shared`, and there are no results.
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
            start_lanes(lanes, item, batch, shared[:0] if is_shared else shared)
        for lane in range(item.num_kv_heads * item.num_rows * group):
            state = states[item.slot + lane]
            fold(lanes, lane, head_dim, state, 0, state[head_dim], state[head_dim + 1])
        if is_last and is_shared:
            keep_lanes(lanes, item, batch, shared)
        elif is_last:
            write_result(lanes, item, batch, rules, out, lse)


@compiled(sig.SHARES, sig.LOG_SUMS, sig.items(), sig.items(writable=True))
def weigh(weights: Array, lses: Array, sinks: Array, lse: Array) -> None:
    """Write to float64 [S, T * Hq] the share of each result, and to `lse` that of all keys.

    `lses` [S, T * Hq] are natural. A sink [Hq] takes its share and has no value. Where no result has a
    key, shares are 0.
    """
    num_states, num_lanes = lses.shape
    for lane in range(num_lanes):
        top = np.float64(-np.inf)
        for s in range(num_states):
            # Not max(): a NaN must reach the sum below.
            top = top if lses[s, lane] <= top else np.float64(lses[s, lane])
        total = 0.0
        for s in range(num_states):
            is_empty = lses[s, lane] == -np.inf
            weights[s, lane] = 0.0 if is_empty else math.exp(lses[s, lane] - top)
            total += weights[s, lane]
        log_sum = top + math.log(total) if total != 0.0 else -np.inf
        lse[lane] = np.float32(log_sum)
        if total == 0.0:
            continue
        if sinks.size > 0:
            total *= 1.0 + math.exp(np.float64(sinks[lane % sinks.size]) - log_sum)
        for s in range(num_states):
            weights[s, lane] /= total


@compiled(sig.RESULT, sig.SHARES_OF_ONE, sig.SUMS)
def add_weighted(result: Array, weights: Array, sums: Array) -> None:
    """Add to float32 [T * Hq, D] a result times its weights; what has no weight is not read."""
    for lane in range(result.shape[0]):
        weight = np.float32(weights[lane])
        if weight != np.float32(0):
            for d in range(result.shape[1]):
                sums[lane, d] += result[lane, d] * weight
