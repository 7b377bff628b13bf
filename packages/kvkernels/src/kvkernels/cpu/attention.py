"""Paged attention over items of work. It knows no validation, no threads and no instructions.

Each lane, which is a query row of one head, is computed by itself in the order of its context:

    a tile, a few whole blocks    scores, softmax and values, carried on from tile to tile
    a piece, PIECE_KEYS keys      starts anew, and is folded into the pieces before it

Tiles and pieces lie at fixed places of the context. Which lanes share a call, which thread computes
a piece, and where blocks lie, so cannot change a bit of a lane. An item covers all pieces of its
lanes, or one, whose state it leaves in a slot for `merge`.

A tile goes over its KV heads in turn, so that a block whose heads lie side by side is read whole,
in the order of its addresses.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numba import from_dtype

from kvkernels.arrays import Array
from kvkernels.cpu import signatures as sig
from kvkernels.cpu.compiled import inlined, kernel
from kvkernels.cpu.lanes import (
    Batch,
    Cache,
    Lanes,
    Rules,
    fold_piece,
    load_queries,
    new_lanes,
    start_lanes,
    start_piece,
    write_result,
    write_state,
)
from kvkernels.cpu.tiles import address_of, cap_tile, score_tile, softmax_tile, value_tile
from kvkernels.cpu.work import (
    Item,
    end_visible,
    first_visible,
    piece_keys_of,
    take,
)

# Scalars are Numba's: int64, bool and float32.
Int: TypeAlias = Any
Bool: TypeAlias = Any
Float: TypeAlias = Any


@inlined
def _stage(cache: Cache, start: Int, num_tokens: Int, head_dim: Int, staged: Array) -> None:
    """Copy a run of tokens whose items are not dense into one whose are."""
    for token in range(num_tokens):
        for d in range(0, head_dim, cache.part):
            source = start + token * cache.steps[2] + d // cache.part * cache.steps[3]
            for i in range(min(cache.part, head_dim - d)):
                staged[token * head_dim + d + i] = cache.items[source + i]


@inlined
def _multiply(
    cache: Cache, lanes: Lanes, num_lanes: Int, block: Int, head: Int, low: Int, high: Int, at: Int
) -> None:
    """Multiply scores or weights by the scales of a block's tokens [low, high), from `at` on."""
    start = block * cache.scale_steps[0] + head * cache.scale_steps[1]
    for lane in range(num_lanes):
        for i in range(low, high):
            scale = cache.scales[start + i * cache.scale_steps[2]]
            lanes.scores[lane * lanes.padded_keys + at + i - low] *= scale


@inlined
def _run(cache: Cache, block: Int, head: Int) -> Int:
    """Return the address of the tokens of a block and KV head."""
    return address_of(cache.items, block * cache.steps[0] + head * cache.steps[1])


@inlined
def _score_block(
    keys: Cache,
    values: Cache,
    batch: Batch,
    lanes: Lanes,
    num_lanes: Int,
    first_lane: Int,
    block: Int,
    head: Int,
    low: Int,
    high: Int,
    column: Int,
    next_block: Int,
    next_head: Int,
) -> None:
    """Score a block's keys [low, high) for the lanes of one KV head, from column `column` on."""
    start = block * keys.steps[0] + head * keys.steps[1] + low * keys.steps[2]
    run, step = address_of(keys.items, start), keys.steps[2]
    if keys.part < batch.head_dim:
        _stage(keys, start, high - low, batch.head_dim, keys.staged)
        run, step = address_of(keys.staged, 0), batch.head_dim
    score_tile(
        lanes.queries,
        lanes.padded_dim,
        keys.items,
        run,
        step,
        high - low,
        batch.head_dim,
        num_lanes,
        first_lane,
        lanes.scores,
        column,
        lanes.padded_keys,
        keys.is_dense,
        _run(values, block, head),
        _run(values, next_block, next_head),
    )
    if keys.scales.size > 0:
        _multiply(keys, lanes, num_lanes, block, head, low, high, column)


@inlined
def _finish_scores(
    rules: Rules,
    batch: Batch,
    lanes: Lanes,
    num_rows: Int,
    base: Int,
    head: Int,
    first_position: Int,
    seq_len: Int,
) -> None:
    """Cap and bias the scores of one KV head, and mask what a row does not see with -inf."""
    group = batch.group
    if rules.softcap > 0:
        cap_tile(lanes.scores, num_rows * group * lanes.padded_keys, rules.softcap)
    for row in range(num_rows):
        position = first_position + row
        low = max(0, first_visible(position, rules.window_left) - base)
        high = max(0, end_visible(position, seq_len, rules.causal) - base)
        for g in range(group):
            start = (row * group + g) * lanes.padded_keys
            if rules.alibi_slopes.size > 0:
                slope = rules.alibi_slopes[head * group + g]
                for i in range(low, min(high, lanes.tile_keys)):
                    lanes.scores[start + i] += slope * np.float32(base + i - position)
            for i in range(min(low, lanes.tile_width)):
                lanes.scores[start + i] = -np.inf
            for i in range(min(high, lanes.tile_keys), lanes.tile_width):
                lanes.scores[start + i] = -np.inf


