"""The lanes of an item of work: their queries, their state, and their results.

A lane is a query row of one head. Its state is

    top      the greatest score so far
    total    the sum of exp(score - top)
    sum      the sum of exp(score - top) * value

It knows how states are folded and finished, and not how they come from keys and values.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvkernels.arrays import Array
from kvkernels.cpu.compiled import allocating, inlined
from kvkernels.cpu.tiles import KEYS_AT_ONCE
from kvkernels.cpu.vectors import WIDTH
from kvkernels.cpu.work import Item, tile_keys_of

# Scalars are Numba's: int64, bool and float32.
Int: TypeAlias = Any
Bool: TypeAlias = Any
Float: TypeAlias = Any

# Below every score, and finite, so that the first rescaling computes no inf - inf.
_LOWEST = np.float32(np.finfo(np.float32).min)


class Cache(NamedTuple):
    """The keys or the values of a layer: item (block, head, token, d) and where it is.

    It is at block * steps[0] + head * steps[1] + token * steps[2] + d // part * steps[3] + d % part:
    parts of `part` items are dense. Scales are of tokens, at block, head and token times their own
    steps; without items there are none.
    """

    items: Array
    steps: tuple[Int, Int, Int, Int]
    part: Int
    scales: Array
    scale_steps: tuple[Int, Int, Int]
    staged: Array
    is_dense: Int


class Batch(NamedTuple):
    """Where the tokens of a batch are, and the sizes of a cache."""

    block_table: Array
    seq_lens: Array
    cu_seqlens_q: Array
    num_kv_heads: Int
    group: Int
    head_dim: Int
    block_size: Int
    num_splits: Int


class Rules(NamedTuple):
    """What a row sees, and what is made of its scores. Arrays without items say nothing."""

    causal: Bool
    window_left: Int
    softcap: Float
    alibi_slopes: Array
    sinks: Array
    v_scale: Float


class Lanes(NamedTuple):
    """A worker's arrays (see `tiles`), and the state of the pieces before, kept_*.

    A tile has `tile_keys` keys, which are `tile_width` scores with those that pad it to vectors.
    """

    queries: Array
    scores: Array
    sums: Array
    totals: Array
    tops: Array
    factors: Array
    ones: Array
    kept_sums: Array
    kept_totals: Array
    kept_tops: Array
    padded_dim: Int
    padded_keys: Int
    tile_keys: Int
    tile_width: Int


@inlined
def _round_up(number: Int, multiple: Int) -> Int:
    return (number + multiple - 1) // multiple * multiple


@allocating
def new_lanes(batch: Batch, items: Array) -> Lanes:
    """Make the arrays of a worker, for the largest of the items."""
    lanes, all_lanes = np.int64(0), np.int64(0)
    for n in range(items.shape[0]):
        num_lanes = items[n, 2] * batch.group
        lanes, all_lanes = max(lanes, num_lanes), max(all_lanes, num_lanes * items[n, 4])
    padded_dim = _round_up(batch.head_dim, WIDTH)
    tile_keys = tile_keys_of(batch.block_size)
    tile_width = _round_up(tile_keys, WIDTH)
    # The last scores of a block are written KEYS_AT_ONCE at a time.
    padded_keys = tile_width if batch.block_size % KEYS_AT_ONCE == 0 else tile_width + WIDTH
    return Lanes(
        np.empty(all_lanes * padded_dim, np.float32),
        np.empty(lanes * padded_keys, np.float32),
        np.empty(all_lanes * padded_dim, np.float32),
        np.empty(all_lanes * WIDTH, np.float32),
        np.empty(all_lanes, np.float32),
        np.empty(all_lanes, np.float32),
        np.ones(all_lanes, np.float32),
        np.empty(all_lanes * padded_dim, np.float32),
        np.empty(all_lanes, np.float32),
        np.empty(all_lanes, np.float32),
        padded_dim,
        padded_keys,
        tile_keys,
        tile_width,
    )


@inlined
def load_queries(
    q: Array, q_steps: tuple[Int, Int], scale: Float, item: Item, batch: Batch, lanes: Lanes
) -> None:
    """Write the scaled queries of an item: lanes by KV head, then row, then head of the group."""
    lane = 0
    for head in range(item.first_kv_head, item.first_kv_head + item.num_kv_heads):
        for row in range(item.first_row, item.first_row + item.num_rows):
            for g in range(batch.group):
                start = row * q_steps[0] + (head * batch.group + g) * q_steps[1]
                target = lane * lanes.padded_dim
                for d in range(batch.head_dim):
                    lanes.queries[target + d] = q[start + d] * scale
                for d in range(batch.head_dim, lanes.padded_dim):
                    lanes.queries[target + d] = np.float32(0)
                lane += 1


@inlined
def start_lanes(lanes: Lanes, item: Item, batch: Batch, shared: Array) -> None:
    """Begin with the state of no key, or with that of the keys that all sequences share.

    `shared` [T * Hq, D + 2] holds sum, total and top; without rows nothing is shared.
    """
    lanes.kept_sums[:] = np.float32(0)
    lanes.kept_totals[:] = np.float32(0)
    lanes.kept_tops[:] = _LOWEST
    if shared.shape[0] == 0:
        return
    lane, head_dim = 0, batch.head_dim
    for head in range(item.first_kv_head, item.first_kv_head + item.num_kv_heads):
        for row in range(item.first_row, item.first_row + item.num_rows):
            for g in range(batch.group):
                state = shared[(row * batch.num_kv_heads + head) * batch.group + g]
                start = lane * lanes.padded_dim
                for d in range(head_dim):
                    lanes.kept_sums[start + d] = state[d]
                lanes.kept_totals[lane] = state[head_dim]
                lanes.kept_tops[lane] = state[head_dim + 1]
                lane += 1


@inlined
def keep_lanes(lanes: Lanes, item: Item, batch: Batch, shared: Array) -> None:
    """Write what is kept of an item's pieces, for `start_lanes` to begin with."""
    lane, head_dim = 0, batch.head_dim
    for head in range(item.first_kv_head, item.first_kv_head + item.num_kv_heads):
        for row in range(item.first_row, item.first_row + item.num_rows):
            for g in range(batch.group):
                state = shared[(row * batch.num_kv_heads + head) * batch.group + g]
                start = lane * lanes.padded_dim
                for d in range(head_dim):
                    state[d] = lanes.kept_sums[start + d]
                state[head_dim] = lanes.kept_totals[lane]
                state[head_dim + 1] = lanes.kept_tops[lane]
                lane += 1


