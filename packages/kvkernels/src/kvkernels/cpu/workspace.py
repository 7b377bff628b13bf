"""The memory that a call works in: how much it is at most, and how it is shared out.

It knows sizes. Where no workspace is given, each array is made where it is needed.
"""

import math
from typing import Any

import numpy as np

from kvkernels.arrays import Array, require, require_writable
from kvkernels.cpu import work
from kvkernels.cpu.steps import Sizes, shared_keys
from kvkernels.errors import ShapeError

_UINT8 = np.dtype(np.uint8)
_FLOAT_SIZE = 4
# Of every array, so that vectors lie in one line of the processor's cache.
_ALIGNMENT = 64


def num_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the bytes of a workspace for float32 arrays of these shapes, wherever it begins."""
    return _ALIGNMENT + sum(map(_padded, shapes.values()))


def _padded(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * _FLOAT_SIZE // _ALIGNMENT) * _ALIGNMENT


def share_out(workspace: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return float32 arrays of these shapes, in the caller's workspace if there is one."""
    if workspace is None:
        return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    memory = require("workspace", workspace, _UINT8, "num_bytes")
    require_writable("workspace", memory)
    needed = num_bytes(shapes)
    if memory.size < needed or not memory.flags.c_contiguous:
        rule = f"workspace must be {needed} dense bytes for this call"
        raise ShapeError(f"{rule}, got {memory.size} with a stride of {memory.strides[0]}")
    start = -memory.ctypes.data % _ALIGNMENT
    arrays = {}
    for name, shape in shapes.items():
        end = start + math.prod(shape) * _FLOAT_SIZE
        arrays[name] = memory[start:end].view(np.float32).reshape(shape)
        start += _padded(shape)
    return arrays


def largest_shapes(
    sizes: Sizes,
    *,
    max_num_rows: int,
    max_seq_len: int,
    has_float_queries: bool,
    num_splits: int,
    num_shared_tokens: int,
    num_threads: int,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that no batch within the limits goes beyond.

    States are left by what is split over the context: on one thread nothing is, and on more threads
    only what has more than its share of the batch, of which there are few.
    """
    width, lanes = sizes.head_dim + 2, max_num_rows * sizes.num_heads
    num_shared = shared_keys(num_shared_tokens, sizes.block_size)
    num_pieces = max_pieces(max_seq_len - num_shared, sizes.block_size, num_splits)
    split_rows = 0
    if num_threads > 1 and num_pieces > 1:
        tile_rows = max(1, work.MAX_LANES // sizes.group)
        split_rows = min(max_num_rows, work.max_split_tiles(num_threads) * tile_rows)
    shapes = {"lse": (lanes,), "states": (split_rows * sizes.num_heads * num_pieces, width)}
    if not has_float_queries:
        shapes |= {"q": (lanes, sizes.head_dim), "out": (lanes, sizes.head_dim)}
    if num_shared:
        shapes["shared"] = (lanes, width)
        shapes["shared_states"] = (lanes * max_pieces(num_shared, sizes.block_size, 0), width)
    return shapes


def max_pieces(num_keys: int, block_size: int, num_splits: int) -> int:
    """Return into how many pieces a context of at most `num_keys` is cut."""
    if num_splits:
        return min(num_splits, -(-num_keys // int(work.tile_keys_of(block_size))))
    return -(-num_keys // int(work.piece_keys_of(block_size, 0, 0)))
