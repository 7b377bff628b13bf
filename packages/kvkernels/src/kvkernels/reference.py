"""The oracle: paged attention in float64, written to be read. It knows no speed and no checks."""

from typing import Any

import numpy as np

from kvkernels.arrays import Array, view


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
) -> tuple[Array, Array]:
    """Compute what `paged_attention` computes, in float64: returns (out [T, Hq, D], lse [T, Hq]).

    The arguments are those of `paged_attention`, of any float dtype, and are trusted.
    Cost: a Python loop over rows and heads; for tests.
    """
    q, k_cache, v_cache = view("q", q), view("k_cache", k_cache), view("v_cache", v_cache)
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
                top = scores.max()
                if top == -np.inf:
                    continue
                weights = np.exp(scores - top)
                out[row, head] = weights @ values / weights.sum()
                lse[row, head] = top + np.log(weights.sum())
    return out, lse
