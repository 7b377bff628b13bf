"""How much memory a paged cache takes: every formula, exact, in integers.

Bytes of a token, of a pool and of a block table; blocks and slots of a sequence; where a token lies.
Names carry their units.

Knows arithmetic. Does not know a manager, a model file or how fast a kernel is.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from kvblocks.errors import InvalidSize, NothingLeft
from kvblocks.units import MAX_COUNT, format_bytes, shorten

TABLE_ENTRY_BYTES = 4  # int32
VECTOR_BYTES = 16  # what one load instruction of the x-packed layout reads

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_DTYPE_NAMES = {
    "double": "float64",
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_bytes(dtype: str) -> int:
    """The bytes of one element, as torch names dtypes. `InvalidSize`.

    >>> dtype_bytes("float16"), dtype_bytes("torch.bfloat16"), dtype_bytes("fp8")
    (2, 2, 1)
    """
    name = dtype.removeprefix("torch.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in DTYPE_BYTES:
        raise InvalidSize(f"a dtype must be one of {', '.join(DTYPE_BYTES)}, got {shorten(dtype)}")
    return DTYPE_BYTES[name]


def bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int
) -> int:
    """One key and one value a head and layer. `InvalidSize`.

    >>> bytes_per_token(num_layers=32, num_kv_heads=8, head_dim=128, bytes_per_element=2)
    131072
    """
    require("num_layers", num_layers)
    require("num_kv_heads", num_kv_heads)
    require("head_dim", head_dim)
    require("bytes_per_element", bytes_per_element)
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


def sequence_bytes(num_tokens: int, bytes_per_token: int) -> int:
    """What the tokens themselves take, without a last block's empty slots. `InvalidSize`.

    >>> sequence_bytes(4096, 131_072) // 2**20
    512
    """
    require("num_tokens", num_tokens, least=0)
    require("bytes_per_token", bytes_per_token)
    return num_tokens * bytes_per_token


def weight_bytes(num_parameters: int, bytes_per_parameter: int) -> int:
    """What a model's weights take. `InvalidSize`.

    >>> num_bytes = weight_bytes(8 * 10**9, 2)
    >>> num_bytes, f"{num_bytes / 2**30:.2f} GiB"
    (16000000000, '14.90 GiB')
    """
    require("num_parameters", num_parameters)
    require("bytes_per_parameter", bytes_per_parameter)
    return num_parameters * bytes_per_parameter


def pool_bytes(
    memory_bytes: int,
    *,
    weight_bytes: int,
    workspace_bytes: int,
    reserve_bytes: int,
    utilization: Fraction | float,
) -> int:
    """What is left for keys and values: floor(utilization * memory) - weights - workspace - reserve.

    Nothing has a default: a fraction of 0.9 is somebody's example, not a property of a device. A
    float means the decimal that it prints as. `NothingLeft` names every term; `InvalidSize`.

    >>> pool_bytes(
    ...     80 * 2**30,
    ...     weight_bytes=16 * 10**9,
    ...     workspace_bytes=2 * 2**30,
    ...     reserve_bytes=2**30,
    ...     utilization=0.9,
    ... )
    58088185856
    """
    require("memory_bytes", memory_bytes)
    require("weight_bytes", weight_bytes, least=0)
    require("workspace_bytes", workspace_bytes, least=0)
    require("reserve_bytes", reserve_bytes, least=0)
    # Written so that a NaN is refused too.
    if not 0 < utilization <= 1:
        raise InvalidSize(f"utilization must be above 0 and at most 1, got {utilization}")
    usable_bytes = math.floor(Fraction(str(utilization)) * memory_bytes)
    left = usable_bytes - weight_bytes - workspace_bytes - reserve_bytes
    if left <= 0:
        raise NothingLeft(
            f"nothing is left for keys and values: {float(utilization):g} of {format_bytes(memory_bytes)} is "
            f"{format_bytes(usable_bytes)}, and weights of {format_bytes(weight_bytes)}, workspace of "
            f"{format_bytes(workspace_bytes)} and reserve of {format_bytes(reserve_bytes)} take "
            f"{format_bytes(usable_bytes - left)}"
        )
    return left


def num_blocks(num_tokens: int, block_size: int) -> int:
    """The blocks that hold a sequence. `InvalidSize`.

    >>> [num_blocks(length, 8) for length in (17, 31, 32, 33)]
    [3, 4, 4, 5]
    """
    require("num_tokens", num_tokens, least=0)
    require("block_size", block_size)
    return -(-num_tokens // block_size)


def tail_waste_slots(num_tokens: int, block_size: int) -> int:
    """The slots of a sequence's last block that hold no token, at most block_size - 1. `InvalidSize`.

    >>> [tail_waste_slots(length, 8) for length in (17, 31, 32, 33)]
    [7, 1, 0, 7]
    """
    return num_blocks(num_tokens, block_size) * block_size - num_tokens


def table_bytes(num_entries: int) -> int:
    """An int32 for each block of a table. `InvalidSize`.

    >>> table_bytes(num_blocks(4096, 16))
    1024
    """
    require("num_entries", num_entries, least=0)
    return num_entries * TABLE_ENTRY_BYTES


class Location(NamedTuple):
    """Where a token lies in its sequence's table."""

    logical_block: int
    offset: int


