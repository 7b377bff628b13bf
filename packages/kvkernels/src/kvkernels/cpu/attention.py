"""Paged attention over float32 arrays, for one thread. It knows no validation beyond `check`.

Each (query row, head) is computed by itself, block by block in token order, with an online
softmax. Which rows share a call or a tile, and where blocks lie, so cannot change a bit of it.

All functions that call one another stay in this file: Numba's cache on disk notices a change of
the file of a function, and not of the files of the functions it calls.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

import math
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from kvkernels.arrays import Array
from kvkernels.cpu.signatures import (
    BOOL,
    FLOAT,
    INT,
    INT32_1D,
    INT32_2D,
    INT_3,
    ITEMS,
    LSE,
    OUT,
    STRIDES_2,
    STRIDES_3,
)

# Scalars are Numba's: int64 (uint64 where it says so), bool and float32.
Int: TypeAlias = Any
Bool: TypeAlias = Any
Float: TypeAlias = Any

# Nothing that assumes away NaN, infinity or the sign of zero.
_FASTMATH = {"reassoc", "contract", "arcp"}

# Query rows times heads of a group that share the reading of one block.
_TILE = 32
# Below every score, and finite, so that the first rescaling computes no inf - inf.
_LOWEST = np.float32(np.finfo(np.float32).min)

# What `check` found.
OK = 0
BAD_CU_SEQLENS = 1
NEGATIVE_LENGTH = 2
TOO_MANY_ROWS = 3
TABLE_TOO_NARROW = 4
BLOCK_OUTSIDE_POOL = 5


@njit(nogil=True)
def _first_visible(position: Int, window_left: Int) -> Int:
    """Return the first position that a row at `position` sees."""
    return max(0, position - window_left) if window_left >= 0 else 0


@njit(nogil=True)
def _find_bad_block(block_table: Array, s: Int, start: Int, end: Int, num_blocks: Int) -> Int:
    """Return the first column in [start, end) whose block is outside the pool, or -1."""
    for i in range(start, end):
        if block_table[s, i] < 0 or block_table[s, i] >= num_blocks:
            return i
    return -1


@njit(INT_3(INT32_2D, INT32_1D, INT32_1D, INT, INT, INT, INT), cache=True, nogil=True)
def check(
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    num_rows: Int,
    block_size: Int,
    num_blocks: Int,
    window_left: Int,
) -> tuple[Int, Int, Int]:
    """Find the first value that breaks a rule: (what, sequence, table column), or (OK, 0, 0).

    Cost: one comparison for each table entry that attention will read.
    """
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q[0] != 0 or cu_seqlens_q[num_seqs] != num_rows:
        return BAD_CU_SEQLENS, 0, 0
    for s in range(num_seqs):
        seq_len = np.int64(seq_lens[s])
        num_queries = np.int64(cu_seqlens_q[s + 1]) - np.int64(cu_seqlens_q[s])
        end = (seq_len + block_size - 1) // block_size
        what = OK
        if num_queries < 0:
            what = BAD_CU_SEQLENS
        elif seq_len < 0:
            what = NEGATIVE_LENGTH
        elif num_queries > seq_len > 0:
            what = TOO_MANY_ROWS
        elif num_queries > 0 and end > block_table.shape[1]:
            what = TABLE_TOO_NARROW
        if what != OK:
            return what, s, 0
        if num_queries > 0:
            start = _first_visible(seq_len - num_queries, window_left) // block_size
            bad = _find_bad_block(block_table, s, start, end, num_blocks)
            if bad >= 0:
                return BLOCK_OUTSIDE_POOL, s, bad
    return OK, 0, 0


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _exp(x: Float) -> Float:
    """e**x for x <= 0 within 1e-7, 0 below -87, NaN for NaN; of plain arithmetic, so it is SIMD.

    x = n ln 2 + r with an integer n and |r| <= ln(2) / 2: a Taylor polynomial gives e**r.
    """
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits; "reassoc" would
    # remove the addition.
    shifted = np.float32(x * np.float32(1.4426950408889634) + np.float32(12582912.0))
    n = shifted - np.float32(12582912.0)
    # ln 2 in two parts, of which the first has few bits: n times it is exact.
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(math.log(2) - 0.693359375)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    # 2**n: n in the exponent's bits, onto those of 1.0.
    power = np.int32((shifted.view(np.int32) << np.int32(23)) + np.int32(0x3F800000))
    return np.float32(0) if x < np.float32(-87) else p * power.view(np.float32)


@njit(nogil=True, error_model="numpy", fastmath=_FASTMATH, forceinline=True)
def _add_values(
    v: Array,
    v_start: Int,
    v_step: Int,
    num_keys: Int,
    head_dim: Int,
    weights: Array,
    accs: Array,
    lane_start: Int,
) -> None:
    """Add the weighted values of `num_keys` tokens to a lane's acc; all indices are uint64."""
    # Four tokens a pass: fewer loads and stores of acc.
    one, two, four = np.uint64(1), np.uint64(2), np.uint64(4)
    num_quads = num_keys // four
    for quad in range(num_quads):
        j = quad * four
        w0, w1, w2, w3 = weights[j], weights[j + one], weights[j + two], weights[j + two + one]
        v0 = v_start + j * v_step
        v1 = v0 + v_step
        v2 = v1 + v_step
        v3 = v2 + v_step
        for d in range(head_dim):
            accs[lane_start + d] += (
                w0 * v[v0 + d] + w1 * v[v1 + d] + w2 * v[v2 + d] + w3 * v[v3 + d]
            )
    for rest in range(num_quads * four, num_keys):
        weight, start = weights[rest], v_start + rest * v_step
        for d in range(head_dim):
            accs[lane_start + d] += weight * v[start + d]


