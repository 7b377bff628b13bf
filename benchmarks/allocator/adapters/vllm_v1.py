"""vLLM's `KVCacheManager`, called as vLLM's scheduler calls it for one full-attention group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.allocator.adapters.base import Adapter, Can

MAX_MODEL_LEN = 1 << 22
HASH = "sha256"  # vLLM's default
PARAMS = SamplingParams(max_tokens=1 << 20)


@dataclass(slots=True)
class RunningBatch:
    """Requests, and the slot of the last token of each."""

    requests: list[Any]
    last_slots: list[int]


class VLLMV1(Adapter):
    """`Request` hashes its prompt when it is made, which is part of admitting it."""

    abilities = Adapter.abilities | {Can.TELL}
    evicts_like_model = True

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        hash_function = get_hash_fn_by_name(HASH)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(block_size, hash_function) if caching else None
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float16
        )
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # vLLM keeps block 0 for itself
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=caching,
            enable_kv_cache_events=caching and self.tells,
        )

    def admit(self, seq_id: int, prompt: list[int]) -> tuple[Any, int]:
        request = Request(str(seq_id), prompt, PARAMS, None, block_hasher=self.hasher)
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        new_blocks = self.manager.allocate_slots(
            request, request.num_tokens - num_cached, num_cached, blocks
        )
        if new_blocks is None:
            raise MemoryError("vLLM has too few free blocks")
        request.num_computed_tokens = request.num_tokens
        return request, num_cached

    def free(self, seq: Any) -> None:
        self.manager.free(seq)

    def take_events(self) -> list[Any]:
        return self.manager.take_events()

    def start(self, seqs: Sequence[Any], prompts: Sequence[list[int]]) -> RunningBatch:
        del prompts
        return RunningBatch(list(seqs), [self._last_slot(seq) for seq in seqs])

    def decode(self, batch: RunningBatch, tokens: Sequence[int]) -> list[int]:
        """The manager returns new blocks; slots are counted on from the last ones, as a runner does."""
        allocate_slots, slots = self.manager.allocate_slots, [s + 1 for s in batch.last_slots]
        for row, (request, token) in enumerate(zip(batch.requests, tokens, strict=True)):
            request.append_output_token_ids(token)
            new_blocks = allocate_slots(request, 1).get_block_ids(allow_none=True)
            if new_blocks is not None:
                slots[row] = new_blocks[0][0] * self.block_size
            request.num_computed_tokens += 1
        batch.last_slots = slots
        return slots

    def exchange(
        self, batch: RunningBatch, leaving: int, joining: Sequence[tuple[int, list[int]]]
    ) -> None:
        super().exchange(batch.requests, leaving, joining)
        batch.last_slots[:leaving] = []
        batch.last_slots += [self._last_slot(seq) for seq in batch.requests[-len(joining) :]]

    def table(self, seq: Any) -> list[int]:
        return self.manager.get_block_ids(seq.request_id)[0]

    def sequences(self, batch: RunningBatch) -> list[Any]:
        return batch.requests

    def _last_slot(self, request: Any) -> int:
        last = request.num_tokens - 1
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        return block_ids[last // self.block_size] * self.block_size + last % self.block_size


ADAPTER = VLLMV1
