"""The public calls for arrays in CPU memory: views, checks, and then the kernels.

It knows the order of a call: everything that may be refused is, before anything is written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkernels import arguments
from kvkernels.arguments import AttentionCall, WriteCall
from kvkernels.arrays import FLOAT32, Array, require, require_writable
from kvkernels.cpu import cache, merge, steps, threads, values, workspace
from kvkernels.dtypes import FLOAT32 as FLOAT32_DTYPE
from kvkernels.dtypes import LARGEST, Dtype, from_float32, to_float32
from kvkernels.errors import ArgumentError, DtypeError, ShapeError
from kvkernels.inputs import (
    Results,
    by_position,
    check_overlaps,
    view_batch,
    view_heads,
    view_layer,
    view_pools,
    view_results,
    view_tokens,
)
from kvkernels.layouts import (
    CacheView,
    require_caches,
    require_dtype,
    require_rows,
    require_write_scale,
)


def paged_attention(call: AttentionCall) -> Any:
    """Do what the public `paged_attention` says, and a cascade with `num_shared_tokens`."""
    layer, results = view_layer_call(call)
    batch = view_batch(call.block_table, call.seq_lens, call.cu_seqlens_q, layer.q.shape[0])
    num_blocks, _, block_size, _ = layer.caches.shape
    if arguments.is_debugging(call.debug):
        check_overlaps(call)
    values.check_batch(batch, layer.q.shape[0], num_blocks, block_size, layer.options.window_left)
    if call.num_shared_tokens:
        values.check_shared(batch, call.num_shared_tokens, block_size)
    num_threads = threads.get_num_threads()
    step = steps.cut_step(batch, layer.sizes, layer.options, call.num_shared_tokens, num_threads)
    return attend(call, step, layer, results)


def view_layer_call(call: AttentionCall) -> tuple[steps.Layer, Results]:
    """View and check all of a call but its batch; q keeps its dtype."""
    _refuse_stream(call.stream, call.q)
    q, q_dtype = require_rows("q", call.q, "T, Hq, D")
    caches = view_layer(call.k_cache, call.v_cache, call.k_scale, call.v_scale, call.kv_dtype)
    arguments.check_heads(q.shape, caches.shape)
    options = arguments.check_options(call, q.shape[2])
    slopes = view_heads("alibi_slopes", call.alibi_slopes, q.shape[1])
    sinks = view_heads("sinks", call.sinks, q.shape[1])
    results = view_results(call.out, call.lse, q.shape, q_dtype)
    return steps.Layer(q, caches, options, slopes, sinks), results


def attend(call: AttentionCall, step: steps.Step, layer: steps.Layer, results: Results) -> Any:
    """Attend in the workspace of a checked call; returns what the call returns."""
    shapes = step.shapes(layer.sizes)
    if results.lse is None:
        shapes["lse"] = layer.q.shape[:2]
    if results.dtype is not FLOAT32_DTYPE:
        shapes |= {"q": layer.q.shape, "out": layer.q.shape}
    memory = workspace.share_out(call.workspace, shapes)
    layer = replace(layer, q=to_float32(layer.q, results.dtype, memory.get("q")))
    floats = memory.get("out", results.out)
    lse = memory["lse"] if results.lse is None else results.lse
    steps.attend(step, layer, memory, steps.Outputs(floats, lse))
    if floats is not results.out:
        results.out[...] = from_float32(floats, results.dtype)
    out = results.out if call.out is None else call.out
    if not call.return_lse:
        return out
    if call.lse is not None:
        return out, call.lse
    # A workspace is the caller's, who may write to it.
    return out, lse if call.workspace is None else lse.copy()


def write_kv(call: WriteCall) -> None:
    """Do what the public `write_kv` says."""
    _refuse_stream(call.stream, call.k_cache)
    keys, vals = require_caches(call.k_cache, call.v_cache, call.kv_dtype)
    require_writable("k_cache", keys.array)
    require_writable("v_cache", vals.array)
    new = view_tokens(call, keys.shape)
    scales = (
        require_write_scale("k_scale", call.k_scale, keys),
        require_write_scale("v_scale", call.v_scale, vals),
    )
    num_blocks, _, block_size, _ = keys.shape
    values.check_slots(new.slots, num_blocks * block_size)
    if arguments.is_debugging(call.debug):
        values.check_slots_once(new.slots)
    k, k_dtype = new.k, new.k_dtype
    if new.angles is not None:
        k, k_dtype = _rotate(to_float32(k, k_dtype), *new.angles), FLOAT32_DTYPE
    cache.write("k", _to_cache_dtype(k, k_dtype, keys, scales[0], new.slots), keys, new.slots)
    rows = _to_cache_dtype(new.v, new.v_dtype, vals, scales[1], new.slots)
    cache.write("v", rows, vals, new.slots)


def _rotate(keys: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first half of the rotated dimensions with the second, and copy the others."""
    half = cos.shape[1]
    first, second = keys[..., :half], keys[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin, keys[..., 2 * half :])
    return np.concatenate(rotated, axis=-1)