@inlined
def _add_block(
    keys: Cache,
    values: Cache,
    batch: Batch,
    rules: Rules,
    lanes: Lanes,
    num_rows: Int,
    first_lane: Int,
    block: Int,
    head: Int,
    base: Int,
    low: Int,
    high: Int,
    column: Int,
    is_first: Bool,
    first_position: Int,
    seq_len: Int,
    next_block: Int,
    next_head: Int,
    later_block: Int,
    later_head: Int,
) -> None:
    """Add a block's values [low, high) times their weights to the sums of those rows that see them.

    The block begins at position `base`; the first block of a tile also rescales the sums.
    """
    start = block * values.steps[0] + head * values.steps[1] + low * values.steps[2]
    run, step = address_of(values.items, start), values.steps[2]
    if values.part < batch.head_dim:
        _stage(values, start, high - low, batch.head_dim, values.staged)
        run, step = address_of(values.staged, 0), batch.head_dim
    group = batch.group
    if values.scales.size > 0:
        _multiply(values, lanes, num_rows * group, block, head, low, high, column)
    last_position = first_position + num_rows - 1
    is_uniform = (
        first_visible(last_position, rules.window_left) <= base + low
        and end_visible(first_position, seq_len, rules.causal) >= base + high
    )
    rows_at_once = num_rows if is_uniform else 1
    factors = lanes.factors if is_first else lanes.ones
    for row in range(0, num_rows, rows_at_once):
        begin, end = low, high
        if not is_uniform:
            position = first_position + row
            begin = max(low, first_visible(position, rules.window_left) - base)
            end = max(begin, min(high, end_visible(position, seq_len, rules.causal) - base))
            if begin == end and not is_first:
                continue
        value_tile(
            lanes.scores,
            row * group * lanes.padded_keys + column + begin - low,
            lanes.padded_keys,
            values.items,
            run + (begin - low) * step * values.items.itemsize,
            step,
            end - begin,
            batch.head_dim,
            rows_at_once * group,
            first_lane + row * group,
            factors,
            lanes.sums,
            lanes.padded_dim,
            values.is_dense,
            _run(keys, next_block, next_head),
            _run(keys, later_block, later_head),
        )


@inlined
def _attend_tile(
    keys: Cache,
    values: Cache,
    batch: Batch,
    rules: Rules,
    lanes: Lanes,
    item: Item,
    base: Int,
    start: Int,
    end: Int,
    first_position: Int,
    seq_len: Int,
) -> None:
    """Carry an item's lanes on over the keys [start, end) of the tile that begins at `base`."""
    block_size, group = batch.block_size, batch.group
    num_lanes = item.num_rows * group
    first_column = max(start, base) - base
    end_column = min(end, base + lanes.tile_keys) - base
    first_block = base // block_size
    last_block = (end - 1) // block_size
    begin_i, end_i = first_column // block_size, (end_column + block_size - 1) // block_size
    tile_blocks = lanes.tile_keys // block_size
    for h in range(item.num_kv_heads):
        head = item.first_kv_head + h
        first_lane = h * num_lanes
        # What comes next: the same blocks of the next head, and after the last the next tile's.
        wraps, wraps_later = h + 1 == item.num_kv_heads, h + 2 >= item.num_kv_heads
        next_head = item.first_kv_head if wraps else head + 1
        later_head = item.first_kv_head if wraps_later else head + 2
        for i in range(begin_i, end_i):
            block = np.int64(batch.block_table[item.sequence, first_block + i])
            ahead = min(last_block, first_block + i + tile_blocks)
            next_block = np.int64(batch.block_table[item.sequence, ahead]) if wraps else block
            low = max(first_column - i * block_size, 0)
            high = min(end_column - i * block_size, block_size)
            _score_block(
                *(keys, values, batch, lanes, num_lanes, first_lane, block, head, low, high),
                *(i * block_size + low, next_block, next_head),
            )
        _finish_scores(
            *(rules, batch, lanes, item.num_rows, base, head, first_position, seq_len),
        )
        softmax_tile(
            lanes.scores,
            lanes.padded_keys,
            lanes.tile_width,
            num_lanes,
            first_lane,
            lanes.tops,
            lanes.totals,
            lanes.factors,
        )
        for i in range(begin_i, end_i):
            block = np.int64(batch.block_table[item.sequence, first_block + i])
            ahead = min(last_block, first_block + i + tile_blocks)
            block_ahead = np.int64(batch.block_table[item.sequence, ahead])
            next_block = block_ahead if wraps else block
            later_block = block_ahead if wraps_later else block
            low = max(first_column - i * block_size, 0)
            high = min(end_column - i * block_size, block_size)
            _add_block(
                *(keys, values, batch, rules, lanes, item.num_rows, first_lane, block, head),
                *(base + i * block_size, low, high, i * block_size + low, i == begin_i),
                *(first_position, seq_len, next_block, next_head, later_block, later_head),
            )


