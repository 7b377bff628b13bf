"""The arguments of the public calls, and the rules that bind them on every device.

It knows numbers, shapes and lists of copies, and neither whose arrays they are nor what is computed. What
is refused here is refused on a CPU and on a GPU by the same sentence.
"""

import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvkernels.errors import ArgumentError, PoolIndexError, ShapeError

CACHE_AXES = "num_blocks, num_kv_heads, block_size, head_dim"
SCALE_AXES = "num_blocks, num_kv_heads, block_size"
DEBUG_VARIABLE = "KVKERNELS_DEBUG"
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `paged_attention` as they were passed, and `num_shared_tokens` of a cascade."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any = None
    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    kv_dtype: str | None = None
    num_splits: int = 0
    deterministic: bool = False
    out: Any = None
    lse: Any = None
    return_lse: bool = False
    workspace: Any = None
    stream: Any = None
    debug: bool | None = None
    num_shared_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCall:
    """The arguments of `write_kv` as they were passed."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    slot_mapping: Any
    cos: Any = None
    sin: Any = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    kv_dtype: str | None = None
    stream: Any = None
    debug: bool | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The numbers of an attention call, checked; the scales of caches are 1 where they are arrays."""

    scale: float
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    num_splits: int = 0


def check_options(call: AttentionCall, head_dim: int) -> Options:
    """Check the numbers of a call."""
    scale = head_dim**-0.5 if call.scale is None else float(call.scale)
    if not is_finite_float32(scale):
        raise ArgumentError(f"scale must be a finite float32, got {scale}")
    window_left = operator.index(call.window_left)
    if window_left < -1:
        rule = "window_left must be a number of keys, or -1 for all"
        raise ArgumentError(f"{rule}, got {window_left}")
    softcap = float(call.softcap)
    if not (is_finite_float32(softcap) and softcap >= 0):
        raise ArgumentError(f"softcap must be a finite float32 and not negative, got {softcap}")
    num_splits = operator.index(call.num_splits)
    if num_splits < 0:
        raise ArgumentError(f"num_splits must not be negative, got {num_splits}")
    if call.deterministic and num_splits:
        rule = "deterministic results need num_splits=0, splits of a fixed size"
        raise ArgumentError(f"{rule}, got {num_splits}")
    if call.lse is not None and not call.return_lse:
        raise ArgumentError("lse needs return_lse=True, got return_lse=False")
    k_scale, v_scale = number_of("k_scale", call.k_scale), number_of("v_scale", call.v_scale)
    return Options(
        scale,
        bool(call.causal),
        window_left,
        softcap,
        1.0 if k_scale is None else k_scale,
        1.0 if v_scale is None else v_scale,
        num_splits,
    )


def check_heads(queries: Shape, pool: Shape) -> None:
    """Check that the heads of q [T, Hq, D] fit those of caches [num_blocks, Hkv, block_size, D]."""
    _, num_heads, head_dim = queries
    _, num_kv_heads, _, cache_dim = pool
    if head_dim != cache_dim:
        raise ShapeError(f"q and the caches must agree on head_dim, got {head_dim} and {cache_dim}")
    check_group(num_heads, num_kv_heads)


