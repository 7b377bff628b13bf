"""A `BlockManager` in the shape of vLLM's `KVCacheManager`, for one full-attention group.

An engine written against `KVCacheManager` keeps its calls. What differs, and must be known:

- A block may be found by others once it is written, not once it is scheduled. Requests of one step
  do not find each other's blocks; the next step's do.
- Equal content is stored once, so a table may change in place when content turns out to be there
  already. `take_changed_block_ids` names these requests; an engine sends their tables whole.
- Every block is usable: there is no null block, and ids begin at 0.

- `reset_prefix_cache` never fails: running requests keep their blocks, and nobody finds them.

Left out, because the manager has no call that does it: `evict_blocks`, `take_events`,
`pop_blocks_for_free`, `take_new_block_ids`, `remove_skipped_blocks`, and whatever concerns several
groups, windows, encoders and connectors' hand-offs.

Knows vLLM's words for requests and blocks. Does not import vLLM, and knows neither its scheduler nor
its hashes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvblocks.errors import InvalidLength, InvalidTokens
from kvblocks.facades.held import HeldRequests
from kvblocks.hashing import Adapter, Media
from kvblocks.manager import BlockManager


class LoRARequest(Protocol):
    """What is read of an adapter: both together say which weights."""

    @property
    def lora_name(self) -> str:
        """Its name."""

    @property
    def lora_path(self) -> str:
        """Where its weights lie."""


class PlaceholderRange(Protocol):
    """What is read of where a media item lies."""

    @property
    def offset(self) -> int:
        """The position of its first placeholder token."""


class MultiModalFeature(Protocol):
    """What is read of a media item."""

    @property
    def identifier(self) -> str:
        """The hash of its content."""

    @property
    def mm_position(self) -> PlaceholderRange:
        """Where it lies."""


class Request(Protocol):
    """What is read of a request; vLLM's own has all of it."""

    @property
    def request_id(self) -> str:
        """Its name, and that of its sequence."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output."""

    @property
    def num_tokens(self) -> int:
        """The length of `all_token_ids`."""

    @property
    def num_computed_tokens(self) -> int:
        """Positions scheduled in the steps before this one, rejected drafts taken off."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Of these, the positions of steps that have not completed."""

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""

    @property
    def skip_reading_prefix_cache(self) -> bool | None:
        """Whether it must compute all of its prompt."""

    @property
    def cache_salt(self) -> str | None:
        """The namespace of its content."""

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter that it is computed with."""

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        """The media behind its placeholder tokens."""

    @property
    def prompt_embeds(self) -> object | None:
        """Embeddings in the place of token ids; refused, as they have no identity here."""


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Block ids, one tuple a group; here there is one group."""

    blocks: tuple[tuple[int, ...], ...]

    def get_block_ids(
        self,
        allow_none: bool = False,  # noqa: FBT001, FBT002 -- vLLM's signature
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """The ids of all groups, or of some; None for no block at all, if that is allowed."""
        groups = self.blocks if group_ids is None else [self.blocks[group] for group in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(list(group) for group in groups)

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, in as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Tokens asked for and found, since the last time that somebody took them."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class VLLMFacade:
    """vLLM's calls, on a manager that may be used beside it.

    But not to fork these requests: vLLM's calls have no place for the copies of a fork.

    >>> from types import SimpleNamespace
    >>> def request(name, ids):
    ...     return SimpleNamespace(
    ...         request_id=name, all_token_ids=ids, num_tokens=len(ids), num_computed_tokens=0,
    ...         num_in_flight_tokens=0, num_preemptions=0, skip_reading_prefix_cache=False,
    ...         cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None,
    ...     )
    >>> cache = VLLMFacade(BlockManager(num_blocks=8, block_size=4), max_model_len=32)
    >>> a = request("a", [1, 2, 3, 4, 5, 6])
    >>> blocks, num_computed_tokens, _ = cache.get_computed_blocks(a)
    >>> cache.allocate_slots(a, 6, num_computed_tokens, blocks).get_block_ids()
    ([0, 1],)
    >>> a.num_computed_tokens = 6
    >>> cache.free(a)
    >>> cache.get_computed_blocks(request("b", [1, 2, 3, 4, 9]))
    (KVCacheBlocks(blocks=((0,),)), 4, 0)
    """

    def __init__(self, manager: BlockManager, max_model_len: int) -> None:
        self.manager = manager
        self.max_model_len = operator.index(max_model_len)
        self.empty_kv_cache_blocks = KVCacheBlocks(((),))
        self._held = HeldRequests(manager)
        self._changed: dict[str, None] = {}
        self._stats = PrefixCacheStats()

    # ── what is there ────────────────────────────────────────────────────────────────────────

    @property
    def usage(self) -> float:
        """The share of the pool that is neither free nor cached, 0 to 1. O(1)."""
        stats = self.manager.stats()
        return (stats.num_held_blocks + stats.num_fenced_blocks) / stats.num_blocks

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """The cached blocks of a request, their number of tokens, and 0.

        At most `max_cache_hit_length` tokens, and never the last one. The third value is vLLM's
        boundary of groups that retain less, of which there are none. A pure query, O(tokens).
        `InvalidLength` for a negative limit, `InvalidTokens` for a prompt of embeddings.
        """
        _require_ids(request)
        if not self.manager.prefix_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        if limit < 0:
            raise InvalidLength(f"max_cache_hit_length must be at least 0, got {limit}")
        match = self.manager.match(
            request.all_token_ids[: limit + 1],
            salt=request.cache_salt,
            adapter=_adapter_of(request),
            media=_media_of(request),
        )
        return KVCacheBlocks((match.block_ids,)), match.num_tokens, 0

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The whole table of a request; empty for an unknown one. O(its blocks)."""
        if request_id not in self.manager:
            return self.empty_kv_cache_blocks
        return KVCacheBlocks((tuple(self.manager.block_table(request_id)),))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The whole table of a request, as one list a group. O(its blocks)."""
        return tuple(list(group) for group in self.get_blocks(request_id).blocks)

    # ── the life of a request ────────────────────────────────────────────────────────────────

    def allocate_slots(  # noqa: PLR0917 -- vLLM's signature
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,  # noqa: FBT001, FBT002 -- vLLM's signature
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,  # noqa: FBT001, FBT002 -- vLLM's signature
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,  # noqa: FBT001, FBT002 -- vLLM's signature
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Take the blocks for a request's next positions; the new ones, or None if they are too few.

        Positions that earlier steps wrote are committed first, unless `delay_cache_blocks`. Drafts
        and lookahead take blocks and are written again by later steps as needed. Tokens that a
        connector brings count as new. There is no watermark and no zeroing, so the last two
        arguments change nothing. A None has taken nothing. O(cached tokens + blocks taken).

        `InvalidLength` where nothing is new, where no position is left of `max_model_len`, where a
        new request does not begin at the end of its cached prefix, where a running one brings a
        prefix or goes back behind what is committed, for encoder tokens and for a negative number;
        `InvalidTokens` for a prompt of embeddings. What is refused has changed nothing.
        """
        _require_ids(request)
        del new_computed_blocks, has_scheduled_reqs, skip_zeroing_group_ids
        num_lookahead_tokens = _number("num_lookahead_tokens", num_lookahead_tokens)
        reserved_blocks = _number("reserved_blocks", reserved_blocks)
        seq_id = request.request_id
        start = _number("num_computed_tokens", request.num_computed_tokens) + _number(
            "num_new_computed_tokens", num_new_computed_tokens
        )
        num_new = _number("num_new_tokens", num_new_tokens) + _number(
            "num_external_computed_tokens", num_external_computed_tokens
        )
        if num_new < 1:
            raise InvalidLength(f"at least 1 token must be new, got {num_new}")
        if num_encoder_tokens:
            raise InvalidLength(f"there is no encoder cache, got {num_encoder_tokens} tokens")
        if start >= self.max_model_len:
            raise InvalidLength(
                f"a position must be left of max_model_len {self.max_model_len}, got {start} computed"
            )
        if seq_id in self.manager:
            self._require_running(request, num_new_computed_tokens)
            if not delay_cache_blocks:
                self.cache_blocks(request, request.num_computed_tokens)

        stop = min(start + num_new + num_lookahead_tokens, self.max_model_len)
        room = self._held.num_blocks_for(stop) + reserved_blocks if reserved_blocks else 0
        if full_sequence_must_fit:
            num_tokens = min(request.num_tokens, self.max_model_len)
            room = max(room, self._held.num_blocks_for(num_tokens))
        is_new = seq_id not in self.manager
        plan = self._held.take(
            seq_id,
            request.all_token_ids,
            start=start,
            stop=stop,
            salt=request.cache_salt,
            adapter=_adapter_of(request),
            media=_media_of(request),
            room=room,
        )
        if plan is None:
            return None
        if is_new:
            table = self.manager.block_table(seq_id)
            return self._make_blocks(table[start // self.manager.block_size :])
        return self._make_blocks(plan.new_blocks.get(seq_id, ()))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Commit what is written of the first `num_computed_tokens` positions; others may find it.

        Positions in flight and drafts are left for later. O(ids that are new).
        """
        num_tokens = min(
            num_computed_tokens,
            request.num_computed_tokens - request.num_in_flight_tokens,
            request.num_tokens,
        )
        if self._held.commit(request.request_id, request.all_token_ids, num_tokens):
            self._changed[request.request_id] = None

    def free(self, request: Request) -> None:
        """Give a request's blocks up, after committing what is written; unknown ones have none."""
        seq_id = request.request_id
        if seq_id in self.manager:
            self.cache_blocks(request, request.num_computed_tokens)
            self._held.free(seq_id)
            self._changed.pop(seq_id, None)

    def take_changed_block_ids(self) -> dict[str, tuple[list[int], ...]]:
        """The whole tables of requests that had blocks exchanged since the last call.

        vLLM has no such call: its tables only grow. O(blocks of these tables).
        """
        changed, self._changed = self._changed, {}
        return {seq_id: self.get_block_ids(seq_id) for seq_id in changed}

    def reset_prefix_cache(self) -> bool:
        """Forget all content, as after new weights; always True. O(cached runs + requests)."""
        self.manager.reset_prefix_cache()
        return True

    # ── statistics ───────────────────────────────────────────────────────────────────────────

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count a look-up that led to a request's admission, unless it was skipped."""
        if not self.manager.prefix_caching or request.skip_reading_prefix_cache:
            return
        stats = self._stats
        if request.num_preemptions:
            self._stats = replace(
                stats,
                preempted_requests=stats.preempted_requests + 1,
                preempted_queries=stats.preempted_queries + request.num_tokens,
                preempted_hits=stats.preempted_hits + num_hits,
            )
        else:
            self._stats = replace(
                stats,
                requests=stats.requests + 1,
                queries=stats.queries + request.num_tokens,
                hits=stats.hits + num_hits,
            )

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    # ── within ───────────────────────────────────────────────────────────────────────────────

    def _make_blocks(self, block_ids: Iterable[int]) -> KVCacheBlocks:
        return KVCacheBlocks((tuple(block_ids),))

    def _require_running(self, request: Request, num_new_computed_tokens: int) -> None:
        if num_new_computed_tokens:
            raise InvalidLength(
                f"a request that holds blocks brings no cached prefix, got "
                f"{num_new_computed_tokens} tokens"
            )
        num_committed = self.manager.num_committed_tokens(request.request_id)
        if request.num_computed_tokens < num_committed:
            raise InvalidLength(
                f"a request may not go back behind its committed tokens, got "
                f"{request.num_computed_tokens} < {num_committed}: free it first"
            )


def _number(name: str, value: int) -> int:
    """A count as an int. `TypeError` for what is none, `InvalidLength` for a negative one."""
    number = operator.index(value)
    if number < 0:
        raise InvalidLength(f"{name} must be at least 0, got {number}")
    return number


def _require_ids(request: Request) -> None:
    if request.prompt_embeds is not None:
        raise InvalidTokens(
            f"prompts must be token ids, got embeddings with request {request.request_id!r}"
        )


def _adapter_of(request: Request) -> Adapter | None:
    lora = request.lora_request
    return None if lora is None else Adapter(repr((lora.lora_name, lora.lora_path)))


def _media_of(request: Request) -> tuple[Media, ...]:
    return tuple(Media(item.mm_position.offset, item.identifier) for item in request.mm_features)