def _to_cache_dtype(
    rows: Array, dtype: Dtype, view: CacheView, given: tuple[float, Array | None], slots: Array
) -> Array:
    """Return new tokens as a cache holds them; themselves if there is nothing to convert."""
    scale, scales = given
    if dtype is view.dtype and scale == 1 and scales is None:
        return rows
    floats = to_float32(rows, dtype)
    if scales is not None:
        own = np.abs(floats).max(axis=-1) / np.float32(LARGEST[view.dtype.name])
        written, block_size = slots >= 0, view.shape[2]
        blocks, offsets = np.divmod(slots[written], block_size)
        scales[blocks, :, offsets] = own[written]
        # A vector of zeros has the scale 0.
        floats = floats / np.where(own == 0, np.float32(1), own)[..., None]
    elif scale != 1:
        floats = floats / np.float32(scale)
    return from_float32(floats, view.dtype)


def gather_kv(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Do what the public `gather_kv` says."""
    _refuse_stream(stream, k_cache)
    caches = view_layer(k_cache, v_cache, k_scale, v_scale, kv_dtype)
    batch = view_batch(block_table, seq_lens, None, None)
    num_blocks, _, block_size, _ = caches.shape
    values.check_batch(batch, len(batch.seq_lens), num_blocks, block_size, -1)
    slots = _slots_of(batch.block_table, batch.seq_lens, block_size)
    return (
        _gather(caches.keys, slots, arguments.number_of("k_scale", k_scale), caches.k_scales),
        _gather(caches.values, slots, arguments.number_of("v_scale", v_scale), caches.v_scales),
    )


def _slots_of(block_table: Array, seq_lens: Array, block_size: int) -> Array:
    """Return the slots of all tokens, one sequence after another."""
    slots = [np.empty(0, np.int64)]
    for blocks, length in zip(block_table, seq_lens.tolist(), strict=True):
        positions = np.arange(length)
        slots.append(blocks[positions // block_size].astype(np.int64) * block_size)
        slots[-1] += positions % block_size
    return np.concatenate(slots)


def _gather(view: CacheView, slots: Array, scale: float | None, scales: Array | None) -> Array:
    _, num_kv_heads, block_size, head_dim = view.shape
    tokens = np.empty((len(slots), num_kv_heads, head_dim), view.dtype.bits)
    cache.read(view, slots, tokens)
    if scales is not None:
        blocks, offsets = np.divmod(slots, block_size)
        own: Array = to_float32(tokens, view.dtype) * scales[blocks, :, offsets][..., None]
        return own
    if view.dtype.name in LARGEST or scale != 1:
        scaled: Array = to_float32(tokens, view.dtype) * np.float32(scale)
        return scaled
    return tokens


def copy_blocks(caches: Sequence[Any], copies: Iterable[Any], stream: Any = None) -> None:
    """Do what the public `copy_blocks` says."""
    arrays = view_pools("caches", caches, is_written=True)
    arguments.check_pools("caches", [array.shape for array in arrays])
    _refuse_stream(stream, caches[0])
    checked = arguments.check_copies(copies, *arguments.blocks_of(arrays[0].shape))
    for array in map(by_position, arrays):
        for source, destination, num_tokens in checked:
            array[destination, :, :num_tokens] = array[source, :, :num_tokens]


def swap_blocks(
    sources: Sequence[Any],
    destinations: Sequence[Any],
    copies: Iterable[Any],
    *,
    stream: Any = None,
) -> None:
    """Do what the public `swap_blocks` says."""
    ours = view_pools("sources", sources, is_written=False)
    theirs = view_pools("destinations", destinations, is_written=True)
    arguments.check_swap_pools([one.shape for one in ours], [one.shape for one in theirs])
    _refuse_stream(stream, sources[0])
    for n, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own.dtype != other.dtype:
            rule = f"sources[{n}] and destinations[{n}] must have one dtype"
            raise DtypeError(f"{rule}, got {own.dtype.name} and {other.dtype.name}")
    num_sources, block_size = arguments.blocks_of(ours[0].shape)
    checked = arguments.check_swaps(copies, num_sources, theirs[0].shape[0], block_size)
    for own, other in zip(map(by_position, ours), map(by_position, theirs), strict=True):
        for source, destination, num_tokens in checked:
            other[destination, :, :num_tokens] = own[source, :, :num_tokens]


def merge_states(
    outs: Sequence[Any],
    lses: Sequence[Any],
    *,
    sinks: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Do what the public `merge_states` says."""
    if not outs or len(outs) != len(lses):
        rule = "outs and lses must be as many, and at least one of each"
        raise ArgumentError(f"{rule}, got {len(outs)} and {len(lses)}")
    _refuse_stream(stream, outs[0])
    first, dtype = require_rows("outs[0]", outs[0], "T, Hq, D")
    shape = first.shape
    states = [
        first,
        *(require_dtype(f"outs[{n}]", outs[n], (dtype,))[0] for n in range(1, len(outs))),
    ]
    logs = [require(f"lses[{n}]", given, FLOAT32, "T, Hq") for n, given in enumerate(lses)]
    for n, (state, log) in enumerate(zip(states, logs, strict=True)):
        _check_state(f"outs[{n}]", state.shape, shape, "T, Hq, D")
        _check_state(f"lses[{n}]", log.shape, shape[:2], "T, Hq")
    scores = view_heads("sinks", sinks, shape[1])
    results = view_results(out, lse, shape, dtype)

    num_lanes = shape[0] * shape[1]
    weights = np.empty((len(outs), num_lanes))
    total = np.empty(shape[:2], np.float32) if results.lse is None else results.lse
    stacked = np.stack(logs).reshape(len(logs), -1)
    merge.weigh(
        weights, stacked, np.empty(0, np.float32) if scores is None else scores, total.reshape(-1)
    )
    sums = np.zeros((num_lanes, shape[2]), np.float32)
    for state, shares in zip(states, weights, strict=True):
        floats = np.ascontiguousarray(to_float32(state, dtype)).reshape(sums.shape)
        merge.add_weighted(floats, shares, sums)
    results.out[...] = from_float32(sums.reshape(shape), dtype)
    return (results.out if out is None else out), (total if lse is None else lse)


def _check_state(name: str, found: tuple[int, ...], shape: tuple[int, ...], axes: str) -> None:
    if found != shape:
        rule = f"{name} must have the shape [{axes}] of outs[0], {list(shape)}"
        raise ShapeError(f"{rule}, got {list(found)}")


def _refuse_stream(stream: Any, array: Any) -> None:
    if stream is not None:
        raise ArgumentError(f"stream needs arrays in GPU memory, got {type(array).__qualname__}")