@njit(nogil=True, error_model="numpy", fastmath=_FASTMATH)
def _attend_block(
    queries: Array,
    lane: Int,
    k: Array,
    k_start: Int,
    k_step: Int,
    v: Array,
    v_start: Int,
    v_step: Int,
    num_keys: Int,
    head_dim: Int,
    scores: Array,
    accs: Array,
    top: Float,
    total: Float,
) -> tuple[Float, Float]:
    """Add `num_keys` tokens of one block to one lane's state; returns the new (top, total).

    The state is acc = sum of exp(score - top) * value and total = sum of exp(score - top).
    All indices are uint64: Numba's handling of negative ones would keep loops from being SIMD.
    """
    lane_start = lane * head_dim
    new_top = top
    for j in range(num_keys):
        start = k_start + j * k_step
        score = np.float32(0)
        for d in range(head_dim):
            score += queries[lane_start + d] * k[start + d]
        scores[j] = score
        new_top = max(new_top, score)

    if new_top > top:
        factor = _exp(top - new_top)
        total *= factor
        for d in range(head_dim):
            accs[lane_start + d] *= factor

    for j in range(num_keys):
        scores[j] = _exp(scores[j] - new_top)
        total += scores[j]

    _add_values(v, v_start, v_step, num_keys, head_dim, scores, accs, lane_start)
    return new_top, total


