"""A checked call of attention, cut into items of work for the threads. It knows no arithmetic."""
# ruff: noqa: PLR0917  # the arrays of a call, which has checked them

from typing import Any, NamedTuple

import numpy as np

from kvkernels.arrays import Array, flatten
from kvkernels.cpu import threads, work
from kvkernels.cpu.attention import attend_for
from kvkernels.cpu.merge import merge

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
    alibi_slopes: Array = _NOTHING
    sinks: Array = _NOTHING


def attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array,
    options: Options,
    out: Array,
    lse: Array,
) -> None:
    """Write the attention of q, float32 [T, Hq, D], to out and lse, float32 and C-contiguous."""
    group = q.shape[1] // k_cache.shape[1]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_threads = threads.get_num_threads()
    items = work.cut(
        *(seq_lens, cu_seqlens_q, num_kv_heads, group, block_size),
        *(options.causal, options.window_left, options.num_splits, num_threads),
    )
    num_states = 0
    if len(items) and items[:, _SLOT].max() >= 0:
        last = items[items[:, _SLOT].argmax()]
        num_states = int(last[_SLOT] + last[_ROWS] * last[_HEADS] * group)
    states = np.empty((num_states, head_dim + 2), np.float32) if num_states else _NO_STATES
    arguments = (
        *flatten("q", q),
        *_cache_arguments("k_cache", k_cache),
        *_cache_arguments("v_cache", v_cache),
        (head_dim, head_dim),
        *(block_table, seq_lens, cu_seqlens_q, (num_kv_heads, block_size, options.num_splits)),
        *(options.scale * options.k_scale, options.causal, options.window_left, options.softcap),
        *(options.alibi_slopes, options.sinks, options.v_scale),
        *(items, np.zeros(1, np.int64), states, out, lse),
    )
    threads.run(attend_for(k_cache.dtype), arguments, min(num_threads, len(items)))
    if num_states:
        merge(
            *(block_table, seq_lens, cu_seqlens_q, num_kv_heads, block_size),
            *(options.sinks, options.v_scale, items, states, out, lse),
        )


def _cache_arguments(name: str, cache: Array) -> tuple[Any, ...]:
    items, steps = flatten(name, cache)
    return items, (*steps, 0), _NOTHING, (0, 0, 0)