def check_group(num_heads: int, num_kv_heads: int) -> None:
    """Check that query heads are shared out evenly among KV heads."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        rule = "num_heads must be a positive multiple of num_kv_heads"
        raise ShapeError(f"{rule}, got {num_heads} and {num_kv_heads}")


def check_rows(num_rows: int, num_seqs: int) -> None:
    """Check a batch without cu_seqlens_q: one row for each sequence."""
    if num_rows != num_seqs:
        rule = "q must have one row for each sequence unless cu_seqlens_q is given"
        raise ShapeError(f"{rule}, got {num_rows} rows and {num_seqs} sequences")


def check_angles(cos: Shape, head_dim: int) -> None:
    """Check how much of a key angles [T, rotary_dim / 2] rotate."""
    if not 1 <= cos[1] <= head_dim // 2:
        rule = f"rotary_dim must be from 2 to head_dim, {head_dim}"
        raise ShapeError(f"{rule}, got {2 * cos[1]}")


def is_debugging(debug: bool | None) -> bool:  # noqa: FBT001  # the argument of the public calls
    """Whether a call checks what costs time: its own argument, or else KVKERNELS_DEBUG."""
    if debug is None:
        return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}
    return bool(debug)


def number_of(name: str, scale: Any) -> float | None:
    """Return a scale that is one finite number, or None if it is an array."""
    shape = scale.shape if hasattr(scale, "shape") else getattr(scale, "__len__", None)
    if shape is not None and shape != ():
        return None
    number = float(scale)
    if not is_finite_float32(number):
        raise ArgumentError(f"{name} must be a finite float32, got {number}")
    return number


def is_finite_float32(number: float) -> bool:
    """Whether a number is finite as what the kernels compute with."""
    return math.isfinite(number) and abs(number) <= _LARGEST_FLOAT32


class Copy(NamedTuple):
    """The first `num_tokens` positions of a block, and where they go."""

    source: int
    destination: int
    num_tokens: int


def check_copies(copies: Iterable[Any], num_blocks: int, block_size: int) -> list[Copy]:
    """Check copies within one pool: ids, lengths, and that they do not depend on their order."""
    checked = [_copy_of(copy) for copy in copies]
    sources = {copy.source for copy in checked}
    for copy in checked:
        for block in copy[:2]:
            _check_block("blocks to copy", block, num_blocks, "the pool", copy)
        if copy.destination in sources:
            rule = "the destination of a copy must not be a source"
            raise ArgumentError(f"{rule}, got block {copy.destination} as both")
    _check_lengths(checked, block_size)
    return checked


def check_swaps(
    copies: Iterable[Any], num_sources: int, num_destinations: int, block_size: int
) -> list[Copy]:
    """Check copies from one pool to another."""
    checked = [_copy_of(copy) for copy in copies]
    for copy in checked:
        _check_block("blocks to copy from", copy.source, num_sources, "the sources", copy)
        _check_block(
            "blocks to copy to", copy.destination, num_destinations, "the destinations", copy
        )
    _check_lengths(checked, block_size)
    return checked


def _copy_of(copy: Any) -> Copy:
    try:
        return Copy(*map(operator.index, copy))
    except (TypeError, ValueError) as error:
        rule = "copies must be (source, destination, num_tokens) triples of integers"
        raise ArgumentError(f"{rule}, got {copy!r}") from error


def _check_block(what: str, block: int, num_blocks: int, pool: str, copy: Copy) -> None:
    if not 0 <= block < num_blocks:
        rule = f"{what} must be in [0, {num_blocks}), {pool}"
        raise PoolIndexError(f"{rule}, got {block} in ({copy.source}, {copy.destination})")


def _check_lengths(copies: Sequence[Copy], block_size: int) -> None:
    """Check numbers of tokens, and that no block is written twice."""
    destinations: set[int] = set()
    for source, destination, num_tokens in copies:
        if not 0 <= num_tokens <= block_size:
            rule = f"num_tokens must be in [0, {block_size}], the block size"
            raise ArgumentError(f"{rule}, got {num_tokens} in ({source}, {destination})")
        if destination in destinations:
            rule = "a block must be the destination of one copy only"
            raise ArgumentError(f"{rule}, got block {destination} twice")
        destinations.add(destination)


def check_pools(names: str, shapes: Sequence[Shape]) -> None:
    """Check the shapes of caches of one pool, whose blocks move together; `names` is the argument."""
    if not shapes:
        raise ShapeError(f"{names} must hold at least one array, got none")
    for n, shape in enumerate(shapes):
        if not 3 <= len(shape) <= 5:
            axes = f"[{CACHE_AXES}], or that of x-packed keys or of scales"
            raise ShapeError(f"{names}[{n}] must have the shape {axes}, got {list(shape)}")
        own, first = blocks_of(shape), blocks_of(shapes[0])
        if own != first:
            rule = f"{names} must agree on num_blocks and block_size"
            values = f"{list(first)} for {names}[0] and {list(own)} for {names}[{n}]"
            raise ShapeError(f"{rule}, got {values}")


def check_swap_pools(sources: Sequence[Shape], destinations: Sequence[Shape]) -> None:
    """Check the shapes of two pools: caches in pairs, equal but for the number of blocks."""
    check_pools("sources", sources)
    check_pools("destinations", destinations)
    if len(sources) != len(destinations):
        rule = "sources and destinations must be as many"
        raise ArgumentError(f"{rule}, got {len(sources)} and {len(destinations)}")
    for n, (own, other) in enumerate(zip(sources, destinations, strict=True)):
        if own[1:] != other[1:]:
            rule = f"sources[{n}] and destinations[{n}] must have one shape but for num_blocks"
            raise ShapeError(f"{rule}, got {list(own)} and {list(other)}")


def blocks_of(shape: Shape) -> tuple[int, int]:
    """Return (num_blocks, block_size) of a cache, of x-packed keys [..., block_size, x] or of scales."""
    return shape[0], shape[3 if len(shape) == 5 else 2]