@njit(nogil=True, error_model="numpy", fastmath=_FASTMATH)
def _attend_tile(
    k: Array,
    k_strides: tuple[int, ...],
    v: Array,
    v_strides: tuple[int, ...],
    block_table: Array,
    s: Int,
    kv_head: Int,
    seq_len: Int,
    block_size: Int,
    first_position: Int,
    num_rows: Int,
    group: Int,
    causal: Bool,
    window_left: Int,
    head_dim: Int,
    queries: Array,
    scores: Array,
    accs: Array,
    tops: Array,
    totals: Array,
) -> None:
    """Add all visible blocks of one KV head of sequence s to the states of a tile's lanes.

    The tile's rows are consecutive from `first_position`; lane = row * group + head.
    """
    start = _first_visible(first_position, window_left)
    end = min(first_position + num_rows, seq_len) if causal else seq_len
    for base in range(start // block_size * block_size, end, block_size):
        block = np.int64(block_table[s, base // block_size])
        k_base = block * k_strides[0] + kv_head * k_strides[1]
        v_base = block * v_strides[0] + kv_head * v_strides[1]
        for row in range(num_rows):
            position = first_position + row
            low = max(base, _first_visible(position, window_left))
            high = min(base + block_size, seq_len)
            if causal:
                high = min(high, position + 1)
            if low >= high:
                continue
            offset = low - base
            for lane in range(row * group, (row + 1) * group):
                tops[lane], totals[lane] = _attend_block(
                    queries,
                    np.uint64(lane),
                    k,
                    np.uint64(k_base + offset * k_strides[2]),
                    np.uint64(k_strides[2]),
                    v,
                    np.uint64(v_base + offset * v_strides[2]),
                    np.uint64(v_strides[2]),
                    np.uint64(high - low),
                    np.uint64(head_dim),
                    scores,
                    accs,
                    tops[lane],
                    totals[lane],
                )


@njit(nogil=True, error_model="numpy", fastmath=_FASTMATH)
def _write_result(accs: Array, lane: Int, top: Float, total: Float, result: Array) -> Float:
    """Write a lane's attention to `result` [D]; returns its LSE."""
    if total == np.float32(0):
        result[:] = np.float32(0)
        return np.float32(-np.inf)
    for d in range(result.shape[0]):
        result[d] = accs[lane * result.shape[0] + d] / total
    return top + np.float32(math.log(total))


@njit(
    (
        *(ITEMS, STRIDES_2, ITEMS, STRIDES_3, ITEMS, STRIDES_3),
        *(INT32_2D, INT32_1D, INT32_1D, INT, INT, FLOAT, BOOL, INT, OUT, LSE),
    ),
    cache=True,
    nogil=True,
    error_model="numpy",
    fastmath=_FASTMATH,
)
def attend(
    q: Array,
    q_strides: tuple[int, ...],
    k: Array,
    k_strides: tuple[int, ...],
    v: Array,
    v_strides: tuple[int, ...],
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    num_kv_heads: Int,
    block_size: Int,
    scale: Float,
    causal: Bool,
    window_left: Int,
    out: Array,
    lse: Array,
) -> None:
    """Write attention of all rows to out [T, Hq, D] and lse [T, Hq]; q, k and v are flattened.

    A tile of rows and the heads of one group share each block of keys and values, which is
    therefore read from memory once per KV head and tile.
    """
    head_dim = out.shape[2]
    group = out.shape[1] // num_kv_heads
    tile_rows = max(1, _TILE // group)
    queries = np.empty(tile_rows * group * head_dim, np.float32)
    accs = np.empty(tile_rows * group * head_dim, np.float32)
    tops = np.empty(tile_rows * group, np.float32)
    totals = np.empty(tile_rows * group, np.float32)
    scores = np.empty(block_size, np.float32)

    for s in range(seq_lens.shape[0]):
        seq_len, end_row = np.int64(seq_lens[s]), np.int64(cu_seqlens_q[s + 1])
        for first_row in range(np.int64(cu_seqlens_q[s]), end_row, tile_rows):
            num_rows = min(tile_rows, end_row - first_row)
            # The last row of a sequence is its last token.
            first_position = seq_len - end_row + first_row
            for kv_head in range(num_kv_heads):
                first_head = kv_head * group
                start = first_row * q_strides[0] + first_head * q_strides[1]
                for lane in range(num_rows * group):
                    source = start + lane // group * q_strides[0] + lane % group * q_strides[1]
                    for d in range(head_dim):
                        queries[lane * head_dim + d] = q[source + d] * scale
                accs[:] = np.float32(0)
                tops[:] = _LOWEST
                totals[:] = np.float32(0)
                _attend_tile(
                    *(k, k_strides, v, v_strides, block_table, s, kv_head, seq_len, block_size),
                    *(first_position, num_rows, group, causal, window_left, head_dim),
                    *(queries, scores, accs, tops, totals),
                )
                for lane in range(num_rows * group):
                    t, head = first_row + lane // group, first_head + lane % group
                    lse[t, head] = _write_result(accs, lane, tops[lane], totals[lane], out[t, head])
