"""Attention of one step's rows over a paged cache: the kernels, or a plain check of them.

A backend is a function of queries, one layer's cache and the step's batch. Writes are the same for
all of them.

Knows arrays and kernels. Does not know requests, models or schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the name torch users know it by

from kvkernels import cascade_attention, paged_attention, write_kv
from kvruntime.kv_cache import LayerCache

__all__ = ["BACKENDS", "Attend", "PagedBatch", "write"]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Whose rows a step has, and in which blocks their contexts lie.

    Arrays of NumPy on a CPU, tensors on a GPU: `cu_seqlens_q` int32 [B + 1], `seq_lens` int32 [B],
    `block_table` int32 [B, blocks], and `slot_mapping` int64, a slot for each row and -1 for rows
    that only pad. `num_shared_tokens` lie in the same blocks for all of them, before every row.
    """

    cu_seqlens_q: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any
    num_shared_tokens: int = 0


# q [T, num_heads, head_dim] -> [T, num_heads, head_dim], and how many keys before its own a row
# sees, or -1.
Attend = Callable[[torch.Tensor, LayerCache, PagedBatch, int], torch.Tensor]


def write(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> None:
    """Store the keys and values of a step's rows, [T, num_kv_heads, head_dim], in their slots."""
    write_kv(
        k,
        v,
        cache.keys,
        cache.values,
        batch.slot_mapping,
        k_scale=cache.key_scales,
        v_scale=cache.value_scales,
    )


def by_kernels(
    q: torch.Tensor, cache: LayerCache, batch: PagedBatch, window_left: int
) -> torch.Tensor:
    """Attend with kvkernels: blocks are read where they lie, and what all share is read once."""
    if batch.num_shared_tokens and window_left < 0:
        attend = partial(cascade_attention, num_shared_tokens=batch.num_shared_tokens)
    else:
        attend = partial(paged_attention, window_left=window_left)
    out = torch.empty_like(q)
    attend(
        q,
        cache.keys,
        cache.values,
        batch.block_table,
        batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        k_scale=cache.key_scales,
        v_scale=cache.value_scales,
        out=out,
    )
    return out


def by_sdpa(
    q: torch.Tensor, cache: LayerCache, batch: PagedBatch, window_left: int
) -> torch.Tensor:
    """Attend with torch on keys and values that are gathered first: slow, and plain to read."""
    out = torch.empty_like(q)
    block_size = cache.keys.shape[2]
    bounds = [int(bound) for bound in batch.cu_seqlens_q]
    for row, length in enumerate(int(length) for length in batch.seq_lens):
        start, stop = bounds[row : row + 2]
        blocks = torch.as_tensor(batch.block_table[row, : -(-length // block_size)]).long()
        keys = _gather(cache.keys, cache.key_scales, blocks)[:, :length]
        values = _gather(cache.values, cache.value_scales, blocks)[:, :length]
        positions = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        key_positions = torch.arange(length, device=q.device)
        is_seen = key_positions <= positions
        if window_left >= 0:
            is_seen &= key_positions >= positions - window_left
        group = q.shape[1] // keys.shape[0]
        out[start:stop] = F.scaled_dot_product_attention(
            q[None, start:stop].transpose(1, 2),
            keys.repeat_interleave(group, dim=0)[None],
            values.repeat_interleave(group, dim=0)[None],
            attn_mask=is_seen,
        )[0].transpose(0, 1)
    return out


BACKENDS: dict[str, Attend] = {"kernels": by_kernels, "sdpa": by_sdpa}


def _gather(
    cache: torch.Tensor, scales: torch.Tensor | float, blocks: torch.Tensor
) -> torch.Tensor:
    """What these blocks hold, one after another, as float32 [num_kv_heads, tokens, head_dim]."""
    bits = cache.view(torch.uint8)[blocks]  # not every dtype can be indexed
    found = bits.view(cache.dtype).float()
    if isinstance(scales, torch.Tensor):
        found = found * scales[blocks][..., None]
    return found.transpose(0, 1).flatten(1, 2)
