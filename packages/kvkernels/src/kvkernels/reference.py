"""The oracle: paged attention in float64, written to be read. It knows no speed and no checks."""

from typing import Any

import numpy as np

from kvkernels.arrays import Array, view, view_bits
from kvkernels.dtypes import ALIASES, BFLOAT16, BY_NAME, to_float32


def paged_attention_reference(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
) -> tuple[Array, Array]:
    """Compute what `paged_attention` computes, in float64: returns (out [T, Hq, D], lse [T, Hq]).

    The arguments are those of `paged_attention`, with any NumPy float dtype too, and are trusted.
    Caches are dequantised first.
    Cost: a Python loop over rows and heads; for tests.
    """
    q = _to_floats("q", q, BFLOAT16.name)
    k_cache = _dequantize("k_cache", k_cache, k_scale, kv_dtype)
    v_cache = _dequantize("v_cache", v_cache, v_scale, kv_dtype)
    block_table, seq_lens = view("block_table", block_table), view("seq_lens", seq_lens)
    num_seqs = len(seq_lens)
    starts = np.arange(num_seqs + 1)
    if cu_seqlens_q is not None:
        starts = view("cu_seqlens_q", cu_seqlens_q)
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[1]
    block_size = k_cache.shape[2]
    scale = head_dim**-0.5 if scale is None else scale

    out = np.zeros((num_rows, num_heads, head_dim))
    lse = np.full((num_rows, num_heads), -np.inf)
    for s in range(num_seqs):
        for row in range(starts[s], starts[s + 1]):
            position = seq_lens[s] - starts[s + 1] + row
            first = 0 if window_left < 0 else max(0, position - window_left)
            last = position if causal else seq_lens[s] - 1
            visible = np.arange(first, min(last, seq_lens[s] - 1) + 1)
            if len(visible) == 0:
                continue
            blocks, offsets = block_table[s, visible // block_size], visible % block_size
            for head in range(num_heads):
                keys = k_cache[blocks, head // group, offsets].astype(np.float64)
                values = v_cache[blocks, head // group, offsets].astype(np.float64)
                scores = keys @ q[row, head].astype(np.float64) * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores += float(alibi_slopes[head]) * (visible - position)
                top = scores.max()
                if top == -np.inf:
                    continue
                weights = np.exp(scores - top)
                sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - top)
                out[row, head] = weights @ values / (weights.sum() + sink)
                lse[row, head] = top + np.log(weights.sum())
    return out, lse


def _to_floats(name: str, array: Any, dtype: str | None) -> Array:
    bits, found = view_bits(name, array)
    given = BY_NAME.get(ALIASES.get(dtype or "", dtype or ""))
    if given is not None and given.bits == bits.dtype:
        found = given.name
    known = BY_NAME.get(ALIASES.get(found, found))
    return bits if known is None else to_float32(bits, known)


def _dequantize(name: str, cache: Any, scale: Any, dtype: str | None) -> Array:
    """Return a cache in float64, HND, times its scale or scales."""
    floats = _to_floats(name, cache, dtype)
    if floats.ndim == 5:  # x-packed
        floats = floats.transpose(0, 1, 3, 2, 4).reshape(*floats.shape[:2], floats.shape[3], -1)
    scales = np.asarray(scale, np.float64)
    product: Array = floats.astype(np.float64) * (scales if scales.ndim == 0 else scales[..., None])
    return product
