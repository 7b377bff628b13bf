"""The values that kernels go by, lengths, tables and slots: what breaks a rule, and its sentence.

It knows what the kernels `check` and `find_bad_slot` found; nothing is written before they found nothing.
"""

from typing import NoReturn

import numpy as np

from kvkernels.arrays import Array
from kvkernels.cpu import work
from kvkernels.cpu.cache import find_bad_slot
from kvkernels.errors import ArgumentError, PoolIndexError, ShapeError
from kvkernels.inputs import Batch


def check_batch(
    batch: Batch, num_rows: int, num_blocks: int, block_size: int, window_left: int
) -> None:
    """Check the lengths and offsets of a batch, and every table entry that its rows would read."""
    tables, lengths, offsets = batch.block_table, batch.seq_lens, batch.offsets
    found = work.check(tables, lengths, offsets, num_rows, block_size, num_blocks, window_left)
    if found[0] != work.OK:
        _refuse(found, batch, num_blocks, block_size)


def check_shared(batch: Batch, num_shared: int, block_size: int) -> None:
    """Check that all rows of a batch come after `num_shared` keys, which lie in the same blocks."""
    if num_shared < 0 or num_shared % block_size:
        rule = f"num_shared_tokens must be a multiple of the block size, {block_size}"
        raise ArgumentError(f"{rule}, got {num_shared}")
    before = batch.seq_lens - np.diff(batch.offsets)
    short = np.flatnonzero(before < num_shared)
    if short.size:
        s = int(short[0])
        rule = "every row of a cascade must come after the shared tokens"
        raise ArgumentError(
            f"{rule}, {num_shared}, got a first position of {before[s]} for sequence {s}"
        )
    tables = batch.block_table[:, : num_shared // block_size]
    other = np.flatnonzero((tables != tables[:1]).any(axis=1))
    if other.size:
        rule = f"the first {tables.shape[1]} blocks of all sequences of a cascade must be the same"
        raise ArgumentError(f"{rule}, got others for sequence {other[0]}")


def check_slots(slots: Array, num_slots: int) -> None:
    """Check slots to write to: -1, or in the pool."""
    bad = find_bad_slot(slots, num_slots)
    if bad >= 0:
        rule = f"slots must be -1 or in [0, {num_slots}), the pool"
        raise PoolIndexError(f"{rule}, got {int(slots[bad])} for token {bad}")


def check_slots_once(slots: Array) -> None:
    """Check for debugging that no slot comes twice: on a GPU either token may stay."""
    written = np.sort(slots[slots >= 0])
    twice = np.flatnonzero(written[1:] == written[:-1])
    if twice.size:
        raise ArgumentError(f"a slot must be written once, got {int(written[twice[0]])} twice")


def _refuse(
    found: tuple[int, int, int], batch: Batch, num_blocks: int, block_size: int
) -> NoReturn:
    """Raise the error for what the kernel's check found: (what, sequence, table column)."""
    what, s, i = found
    tables, lengths, offsets = batch.block_table, batch.seq_lens, batch.offsets
    if what == work.BAD_CU_SEQLENS:
        rule = "cu_seqlens_q must start at 0, never decrease and end at the number of rows of q"
        shown = np.array2string(offsets, threshold=16, separator=", ")
        raise ArgumentError(f"{rule}, got {shown}")
    length = int(lengths[s])
    if what == work.NEGATIVE_LENGTH:
        raise ArgumentError(f"seq_lens must not be negative, got {length} for sequence {s}")
    if what == work.TOO_MANY_ROWS:
        num_queries = int(offsets[s + 1]) - int(offsets[s])
        rule = "a sequence must not have more rows in q than tokens, unless it has length 0"
        raise ArgumentError(f"{rule}, got {num_queries} rows and {length} tokens for sequence {s}")
    if what == work.TABLE_TOO_NARROW:
        rule = "block_table must have an entry for each block of a sequence"
        values = f"got {tables.shape[1]} entries of block size {block_size} for {length} tokens"
        raise ShapeError(f"{rule}, {values} of sequence {s}")
    rule = f"block ids in use must be in [0, {num_blocks}), the pool"
    raise PoolIndexError(f"{rule}, got {int(tables[s, i])} for block {i} of sequence {s}")