@inlined
def _attend_item(
    q: Array,
    q_steps: tuple[Int, Int],
    scale: Float,
    keys: Cache,
    values: Cache,
    batch: Batch,
    rules: Rules,
    lanes: Lanes,
    item: Item,
    shared: Array,
    states: Array,
    out: Array,
    lse: Array,
) -> None:
    """Compute an item's lanes over its pieces, and write their result or their state."""
    seq_len = np.int64(batch.seq_lens[item.sequence])
    end_row = np.int64(batch.cu_seqlens_q[item.sequence + 1])
    # The last row of a sequence is its last token.
    first_position = seq_len - end_row + item.first_row
    last_position = first_position + item.num_rows - 1
    start = first_visible(first_position, rules.window_left)
    end = end_visible(last_position, seq_len, rules.causal)
    piece_keys = piece_keys_of(batch.block_size, seq_len, batch.num_splits)
    load_queries(q, q_steps, scale, item, batch, lanes)
    start_lanes(lanes, item, batch, shared)
    for piece in range(item.first_piece, item.last_piece + 1):
        start_piece(lanes)
        low = max(start, piece * piece_keys)
        high = min(end, (piece + 1) * piece_keys)
        for base in range(low // lanes.tile_keys * lanes.tile_keys, high, lanes.tile_keys):
            _attend_tile(
                *(keys, values, batch, rules, lanes, item, base, low, high),
                *(first_position, seq_len),
            )
        if item.slot >= 0:
            write_state(lanes, item, batch, states)
            return
        fold_piece(lanes, item, batch)
    write_result(lanes, item, batch, rules, out, lse)


def attend(
    q: Array,
    q_steps: tuple[Int, Int],
    k: Array,
    k_steps: tuple[Int, Int, Int, Int],
    k_scales: Array,
    k_scale_steps: tuple[Int, Int, Int],
    v: Array,
    v_steps: tuple[Int, Int, Int, Int],
    v_scales: Array,
    v_scale_steps: tuple[Int, Int, Int],
    parts: tuple[Int, Int],
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    sizes: tuple[Int, Int, Int],
    scale: Float,
    causal: Bool,
    window_left: Int,
    softcap: Float,
    alibi_slopes: Array,
    sinks: Array,
    v_scale: Float,
    items: Array,
    next_item: Array,
    shared: Array,
    states: Array,
    out: Array,
    lse: Array,
) -> None:
    """Compute items until none is left, `next_item` being shared by all threads that do.

    Arrays of items are flattened, see `Cache` for the rest. `sizes` are num_kv_heads, block_size and
    num_splits. Lanes begin with the states `shared`, if it has any. Results go to out [T, Hq, D] and
    lse [T, Hq], states of single pieces to `states`.
    """
    num_kv_heads, block_size, num_splits = sizes
    head_dim, group = out.shape[2], out.shape[1] // num_kv_heads
    batch = Batch(
        *(block_table, seq_lens, cu_seqlens_q, num_kv_heads, group, head_dim, block_size),
        num_splits,
    )
    staged_k = np.empty(block_size * head_dim if parts[0] < head_dim else 0, k.dtype)
    staged_v = np.empty(block_size * head_dim if parts[1] < head_dim else 0, v.dtype)
    is_dense_k = parts[0] >= head_dim and k_steps[2] == head_dim
    is_dense_v = parts[1] >= head_dim and v_steps[2] == head_dim
    keys = Cache(k, k_steps, parts[0], k_scales, k_scale_steps, staged_k, np.int64(is_dense_k))
    values = Cache(v, v_steps, parts[1], v_scales, v_scale_steps, staged_v, np.int64(is_dense_v))
    rules = Rules(causal, window_left, softcap, alibi_slopes, sinks, v_scale)
    lanes = new_lanes(batch, items)
    while True:
        n = take(next_item)
        if n >= items.shape[0]:
            return
        row = items[n]
        item = Item(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])
        _attend_item(
            *(q, q_steps, scale, keys, values, batch, rules, lanes, item, shared, states, out, lse),
        )


@cache
def attend_for(item: Any) -> Callable[..., None]:
    """Return `attend` for caches of items of a NumPy type; the first call compiles or loads it."""
    cached = sig.items(from_dtype(np.dtype(item)))
    floats = sig.items()
    return kernel(
        attend,
        (
            *(floats, sig.ints(2)),
            *(cached, sig.ints(4), floats, sig.ints(3)) * 2,
            sig.ints(2),
            *(sig.INT32_2D, sig.INT32_1D, sig.INT32_1D, sig.ints(3)),
            *(sig.FLOAT, sig.BOOL, sig.INT, sig.FLOAT, floats, floats, sig.FLOAT),
            *(sig.ITEM_TABLE, sig.COUNTER, sig.STATES, sig.STATES, sig.OUT, sig.LSE),
        ),
    )