def locate(token_index: int, block_size: int) -> Location:
    """The entry of the block table, and the slot within that block. `InvalidSize`.

    >>> locate(35, 16)
    Location(logical_block=2, offset=3)
    """
    require("token_index", token_index, least=0)
    require("block_size", block_size)
    return Location(*divmod(token_index, block_size))


def num_held_blocks(num_tokens: int, block_size: int, window: int | None) -> int:
    """The blocks of a sequence that hold any of its last `window` tokens; None is all. `InvalidSize`.

    >>> num_held_blocks(1000, 16, window=100), num_held_blocks(1000, 16, window=None)
    (7, 63)
    """
    if window is None:
        return num_blocks(num_tokens, block_size)
    require("window", window)
    return num_blocks(num_tokens, block_size) - max(0, num_tokens - window) // block_size


def num_moved_tokens(num_tokens: int, step: int) -> int:
    """Tokens copied by a contiguous buffer that moves to one `step` longer whenever it is full.

    It grows a token at a time, from nothing; `step` 1 is a cache that is concatenated. `InvalidSize`.

    >>> num_moved_tokens(600, 256), num_moved_tokens(600, 1)  # 256 + 512; 1 + 2 + ... + 599
    (768, 179700)
    """
    num_moves = max(0, num_blocks(num_tokens, step) - 1)
    return step * num_moves * (num_moves + 1) // 2


class PackedShapes(NamedTuple):
    """The x-packed layout of one CUDA kernel of old, not a standard: where 16-byte loads stay whole."""

    x: int  # elements of one 16-byte load
    num_chunks: int  # such loads in a head
    key: tuple[int, int, int, int, int]  # num_blocks, num_kv_heads, head_dim / x, block_size, x
    value: tuple[int, int, int, int]  # num_blocks, num_kv_heads, head_dim, block_size


def packed_shapes(
    num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, bytes_per_element: int
) -> PackedShapes:
    """The shapes of one layer's keys and values. `InvalidSize`.

    >>> packed_shapes(9, 8, 128, 16, bytes_per_element=2)
    PackedShapes(x=8, num_chunks=16, key=(9, 8, 16, 16, 8), value=(9, 8, 128, 16))
    """
    require("num_blocks", num_blocks, least=0)
    require("num_kv_heads", num_kv_heads)
    require("head_dim", head_dim)
    require("block_size", block_size)
    if bytes_per_element not in {1, 2, 4, 8}:
        raise InvalidSize(f"bytes_per_element must be 1, 2, 4 or 8, got {bytes_per_element}")
    x = VECTOR_BYTES // bytes_per_element
    if head_dim % x:
        raise InvalidSize(f"head_dim must be a multiple of x = {x}, got {head_dim}")
    return PackedShapes(
        x,
        head_dim // x,
        (num_blocks, num_kv_heads, head_dim // x, block_size, x),
        (num_blocks, num_kv_heads, head_dim, block_size),
    )


def require(name: str, value: int, least: int = 1) -> None:
    """Refuse what is no count in [least, 2**63). `InvalidSize`."""
    if not least <= value <= MAX_COUNT:
        raise InvalidSize(f"{name} must be in [{least}, 2**63 - 1], got {value}")
