"""The arrays of a call on a CPU, viewed and checked. It knows dtypes, shapes and strides, and no kernel.

What only their values tell, such as an id outside the pool, is found by `kvkernels.cpu.values`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkernels.arguments import AttentionCall, WriteCall, check_angles, check_rows
from kvkernels.arrays import (
    FLOAT32,
    INT32,
    INT64,
    Array,
    require,
    require_writable,
    view_bits,
)
from kvkernels.dtypes import Dtype
from kvkernels.errors import ArgumentError, ArrayError, ShapeError
from kvkernels.layouts import CacheView, require_caches, require_dtype, require_rows, require_scale


@dataclass(frozen=True, slots=True)
class Caches:
    """The keys and values of a layer, and their scales for each token and head, if they have any."""

    keys: CacheView
    values: CacheView
    k_scales: Array | None
    v_scales: Array | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.keys.shape


def view_layer(
    k_cache: Any, v_cache: Any, k_scale: Any, v_scale: Any, kv_dtype: str | None
) -> Caches:
    """View the caches of a layer with the arrays among their scales."""
    keys, values = require_caches(k_cache, v_cache, kv_dtype)
    _, k_scales = require_scale("k_scale", k_scale, keys)
    _, v_scales = require_scale("v_scale", v_scale, values)
    return Caches(keys, values, k_scales, v_scales)


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the tokens of sequences are, and which rows are theirs; `offsets` is cu_seqlens_q."""

    block_table: Array
    seq_lens: Array
    offsets: Array


def view_batch(block_table: Any, seq_lens: Any, cu_seqlens_q: Any, num_rows: int | None) -> Batch:
    """View tables and lengths of one batch; without cu_seqlens_q sequences have a row each."""
    tables = require("block_table", block_table, INT32, "B, max_blocks")
    lengths = require("seq_lens", seq_lens, INT32, "B")
    num_seqs = lengths.shape[0]
    if cu_seqlens_q is None:
        check_rows(num_seqs if num_rows is None else num_rows, num_seqs)
        offsets: Array = np.arange(num_seqs + 1, dtype=np.int32)
    else:
        offsets = require("cu_seqlens_q", cu_seqlens_q, INT32, "B + 1")
    if offsets.shape[0] != num_seqs + 1:
        rule = "cu_seqlens_q must have one entry more than there are sequences"
        raise ShapeError(f"{rule}, got {offsets.shape[0]} and {num_seqs} sequences")
    if tables.shape[0] != num_seqs:
        rule = "block_table and seq_lens must have one row for each sequence"
        raise ShapeError(f"{rule}, got {tables.shape[0]} and {num_seqs}")
    return Batch(tables, lengths, offsets)


def view_heads(name: str, given: Any, num_heads: int) -> Array | None:
    """View an array with a number for each query head."""
    if given is None:
        return None
    found = require(name, given, FLOAT32, "Hq")
    if found.shape != (num_heads,):
        raise ShapeError(
            f"{name} must have the shape [Hq] of q, [{num_heads}], got {list(found.shape)}"
        )
    return np.ascontiguousarray(found)


@dataclass(frozen=True, slots=True)
class Results:
    """Where results go, as bits; `dtype` is that of out. lse is None where nobody asked for it."""

    out: Array
    lse: Array | None
    dtype: Dtype


def view_results(out: Any, lse: Any, shape: tuple[int, ...], dtype: Dtype) -> Results:
    """View the caller's outputs, or make out [T, Hq, D]; lse [T, Hq] stays None."""
    if out is None:
        made: Array = np.empty(shape, dtype.bits)
    else:
        made, _ = require_dtype("out", out, (dtype,))
        _check_result("out", made, shape, "T, Hq, D")
    if lse is None:
        return Results(made, None, dtype)
    found = require("lse", lse, FLOAT32, "T, Hq")
    _check_result("lse", found, shape[:2], "T, Hq")
    return Results(made, found, dtype)


def _check_result(name: str, found: Array, shape: tuple[int, ...], axes: str) -> None:
    require_writable(name, found)
    if found.shape != shape:
        raise ShapeError(
            f"{name} must have the shape [{axes}] of q, {list(shape)}, got {list(found.shape)}"
        )
    if not found.flags.c_contiguous:
        strides = [step // found.itemsize for step in found.strides]
        raise ShapeError(f"{name} must be C-contiguous, got the strides {strides}")


def check_overlaps(call: AttentionCall) -> None:
    """Check for debugging that outputs share no memory with inputs; O(1), by first and last byte."""
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    for output in ("out", "lse", "workspace"):
        written = getattr(call, output)
        for name in names:
            read = getattr(call, name)
            if written is None or read is None:
                continue
            if np.may_share_memory(view_bits(output, written)[0], view_bits(name, read)[0]):
                raise ArrayError(f"{output} is written, so it must not overlap {name}")


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The keys and values of new tokens, [T, Hkv, D], their slots and the angles of a rotation."""

    k: Array
    v: Array
    k_dtype: Dtype
    v_dtype: Dtype
    slots: Array
    angles: tuple[Array, Array] | None


def view_tokens(call: WriteCall, pool: tuple[int, int, int, int]) -> NewTokens:
    """View new tokens for caches [num_blocks, num_kv_heads, block_size, head_dim]."""
    keys, k_dtype = require_rows("k", call.k, "T, Hkv, D")
    values, v_dtype = require_rows("v", call.v, "T, Hkv, D")
    slots = require("slot_mapping", call.slot_mapping, INT64, "T")
    _, num_kv_heads, _, head_dim = pool
    shape = (slots.shape[0], num_kv_heads, head_dim)
    if keys.shape != shape or values.shape != shape:
        rule = f"k and v must have the shape [T, Hkv, D] of slot_mapping and caches, {list(shape)}"
        raise ShapeError(f"{rule}, got {list(keys.shape)} and {list(values.shape)}")
    angles = _view_angles(call.cos, call.sin, slots.shape[0], head_dim)
    return NewTokens(keys, values, k_dtype, v_dtype, slots, angles)


def _view_angles(cos: Any, sin: Any, num_tokens: int, head_dim: int) -> tuple[Array, Array] | None:
    if (cos is None) != (sin is None):
        raise ArgumentError("cos and sin must be given together")
    if cos is None:
        return None
    axes = "T, rotary_dim / 2"
    angles = require("cos", cos, FLOAT32, axes), require("sin", sin, FLOAT32, axes)
    for name, given in zip(("cos", "sin"), angles, strict=True):
        if given.shape != (num_tokens, angles[0].shape[1]):
            rule = f"{name} must have the shape [{axes}] of k, [{num_tokens}, ...], and of cos"
            raise ShapeError(f"{rule}, got {list(given.shape)}")
    check_angles(angles[0].shape, head_dim)
    return angles


def view_pools(names: str, caches: Sequence[Any], *, is_written: bool) -> list[Array]:
    """View caches whose blocks move, as bits."""
    arrays = [view_bits(f"{names}[{n}]", cache)[0] for n, cache in enumerate(caches)]
    for n, array in enumerate(arrays):
        if is_written:
            require_writable(f"{names}[{n}]", array)
    return arrays


def by_position(cache: Array) -> Array:
    """View a cache, x-packed keys or scales with the positions of a block on axis 2."""
    return cache.swapaxes(2, 3) if cache.ndim == 5 else cache
