"""How a batch is cut into items of work, and the checks of what the cuts depend on.

It knows lengths, offsets and tables, and no arithmetic of attention. An item is the work that one
thread does in one go: some rows of one sequence, some KV heads, and some pieces of the context. No
bit of a result depends on how a batch is cut: rows and heads are computed by themselves, and pieces
lie at fixed places of the context and are folded in their order, whoever computes them.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkernels.arrays import Array
from kvkernels.cpu.compiled import compiled, inlined
from kvkernels.cpu.signatures import BOOL, INT, INT32_1D, INT32_2D

# Scalars are Numba's int64 and bool.
Int: TypeAlias = Any
Bool: TypeAlias = Any

# What `check` found.
OK = 0
BAD_CU_SEQLENS = 1
NEGATIVE_LENGTH = 2
TOO_MANY_ROWS = 3
TABLE_TOO_NARROW = 4
BLOCK_OUTSIDE_POOL = 5

# Query rows times heads of a group that share the reading of one run of keys.
MAX_LANES = 32
# Lanes of an item, if they can be cut by KV heads: their queries and sums stay near the processor.
_MAX_ITEM_LANES = 128
# A softmax goes over so many keys at least, and a context is cut at multiples of so many.
TILE_KEYS = 16
PIECE_KEYS = 1024
# An item is worth handing to another thread from so many (key, KV head) on.
_LEAST_COST = 256
# Of so many items for each thread the last ones end at about the same time.
_ITEMS_A_THREAD = 4


class Item(NamedTuple):
    """One item of work; `slot` is where the state of its only piece goes, or -1 for the result."""

    sequence: Int
    first_row: Int
    num_rows: Int
    first_kv_head: Int
    num_kv_heads: Int
    first_piece: Int
    last_piece: Int
    slot: Int


@inlined
def first_visible(position: Int, window_left: Int) -> Int:
    """Return the first position that a row at `position` sees."""
    return max(0, position - window_left) if window_left >= 0 else 0


@inlined
def end_visible(position: Int, seq_len: Int, causal: Bool) -> Int:
    """Return the position after the last that a row at `position` sees."""
    return min(position + 1, seq_len) if causal else seq_len


@inlined
def tile_keys_of(block_size: Int) -> Int:
    """Return how many keys one softmax goes over: whole blocks."""
    return block_size * max(1, TILE_KEYS // block_size)


@inlined
def piece_keys_of(block_size: Int, seq_len: Int, num_splits: Int) -> Int:
    """Return how many keys a piece of a context has: whole tiles."""
    tile_keys = tile_keys_of(block_size)
    if num_splits == 0:
        return tile_keys * max(1, PIECE_KEYS // tile_keys)
    num_tiles = (seq_len + tile_keys - 1) // tile_keys
    return tile_keys * max(1, (num_tiles + num_splits - 1) // num_splits)


@inlined
def _find_bad_block(block_table: Array, s: Int, start: Int, end: Int, num_blocks: Int) -> Int:
    """Return the first column in [start, end) whose block is outside the pool, or -1."""
    for i in range(start, end):
        if block_table[s, i] < 0 or block_table[s, i] >= num_blocks:
            return i
    return -1


@compiled(INT32_2D, INT32_1D, INT32_1D, INT, INT, INT, INT)
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
            start = first_visible(seq_len - num_queries, window_left) // block_size
            bad = _find_bad_block(block_table, s, start, end, num_blocks)
            if bad >= 0:
                return BLOCK_OUTSIDE_POOL, s, bad
    return OK, 0, 0


@inlined
def _parts(cost: Int, target: Int, num_kv_heads: Int, num_pieces: Int) -> tuple[Int, Bool]:
    """Return how many KV heads an item gets, and whether each piece is an item of its own."""
    num_parts = (cost + target - 1) // target
    if num_parts <= 1:
        return num_kv_heads, False
    # Pieces first: an item that has all heads reads whole blocks, in the order of their addresses.
    if num_pieces > 1:
        num_parts = (num_parts + num_pieces - 1) // num_pieces
    head_parts = min(num_kv_heads, num_parts)
    return (num_kv_heads + head_parts - 1) // head_parts, num_pieces > 1


@compiled(INT32_1D, INT32_1D, INT, INT, INT, BOOL, INT, INT, INT, INT, BOOL)
def cut(  # noqa: C901  # three passes over one nest of loops
    seq_lens: Array,
    cu_seqlens_q: Array,
    num_kv_heads: Int,
    group: Int,
    block_size: Int,
    causal: Bool,
    window_left: Int,
    num_splits: Int,
    num_threads: Int,
    num_shared: Int,
    all_apart: Bool,
) -> Array:
    """Cut a batch into items: int64 [N, 8], the fields of `Item`.

    Items of one tile of rows and heads stand together, in the order of their pieces. The first
    `num_shared` keys, whole pieces, are left out; with `all_apart` every piece is an item of its own.
    """
    tile_rows = max(1, MAX_LANES // group)
    target = np.int64(1 << 62)
    items = np.empty((0, 8), np.int64)
    # First the costs are added up, then the items are counted, and then they are written.
    for phase in range(3):
        total, count, num_slots = np.int64(0), np.int64(0), np.int64(0)
        for s in range(seq_lens.shape[0]):
            seq_len, end_row = np.int64(seq_lens[s]), np.int64(cu_seqlens_q[s + 1])
            piece_keys = piece_keys_of(block_size, seq_len, num_splits)
            for first_row in range(np.int64(cu_seqlens_q[s]), end_row, tile_rows):
                num_rows = min(tile_rows, end_row - first_row)
                position = seq_len - end_row + first_row
                start = max(first_visible(position, window_left), num_shared)
                end = end_visible(position + num_rows - 1, seq_len, causal)
                first_piece, last_piece = start // piece_keys, max(0, end - 1) // piece_keys
                cost = max(0, end - start) * num_kv_heads * num_rows
                total += cost
                if phase == 0:
                    continue
                num_heads, apart = _parts(cost, target, num_kv_heads, last_piece - first_piece + 1)
                apart = apart or all_apart
                num_heads = min(num_heads, max(1, _MAX_ITEM_LANES // (num_rows * group)))
                for head in range(0, num_kv_heads, num_heads):
                    heads = min(num_heads, num_kv_heads - head)
                    step = 1 if apart else last_piece - first_piece + 1
                    for piece in range(first_piece, last_piece + 1, step):
                        if phase == 2:
                            row = items[count]
                            row[0], row[1], row[2], row[3] = s, first_row, num_rows, head
                            row[4], row[5], row[6] = heads, piece, piece + step - 1
                            row[7] = num_slots if apart else -1
                        count += 1
                        if apart:
                            num_slots += heads * num_rows * group
        if phase == 0 and num_threads > 1:
            target = max(np.int64(_LEAST_COST), total // (num_threads * _ITEMS_A_THREAD))
        if phase == 1:
            items = np.empty((count, 8), np.int64)
    return items


def _take(_context: Any, counter: Any) -> Any:
    """Return counter[0] and add 1 to it: no two threads get the same number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


# Numba gives the function that is called another signature.
take: Any = intrinsic(_take)


def max_split_tiles(num_threads: int) -> int:
    """Return how many tiles of rows can be split: those that cost more than a share of the batch."""
    return num_threads * _ITEMS_A_THREAD - 1
