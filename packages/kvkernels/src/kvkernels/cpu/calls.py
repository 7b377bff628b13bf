"""A checked call of attention, cut into items of work for the threads. It knows no arithmetic."""
# ruff: noqa: PLR0917  # the arrays of a call, which has checked them

from typing import NamedTuple

import numpy as np

from kvkernels.arrays import Array, flatten
from kvkernels.cpu import threads, work
from kvkernels.cpu.attention import attend_for
from kvkernels.cpu.merge import merge
from kvkernels.cpu.vectors import FLOAT8_FACTOR
from kvkernels.dtypes import FLOAT8
from kvkernels.layouts import CacheView

_NOTHING = np.empty(0, np.float32)
_NO_STATES = np.empty((0, 0), np.float32)
_SLOT, _ROWS, _HEADS = 7, 2, 4  # columns of items


class Options(NamedTuple):
    """The numbers of an attention call, and arrays for heads: those of the public function."""

    scale: float
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    num_splits: int = 0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    k_scales: Array | None = None
    v_scales: Array | None = None


def attend(
    q: Array,
    k_cache: CacheView,
    v_cache: CacheView,
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    options: Options,
    out: Array,
    lse: Array,
) -> None:
    """Write the attention of q, float32 [T, Hq, D], to out and lse, float32 and C-contiguous."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    num_threads = threads.get_num_threads()
    items = work.cut(
        *(seq_lens, cu_seqlens_q, num_kv_heads, group, block_size),
        *(options.causal, options.window_left, options.num_splits, num_threads),
    )
    states = _states(items, group, head_dim)
    keys, k_steps, k_part = k_cache.flatten()
    values, v_steps, v_part = v_cache.flatten()
    factor = FLOAT8_FACTOR if k_cache.dtype is FLOAT8 else 1.0
    sinks, v_scale = _or_nothing(options.sinks), options.v_scale * factor
    arguments = (
        *flatten("q", q),
        *(keys, k_steps, *_flatten_scales("k_scale", options.k_scales)),
        *(values, v_steps, *_flatten_scales("v_scale", options.v_scales)),
        (k_part, v_part),
        *(block_table, seq_lens, cu_seqlens_q, (num_kv_heads, block_size, options.num_splits)),
        *(options.scale * options.k_scale * factor, options.causal, options.window_left),
        *(options.softcap, _or_nothing(options.alibi_slopes), sinks, v_scale),
        *(items, np.zeros(1, np.int64), states, out, lse),
    )
    threads.run(attend_for(k_cache.dtype.kernel), arguments, min(num_threads, len(items)))
    if len(states):
        merge(
            *(block_table, seq_lens, cu_seqlens_q, num_kv_heads, block_size),
            *(sinks, v_scale, items, states, out, lse),
        )


def _states(items: Array, group: int, head_dim: int) -> Array:
    """Make room for the states of those items that are single pieces."""
    if len(items) == 0 or items[:, _SLOT].max() < 0:
        return _NO_STATES
    last = items[items[:, _SLOT].argmax()]
    num_states = int(last[_SLOT] + last[_ROWS] * last[_HEADS] * group)
    return np.empty((num_states, head_dim + 2), np.float32)


def _or_nothing(array: Array | None) -> Array:
    return _NOTHING if array is None else array


def _flatten_scales(name: str, scales: Array | None) -> tuple[Array, tuple[int, ...]]:
    if scales is None:
        return _NOTHING, (0, 0, 0)
    items, steps = flatten(name, scales[..., None])
    return items, steps
