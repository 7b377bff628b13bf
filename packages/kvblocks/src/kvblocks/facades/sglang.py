"""A `BlockManager` in the shape of SGLang's `RadixCache` and its paged allocator.

In SGLang slots belong to nobody until the tree adopts them. Here every held block belongs to a
sequence, so the calls that take slots, publish them and give them back name the request, and one
object stands for tree and allocator. Sizes are in tokens, slots are `block_id * page_size + offset`.

- `checkpoint` may exchange pages, as SGLang's does: read `kv_indices` again after it.
- Pages are never lost by a failed call, and `alloc` evicts by itself: nothing is evicted beforehand.
- There is no page for padding, and slots begin at 0.

Left out, because the manager cannot do it thinly: `insert` (it would adopt slots that no sequence
holds), `evict` (pages are evicted when others are taken, not before), `free` of any slots,
`alloc_extend` and `alloc_decode` (they name requests by their last slot), `pretty_print`,
`take_events`, and whatever concerns windows, host memory, sessions and bigrams.

Knows SGLang's words for prefixes, locks and requests. Does not import SGLang, and knows neither its
scheduler nor tensors.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

from kvblocks.errors import InvalidPin
from kvblocks.facades.held import HeldRequests
from kvblocks.manager import BlockManager


class PrefixKey(Protocol):
    """What is read of a key; SGLang's `RadixKey` has all of it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""

    @property
    def extra_key(self) -> str | None:
        """A namespace, such as an adapter's name."""

    @property
    def limit(self) -> int | None:
        """How many tokens count, if not all."""

    @property
    def cache_salt(self) -> str | None:
        """A namespace within."""


class MatchParams(Protocol):
    """What is read of the parameters of a match."""

    @property
    def key(self) -> PrefixKey:
        """What to look up."""


@dataclass(frozen=True, slots=True)
class RadixKey:
    """Tokens in a namespace."""

    token_ids: Sequence[int]
    extra_key: str | None = None
    _: KW_ONLY
    limit: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class MatchPrefixParams:
    """The parameters of a match."""

    key: PrefixKey


@dataclass(frozen=True, slots=True, eq=False)
class TreeNode:
    """The end of a prefix that was cached when it was looked up; each look-up makes its own."""

    token_ids: Sequence[int]
    block_table: array[int]
    salt: str | None


class MatchResult(NamedTuple):
    """A cached prefix, in whole pages. Nothing lies on the host: all three nodes are one."""

    device_prefix_len: int
    last_device_node: TreeNode
    last_host_node: TreeNode
    best_match_node: TreeNode


class LockRefResult(NamedTuple):
    """By how many tokens a lock changed what can be evicted."""

    delta: int


class Request(Protocol):
    """What is read of a request; SGLang's own has all of it."""

    @property
    def rid(self) -> str:
        """Its name, and that of its sequence."""

    @property
    def full_untruncated_fill_ids(self) -> Sequence[int]:
        """Prompt and output, at least as far as is allocated at first and checkpointed later."""

    @property
    def last_node(self) -> TreeNode:
        """Where its cached prefix ends: what `match_prefix` found."""

    @property
    def extra_key(self) -> str | None:
        """A namespace, such as an adapter's name."""

    @property
    def cache_salt(self) -> str | None:
        """A namespace within."""


