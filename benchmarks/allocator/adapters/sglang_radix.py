"""SGLang's `RadixCache` with its paged allocator on CPU, called as its scheduler calls them.

Admit: match, lock, evict if short, take pages, write the request's row, publish. Decode: one call a
batch. Free: publish what was decoded, give back what the tree does not own, unlock.

On a GPU the ids live there and some calls are kernel launches; on a CPU they are copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# torchvision's compiled operators do not load without a GPU build of torch. SGLang imports it and
# calls none of them, so it is enough that two of them are declared.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402 -- see above
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402 -- see above
    EvictParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402 -- see above
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402 -- see above
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402 -- see above

from benchmarks.allocator.adapters.base import Adapter  # noqa: E402 -- see above

MAX_TOKENS = 130_000  # of a request
MAX_REQUESTS = 300
torch.set_grad_enabled(False)


@dataclass(slots=True)
class KVRecord:
    """The fields of SGLang's record of a request's KV that the tree and the pool read."""

    req_pool_idx: int
    kv_committed_len: int
    cache_protected_len: int
    cache_inserted_len: int = 0
    swa_evict_floor: int = 0

    def get_evicted_seqlen(self, component: object) -> int:
        """No sliding window."""
        del component
        return 0

    def swa_dead_lo(self, page_size: int) -> int:
        """No sliding window."""
        del page_size
        return 0


@dataclass(slots=True)
class Request:
    """The fields of SGLang's request that the tree reads, without the others' cost."""

    origin_input_ids: array[int]
    full_untruncated_fill_ids: array[int]
    kv: KVRecord
    last_node: Any
    lock: Any
    extra_key: None = None
    cache_salt: None = None
    priority: int = 0
    session: None = None
    session_id: None = None
    kv_rotation_base: None = None

    def finished(self) -> bool:
        """Publishing is asked for while it runs."""
        return False


@dataclass(slots=True)
class RunningBatch:
    """Requests, and their lengths and rows as tensors."""

    requests: list[Request]
    lengths: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Read lengths and rows again, as after a change of the batch."""
        self.lengths = torch.tensor([r.kv.kv_committed_len for r in self.requests])
        self.rows = torch.tensor([r.kv.req_pool_idx for r in self.requests])


class SGLangRadix(Adapter):
    """Slots are token positions in SGLang's pool; page 0 is its own."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        num_tokens = num_blocks * block_size
        self.pages = PagedTokenToKVPoolAllocator(
            num_tokens, block_size, torch.float16, "cpu", None, need_sort=False
        )
        self.pages.use_triton_kernels = False
        self.rows = ReqToTokenPool(
            MAX_REQUESTS, min(MAX_TOKENS, num_tokens + block_size), "cpu", enable_memory_saver=False
        )
        self.tree = self._make_tree()

    def _make_tree(self) -> Any:
        return RadixCache(
            CacheInitParams(
                disable=not self.caching,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.pages,
                page_size=self.block_size,
            )
        )

    def pack(self, tokens: list[int]) -> array[int]:
        """64-bit ids: what SGLang's requests carry."""
        return array("q", tokens)

    def admit(self, seq_id: int, prompt: Sequence[int]) -> tuple[Request, int]:
        del seq_id  # a row number is the identity
        ids = prompt if isinstance(prompt, array) else array("q", prompt)
        num_tokens = len(ids)
        found = self.tree.match_prefix(MatchPrefixParams(RadixKey(ids, limit=num_tokens - 1)))
        num_cached, node = found.device_prefix_len, found.last_device_node
        lock = self.tree.lock(node)
        # The page-aligned `alloc` gives one request what `alloc_extend` would; the latter is a
        # kernel on a GPU, and its stand-in for CPUs takes about a millisecond.
        new_slots = self._take(num_tokens - num_cached)
        if new_slots is None:
            self.tree.unlock(lock)
            raise MemoryError("SGLang has too few free pages")
        (index,) = self.rows.alloc_rows(1)
        row = self.rows.req_to_token[index]
        if num_cached:
            row[:num_cached] = self.tree.path_device_indices(node)[:num_cached]
        row[num_cached:num_tokens] = new_slots[: num_tokens - num_cached]
        request = Request(ids, ids, KVRecord(index, num_tokens, num_cached), node, lock)
        if self.caching:
            self.tree.checkpoint(request, up_to=num_tokens)
        return request, num_cached

    def free(self, seq: Request) -> None:
        """Pages that the tree owns stay there, and can be evicted when nobody locks them."""
        kv = seq.kv
        num_full_tokens = kv.kv_committed_len // self.block_size * self.block_size
        if self.caching and num_full_tokens > kv.cache_inserted_len:
            self.tree.checkpoint(seq, up_to=kv.kv_committed_len)
        self.tree.free_kv_row(kv, [(kv.cache_protected_len, kv.kv_committed_len)])
        self.tree.unlock(seq.lock)
        self.rows.free_slots.append(kv.req_pool_idx)

    def start(self, seqs: Sequence[Request], prompts: Sequence[Sequence[int]]) -> RunningBatch:
        del prompts
        return RunningBatch(list(seqs))

    def decode(self, batch: RunningBatch, tokens: Sequence[int]) -> torch.Tensor:
        table, lengths = self.rows.req_to_token, batch.lengths
        last_slots = table[batch.rows, lengths - 1].long()
        new_lengths = lengths + 1
        self._evict_for(len(batch.requests) * self.block_size)
        slots = self.pages.alloc_decode(new_lengths, new_lengths, last_slots)
        if slots is None:
            raise MemoryError("SGLang has too few free pages")
        table[batch.rows, lengths] = slots.to(torch.int32)
        batch.lengths = new_lengths
        for request in batch.requests:
            request.kv.kv_committed_len += 1
        if self.caching:
            for request, token in zip(batch.requests, tokens, strict=True):
                if request.full_untruncated_fill_ids is request.origin_input_ids:
                    request.full_untruncated_fill_ids = request.origin_input_ids[:]
                request.full_untruncated_fill_ids.append(token)
        return slots

    def exchange(
        self, batch: RunningBatch, leaving: int, joining: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        super().exchange(batch.requests, leaving, joining)
        batch.refresh()

    def table(self, seq: Request) -> list[int]:
        row = self.rows.req_to_token[seq.kv.req_pool_idx]
        return [
            slot // self.block_size for slot in row[: seq.kv.kv_committed_len : self.block_size]
        ]

    def sequences(self, batch: RunningBatch) -> list[Request]:
        return batch.requests

    def slots(self, decoded: torch.Tensor) -> list[int]:
        return decoded.tolist()

    def untraced_bytes(self) -> int:
        """Free pages and the ids in the tree. Rows of requests are left out: none is running."""
        tensors, nodes = [self.pages.free_pages], [self.tree.root_node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if isinstance(node.value, torch.Tensor):
                tensors.append(node.value)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def _take(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of whole pages for `num_tokens`; cached pages are evicted if too few are free."""
        num_slots = -(-num_tokens // self.block_size) * self.block_size
        self._evict_for(num_slots)
        return self.pages.alloc(num_slots)

    def _evict_for(self, num_slots: int) -> None:
        missing = num_slots - self.pages.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))


ADAPTER = SGLangRadix
