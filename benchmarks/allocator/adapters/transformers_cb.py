"""The paged cache of transformers' continuous batching, called as its scheduler calls it.

One layer with full attention and tiny heads: the cache tensor is allocated and never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestStatus

from benchmarks.allocator.adapters.base import Adapter, Can


class OneDevice:
    """Stands in for the helper that splits heads over devices."""

    tp_size = 1


@dataclass(slots=True)
class State:
    """The fields of transformers' request state that its cache reads, without the others' cost."""

    request_id: str
    initial_tokens: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    position_offset: int = 0
    status: Any = RequestStatus.DECODING

    def current_len(self) -> int:
        """Tokens in the cache."""
        return self.position_offset


class TransformersCB(Adapter):
    """Cached blocks are evicted all at once, when an allocation fails."""

    abilities = frozenset(Can) - {Can.TELL}
    forks_need_caching = True

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        model = LlamaConfig(
            hidden_size=4,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=4,
            num_hidden_layers=1,
        )
        config = ContinuousBatchingConfig(
            page_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=16,
            max_memory_percent=0.9,
            allow_block_sharing=caching,
            use_async_batching=False,
        )
        self.cache = PagedAttentionCache(model, config, torch.device("cpu"), OneDevice())
        (self.allocator,) = self.cache.cache_allocators.values()
        self.num_copies = 0

    def admit(self, seq_id: int, prompt: list[int]) -> tuple[State, int]:
        state = State(str(seq_id), prompt)
        num_cached = self.cache.search_prefix_match(state.request_id, prompt)
        state.position_offset = num_cached
        self._schedule(state, len(prompt) - num_cached)
        return state, num_cached

    def free(self, seq: State) -> None:
        self.cache.free_blocks(seq.request_id)

    def decode(self, batch: list[State], tokens: Sequence[int]) -> list[int]:
        slots: list[int] = []
        write_index = [slots]
        for state, token in zip(batch, tokens, strict=True):
            state.generated_tokens.append(token)
            position = state.position_offset
            self._schedule(state, 1)
            self.cache.extend_read_and_write_indices(
                state.request_id, position, 1, None, write_index
            )
        return slots

    def prepare_fork(self, parent: State, child_id: int) -> State:
        return replace(
            parent, request_id=str(child_id), generated_tokens=parent.generated_tokens[:]
        )

    def fork(self, parent: State, child: State) -> State:
        copies: dict[str, tuple[list[int], list[int]]] = {
            name: ([], []) for name in self.cache.cache_allocators
        }
        if not self.cache.prepare_fork_request(parent, [child.request_id], copies):
            raise MemoryError("transformers has too few free blocks")
        self.num_copies += sum(len(sources) for sources, _ in copies.values())
        return child

    def copies_of_forks(self) -> int:
        num_copies, self.num_copies = self.num_copies, 0
        return num_copies

    def append_to_forks(self, seqs: Sequence[State], tokens: Sequence[int]) -> int:
        """Copies were made when the forks were."""
        for state, token in zip(seqs, tokens, strict=True):
            state.generated_tokens.append(token)
            self._schedule(state, 1)
        return 0

    def table(self, seq: State) -> list[int]:
        return self.allocator.block_table[seq.request_id]

    def slot(self, block_id: int, offset: int) -> int:
        """Rows of the cache tensor: a block has its keys first, then its values."""
        return block_id * self.allocator.block_physical_stride + offset

    def _schedule(self, state: State, num_tokens: int) -> None:
        """Make room for tokens, and publish the blocks that they fill."""
        cache = self.cache
        if not cache.can_store_request_tokens(state, num_tokens):
            cache.evict_cached_blocks()
            if not cache.can_store_request_tokens(state, num_tokens):
                raise MemoryError("transformers has too few free blocks")
        full = cache.count_new_complete_blocks(state, num_tokens)
        state.position_offset += num_tokens
        cache.mark_complete_blocks(state, full)


ADAPTER = TransformersCB
