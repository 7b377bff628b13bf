"""Running one step of a schedule through the model, on paged keys and values.

Knows the model, the cache and the backends of attention. Does not know requests' states, why these
tokens were chosen to run, or what becomes of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvruntime.attention import BACKENDS, PagedBatch, write
from kvruntime.engine_config import EngineConfig
from kvruntime.kv_cache import KVCache
from kvruntime.models import Llama
from kvruntime.models.llama import Attention
from kvruntime.steps import SchedulerOutput

__all__ = ["FEWEST_SHARED_TOKENS", "ModelRunner", "StepLogits"]

# Fewer are no whole piece of the kernels, which read what is shared once in whole pieces.
FEWEST_SHARED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step scored, float32: the next tokens of its R sequences that complete, and more.

    `last` is [R, vocab_size], in the order of the schedule; `whole` has [its tokens, vocab_size]
    for each sequence that wants the logits of all its tokens.
    """

    last: torch.Tensor
    whole: tuple[torch.Tensor, ...] = ()


class ModelRunner:
    """Copies blocks, runs the flat batch of a step, and returns the logits that are asked for.

    The model's weights lie on `config.device`; logits are returned on the CPU.
    """

    def __init__(
        self, model: Llama, config: EngineConfig, *, num_blocks: int, num_host_blocks: int = 0
    ) -> None:
        self.model = model
        self.device = config.device
        self._attend = BACKENDS[config.attention]
        self._block_size = config.block_size
        make = partial(
            KVCache, model.config, block_size=config.block_size, kv_dtype=config.kv_dtype
        )
        self.cache = make(num_blocks=num_blocks, device=self.device)
        is_pinned = self.device != "cpu" and num_host_blocks > 0
        self.host = make(num_blocks=num_host_blocks, is_pinned=is_pinned)

    def execute(self, output: SchedulerOutput) -> StepLogits:
        """Run a step; its KV is in the cache afterwards."""
        self.cache.swap_to(self.host, output.swaps_out)
        self.host.swap_to(self.cache, output.swaps_in)
        self.cache.copy(output.copies)
        scheduled = output.scheduled
        token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in scheduled), np.int64)
        positions = np.concatenate([np.arange(s.start, s.stop) for s in scheduled])
        bounds = np.cumsum([0, *(len(s.token_ids) for s in scheduled)], dtype=np.int32)
        tables = np.asarray(output.block_tables)
        batch = PagedBatch(
            cu_seqlens_q=self._place(bounds),
            seq_lens=self._place(np.array([s.stop for s in scheduled], np.int32)),
            block_table=self._place(tables),
            # Rows that only pad the batch write nothing.
            slot_mapping=self._place(
                _pad(np.array(output.slot_mapping, np.int64), self.model.row_multiple, fill=-1)
            ),
            num_shared_tokens=self._num_shared_tokens(tables, min(s.start for s in scheduled)),
        )
        hidden = self.model.forward(
            self._rows(token_ids), self._rows(positions), self._attention(batch, len(token_ids))
        )
        starts, ends = bounds[:-1], bounds[1:]
        completing = ends[[s.completes for s in scheduled]] - 1
        whole = [
            self._logits(hidden, np.arange(start, end))
            for item, start, end in zip(scheduled, starts, ends, strict=True)
            if item.wants_logits
        ]
        return StepLogits(self._logits(hidden, completing), tuple(whole))

    def _num_shared_tokens(self, tables: NDArray[np.integer], first_row: int) -> int:
        """The tokens before `first_row` in blocks that all tables begin with, if it is worth it."""
        if self.device != "cpu" or len(tables) < 2 or first_row < FEWEST_SHARED_TOKENS:
            return 0
        first_blocks = tables[:, : first_row // self._block_size]
        differs = (first_blocks != first_blocks[0]).any(axis=0)
        num_blocks = int(differs.argmax()) if differs.any() else len(differs)
        num_tokens = num_blocks * self._block_size
        return num_tokens if num_tokens >= FEWEST_SHARED_TOKENS else 0

    def _attention(self, batch: PagedBatch, num_rows: int) -> Attention:
        """What the model calls in each layer: write keys and values, then attend."""

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            cache = self.cache.layers[layer]
            write(k, v, cache, batch)
            window = self.model.config.sliding_windows[layer]
            window_left = -1 if window is None else window - 1
            out = torch.zeros_like(q)
            out[:num_rows] = self._attend(q[:num_rows], cache, batch, window_left)
            return out

        return attention

    def _logits(self, hidden: torch.Tensor, rows: NDArray[np.integer]) -> torch.Tensor:
        return self.model.logits(hidden[self._rows(rows)])[: len(rows)].cpu()

    def _rows(self, values: NDArray[np.integer]) -> torch.Tensor:
        """Numbers of rows, lengthened to the multiple at which results do not depend on the batch."""
        return torch.from_numpy(_pad(values, self.model.row_multiple)).to(self.device)

    def _place(self, array: NDArray[np.integer]) -> Any:
        """An array where the kernels want it: as it is, or in the memory of the GPU."""
        return array if self.device == "cpu" else torch.from_numpy(array).to(self.device)


def _pad(values: NDArray[np.integer], multiple: int, fill: int = 0) -> NDArray[np.int64]:
    """Lengthen to a multiple of the row count at which results do not depend on the batch."""
    padded = np.full(-(-len(values) // multiple) * multiple, fill, np.int64)
    padded[: len(values)] = values
    return padded