@inlined
def start_piece(lanes: Lanes) -> None:
    """Begin a piece: the state of no key."""
    lanes.sums[:] = np.float32(0)
    lanes.totals[:] = np.float32(0)
    lanes.tops[:] = _LOWEST


@inlined
def total_of(lanes: Lanes, lane: Int) -> Float:
    """Return the total of a lane's piece, whose parts are added in one order."""
    total = np.float32(0)
    for i in range(WIDTH):
        total += lanes.totals[lane * WIDTH + i]
    return total


@inlined
def fold(
    lanes: Lanes, lane: Int, head_dim: Int, sums: Array, start: Int, total: Float, top: Float
) -> None:
    """Fold a piece's state, with sums[start:], into what is kept of the pieces before it."""
    if total == np.float32(0):
        return
    new_top = max(top, lanes.kept_tops[lane])
    if top != top:  # noqa: PLR0124  # NaN
        new_top = top
    before = np.float32(math.exp(lanes.kept_tops[lane] - new_top))
    added = np.float32(math.exp(top - new_top))
    lanes.kept_totals[lane] = lanes.kept_totals[lane] * before + total * added
    lanes.kept_tops[lane] = new_top
    target = lane * lanes.padded_dim
    for d in range(head_dim):
        kept = lanes.kept_sums[target + d] * before
        lanes.kept_sums[target + d] = kept + sums[start + d] * added


@inlined
def fold_piece(lanes: Lanes, item: Item, batch: Batch) -> None:
    """Fold the piece just computed into what is kept."""
    for lane in range(item.num_kv_heads * item.num_rows * batch.group):
        start, total = lane * lanes.padded_dim, total_of(lanes, lane)
        fold(lanes, lane, batch.head_dim, lanes.sums, start, total, lanes.tops[lane])


@inlined
def write_state(lanes: Lanes, item: Item, batch: Batch, states: Array) -> None:
    """Write the states of the piece just computed to states [slots, D + 2]: sum, total and top."""
    for lane in range(item.num_kv_heads * item.num_rows * batch.group):
        state, start = states[item.slot + lane], lane * lanes.padded_dim
        for d in range(batch.head_dim):
            state[d] = lanes.sums[start + d]
        state[batch.head_dim] = total_of(lanes, lane)
        state[batch.head_dim + 1] = lanes.tops[lane]


@inlined
def write_result(
    lanes: Lanes, item: Item, batch: Batch, rules: Rules, out: Array, lse: Array
) -> None:
    """Write the attention of an item's lanes to out [T, Hq, D] and lse [T, Hq].

    A sink takes its share of the weights and has no value; the LSE is that of the keys alone.
    """
    lane = 0
    for head in range(item.first_kv_head, item.first_kv_head + item.num_kv_heads):
        for row in range(item.first_row, item.first_row + item.num_rows):
            for g in range(batch.group):
                query_head = head * batch.group + g
                total, top = lanes.kept_totals[lane], lanes.kept_tops[lane]
                start = lane * lanes.padded_dim
                lane += 1
                if total == np.float32(0):
                    out[row, query_head, :] = np.float32(0)
                    lse[row, query_head] = np.float32(-np.inf)
                    continue
                log_sum = top + np.float32(math.log(total))
                factor = rules.v_scale
                if rules.sinks.size > 0:
                    sink = np.float64(rules.sinks[query_head]) - np.float64(log_sum)
                    factor = np.float32(np.float64(factor) / (1.0 + math.exp(sink)))
                for d in range(batch.head_dim):
                    out[row, query_head, d] = lanes.kept_sums[start + d] / total * factor
                lse[row, query_head] = log_sum
