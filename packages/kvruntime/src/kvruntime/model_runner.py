"""Running one step of a schedule through the model, on paged keys and values.

Knows the model, the arrays of the cache and the kernels. Does not know requests' states, why these
tokens were chosen to run, or what becomes of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvblocks import BlockSwap
from kvkernels import copy_blocks, paged_attention, write_kv
from kvruntime.errors import InvalidRequest
from kvruntime.models import Llama
from kvruntime.steps import SchedulerOutput

__all__ = ["KVCache", "ModelRunner", "StepLogits"]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, float32 [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: tuple[NDArray[np.float32], ...]
    values: tuple[NDArray[np.float32], ...]

    @classmethod
    def empty(cls, num_layers: int, *shape: int) -> KVCache:
        """Reserve the address space; the system provides memory when blocks are first written.

        `InvalidRequest` where there is not as much.
        """
        try:
            arrays = [np.zeros(shape, np.float32) for _ in range(2 * num_layers)]
        except (MemoryError, ValueError) as error:  # beyond the memory; beyond any array
            block_bytes = 2 * num_layers * math.prod(shape[1:]) * np.float32().nbytes
            raise InvalidRequest(
                f"the pool must fit into memory, got {shape[0]} blocks of {block_bytes} bytes"
            ) from error
        return cls(tuple(arrays[:num_layers]), tuple(arrays[num_layers:]))


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step scored, float32: the next tokens of its R sequences that complete, and more.

    `last` is [R, vocab_size], in the order of the schedule; `whole` has [its tokens, vocab_size]
    for each sequence that wants the logits of all its tokens.
    """

    last: torch.Tensor
    whole: tuple[torch.Tensor, ...] = ()


class ModelRunner:
    """Copies blocks, runs the flat batch of a step, and returns the logits that are asked for."""

    def __init__(
        self, model: Llama, *, num_blocks: int, block_size: int, num_host_blocks: int = 0
    ) -> None:
        config = model.config
        self.model = model
        block_shape = (config.num_kv_heads, block_size, config.head_dim)
        self.cache = KVCache.empty(config.num_layers, num_blocks, *block_shape)
        self.host = KVCache.empty(config.num_layers, num_host_blocks, *block_shape)

    def execute(self, output: SchedulerOutput) -> StepLogits:
        """Run a step; its KV is in the cache afterwards."""
        _swap_blocks(self.cache, self.host, output.swaps_out)
        _swap_blocks(self.host, self.cache, output.swaps_in)
        if output.copies:
            copy_blocks((*self.cache.keys, *self.cache.values), output.copies)
        token_ids = np.fromiter(
            chain.from_iterable(s.token_ids for s in output.scheduled), np.int64
        )
        positions = np.concatenate([np.arange(s.start, s.stop) for s in output.scheduled])
        attention = _PagedAttention(self.model, self.cache, output)
        hidden = self.model.forward(
            torch.from_numpy(_pad(token_ids, self.model.row_multiple)),
            torch.from_numpy(_pad(positions, self.model.row_multiple)),
            attention,
        )
        starts, ends = attention.cu_seqlens_q[:-1], attention.cu_seqlens_q[1:]
        completing = ends[[s.completes for s in output.scheduled]] - 1
        whole = [
            self._logits(hidden, np.arange(start, end))
            for item, start, end in zip(output.scheduled, starts, ends, strict=True)
            if item.wants_logits
        ]
        return StepLogits(self._logits(hidden, completing), tuple(whole))

    def _logits(self, hidden: torch.Tensor, rows: NDArray[np.integer]) -> torch.Tensor:
        return self.model.logits(hidden[torch.from_numpy(_pad(rows, self.model.row_multiple))])[
            : len(rows)
        ]


class _PagedAttention:
    """What the model calls in each layer of one step: write keys and values, then attend."""

    def __init__(self, model: Llama, cache: KVCache, output: SchedulerOutput) -> None:
        self._config = model.config
        self._cache = cache
        scheduled = output.scheduled
        self.cu_seqlens_q = np.cumsum([0, *(len(s.token_ids) for s in scheduled)], dtype=np.int32)
        self._seq_lens = np.array([s.stop for s in scheduled], np.int32)
        self._block_table = np.asarray(output.block_tables)
        # Rows that only pad the batch write nothing.
        self._slot_mapping = _pad(
            np.array(output.slot_mapping, np.int64), model.row_multiple, fill=-1
        )

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(k.numpy(), v.numpy(), keys, values, self._slot_mapping)
        window = self._config.sliding_windows[layer]
        num_rows = self.cu_seqlens_q[-1]
        out = torch.zeros_like(q)
        paged_attention(
            q.numpy()[:num_rows],
            keys,
            values,
            self._block_table,
            self._seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            window_left=-1 if window is None else window - 1,
            out=out.numpy()[:num_rows],
        )
        return out


def _swap_blocks(source: KVCache, destination: KVCache, swaps: Sequence[BlockSwap]) -> None:
    """Copy whole blocks of every layer from one cache to the other."""
    if not swaps:
        return
    sources, destinations = np.array(swaps).T
    for ours, theirs in zip(
        chain(source.keys, source.values),
        chain(destination.keys, destination.values),
        strict=True,
    ):
        theirs[destinations] = ours[sources]


def _pad(values: NDArray[np.integer], multiple: int, fill: int = 0) -> NDArray[np.int64]:
    """Lengthen to a multiple of the row count at which results do not depend on the batch."""
    padded = np.full(-(-len(values) // multiple) * multiple, fill, np.int64)
    padded[: len(values)] = values
    return padded