class SGLangFacade:
    """SGLang's calls, on a manager that may be used beside it.

    But not to fork these requests: SGLang's calls have no place for the copies of a fork.
    Locks are pins: give the manager a `pin_limit` for as much as may be locked. A request that has
    its slots holds its prefix itself and needs no lock.

    >>> from types import SimpleNamespace
    >>> def request(name, ids, node):
    ...     return SimpleNamespace(
    ...         rid=name, full_untruncated_fill_ids=ids, last_node=node, extra_key=None,
    ...         cache_salt=None,
    ...     )
    >>> cache = SGLangFacade(BlockManager(num_blocks=8, block_size=4, pin_limit=1.0))
    >>> found = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 5, 6], limit=5)))
    >>> a = request("a", [1, 2, 3, 4, 5, 6], found.last_device_node)
    >>> cache.alloc(6, req=a).tolist()
    [0, 1, 2, 3, 4, 5]
    >>> cache.checkpoint(a, up_to=6)
    >>> cache.release_kv_cache(a)
    >>> found = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 9], limit=4)))
    >>> cache.path_device_indices(found.last_device_node).tolist()
    [0, 1, 2, 3]
    >>> cache.available_size(), cache.evictable_size(), cache.protected_size()
    (28, 4, 0)
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.page_size = manager.block_size
        self._held = HeldRequests(manager)
        self._num_locks: dict[TreeNode, int] = {}

    # ── the tree ─────────────────────────────────────────────────────────────────────────────

    def match_prefix(self, params: MatchParams) -> MatchResult:
        """The longest cached prefix of a key, in whole pages, and all of it if all is cached.

        A pure query: nothing is split, and no time of use is noted. O(tokens). `InvalidTokens`.
        """
        key = params.key
        ids = key.token_ids[: key.limit]
        salt = _namespace(key.extra_key, key.cache_salt)
        # A manager leaves the last token to compute; one that nobody asked for may be left.
        match = self.manager.match([*ids, 0], salt=salt)
        node = TreeNode(ids[: match.num_tokens], match.block_table, salt)
        return MatchResult(match.num_tokens, node, node, node)

    def path_device_indices(self, node: TreeNode) -> array[int]:
        """The slots of a prefix, int64; true until others take pages, unless somebody holds it."""
        return self._slots_of(node.block_table)

    def inc_lock_ref(self, node: TreeNode) -> LockRefResult:
        """Keep a prefix from eviction, once more. `InvalidPin` if it is gone, `PinLimit`."""
        before = self.evictable_size()
        if node.block_table:
            if node not in self._num_locks:
                self.manager.pin(node, node.token_ids, salt=node.salt)
            self._num_locks[node] = self._num_locks.get(node, 0) + 1
        return LockRefResult(self.evictable_size() - before)

    def dec_lock_ref(self, node: TreeNode, params: object = None) -> LockRefResult:
        """Give a lock back; receipts are not needed. `InvalidPin` for what is not locked."""
        del params
        before = self.evictable_size()
        if node.block_table:
            num_locks = self._num_locks.get(node, 0)
            if not num_locks:
                raise InvalidPin("a node must be locked, got one whose locks are given back")
            if num_locks == 1:
                self.manager.unpin(node)
                del self._num_locks[node]
            else:
                self._num_locks[node] = num_locks - 1
        return LockRefResult(self.evictable_size() - before)

    def reset(self) -> None:
        """Forget all content and all locks. Requests that run keep their pages."""
        self.manager.reset_prefix_cache()
        self._num_locks.clear()

    def evictable_size(self) -> int:
        """Tokens that are cached and that nobody holds. O(1)."""
        return self.manager.stats().num_cached_blocks * self.page_size

    def protected_size(self) -> int:
        """Slots that are neither free nor evictable, those not yet published included. O(1)."""
        stats = self.manager.stats()
        return (stats.num_held_blocks + stats.num_fenced_blocks) * self.page_size

    def total_size(self) -> int:
        """Evictable and protected. O(1)."""
        return self.evictable_size() + self.protected_size()

    # ── the allocator ────────────────────────────────────────────────────────────────────────

    def available_size(self) -> int:
        """Free slots; `alloc` can have the evictable ones too. O(1)."""
        return self.manager.stats().num_free_blocks * self.page_size

    def alloc(self, need_size: int, *, req: Request) -> array[int] | None:
        """The slots of a request's next positions, int64, or None if pages are too few.

        The first call holds the prefix that ends in `req.last_node`. `need_size` need not be whole
        pages. A None has taken nothing. O(prefix + slots).

        `InvalidLength` if the prefix is no longer what is cached, or where nothing is needed.
        """
        if req.rid in self.manager:
            start = self.manager.num_computed_tokens(req.rid)
        else:
            start = len(req.last_node.token_ids)
        plan = self._held.take(
            req.rid,
            req.full_untruncated_fill_ids,
            start=start,
            stop=start + operator.index(need_size),
            salt=_namespace(req.extra_key, req.cache_salt),
        )
        return None if plan is None else plan.slot_mapping

    def kv_indices(self, req: Request) -> array[int]:
        """The slots of all pages of a request, int64. O(slots). `UnknownSequence`."""
        return self._slots_of(self.manager.block_table(req.rid))

    def checkpoint(self, req: Request, *, up_to: int) -> None:
        """Publish positions [0, up_to), which are written. O(ids that are new). `InvalidLength`."""
        self._held.commit(req.rid, req.full_untruncated_fill_ids, up_to)

    def free_segment(self, *, req: Request, start_pos: int) -> None:
        """Give back what is not published from a position on, as of rejected drafts.

        `InvalidLength` before what is published. O(pages given back).
        """
        self._held.truncate(req.rid, start_pos)

    def release_kv_cache(self, req: Request) -> None:
        """Give a request's pages up; those published stay cached. `UnknownSequence`."""
        self._held.free(req.rid)

    # ── within ───────────────────────────────────────────────────────────────────────────────

    def _slots_of(self, block_table: array[int]) -> array[int]:
        slots, size = array("q"), self.page_size
        for block in block_table:
            slots.extend(range(block * size, block * size + size))
        return slots


def _namespace(extra_key: str | None, cache_salt: str | None) -> str | None:
    """One salt for both names, different for different pairs; as in SGLang, "" is no salt."""
    pair = extra_key, cache_salt or None
    return None if pair == (None, None) else repr(pair)
