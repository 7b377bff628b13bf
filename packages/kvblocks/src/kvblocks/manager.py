"""What an engine talks to: sequences in, plain data out, all or nothing.

One step of an engine, with what each call guarantees:

    step = manager.begin_step()        from here on, blocks in use stay untouched until the step completes
    manager.allocate("a", prompt)      blocks for the whole prompt; cached ones by reference
    plan = manager.append({"a": 512})  schedules the next positions; says where to write, what to copy
    ...                                swap-outs, swap-ins, copies; then the forward pass writes
    manager.complete_step(step)
    manager.commit("a", 512)           these positions are written, and may be shared from now on

What changes nothing is in `kvblocks.queries`, and belongs to `BlockManager` too.

Knows sequences, the pool and the content index, and keeps them consistent. Does not know arrays,
devices, models or time. One manager belongs to one thread.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self

from kvblocks.append import append
from kvblocks.decode import DecodeBatch
from kvblocks.errors import InvalidBatch, InvalidConfig, InvalidLength
from kvblocks.events import Event, EventLog
from kvblocks.explain import explain
from kvblocks.hashing import (
    Adapter,
    Digest,
    Media,
    keys_of,
    make_namespace,
    pack_tokens,
    read_media,
    salt_key,
    sha256_digest,
)
from kvblocks.ledger import Ledger
from kvblocks.lifetimes import Clock, Lifetimes
from kvblocks.memory import Memory
from kvblocks.pins import max_pinned_blocks
from kvblocks.policies import make_policy
from kvblocks.prompts import (
    allocate,
    allocate_count,
    find_prefix,
    read_lookahead,
    read_prompt,
)
from kvblocks.queries import Queries
from kvblocks.reservations import plan_reservation, reserve
from kvblocks.results import (
    ALL_SALTS,
    Allocation,
    AllSalts,
    Batch,
    BlockMerge,
    BlockSwap,
    Forgotten,
    Match,
    PinName,
    Reservation,
    SequenceId,
    StepPlan,
)
from kvblocks.swap import (
    free_swapped,
    read_leaving,
    read_returning,
    swap_in,
    swap_out,
)
from kvblocks.windows import read_windows

_MAX_BLOCKS = 2**31 - 1
_MAX_SLOTS = 2**63 - 1


class BlockManager(Queries):
    """Block tables, copy-on-write and prefix caching over a pool of fixed-size blocks.

    Every id 0..num_blocks-1 is usable, and a fresh manager hands out 0, 1, 2, ... Costs are stated
    per call; none depends on the size of the pool or of the cache.

    `windows` are groups of layers whose queries read that many keys, their own included: they take
    blocks from the same pool and have tables of their own, without what no later query can read.

    `digest` and `clock` are called in the midst of calls: they may raise, and must not call back.

    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> manager.allocate("a", [1, 2, 3, 4, 5, 6]).block_ids
    (0, 1)
    >>> manager.append({"a": 6}).slot_mapping.tolist()
    [0, 1, 2, 3, 4, 5]
    >>> manager.commit("a", 6)
    ()
    >>> manager.fork("a", "b")
    >>> manager.append({"a": [7], "b": [8]}).copies
    (BlockCopy(source=1, destination=2, num_tokens=2),)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        partial_reuse: bool = False,
        policy: str = "lru",
        pin_limit: float = 0.5,
        num_host_blocks: int = 0,
        windows: Iterable[int] = (),
        digest: Digest = sha256_digest,
        events: bool = False,
        explains: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.num_blocks = operator.index(num_blocks)
        self.block_size = operator.index(block_size)
        self.num_host_blocks = operator.index(num_host_blocks)
        self.prefix_caching = prefix_caching
        self.partial_reuse = partial_reuse
        _check_sizes(self.num_blocks, self.block_size, self.num_host_blocks)
        self.windows = read_windows(windows)
        on_content: dict[str, int] = {
            "partial_reuse": partial_reuse,
            "events": events,
            "explains": explains,
        }
        for name, value in on_content.items():
            if value and not prefix_caching:
                raise InvalidConfig(f"{name} needs prefix_caching")
        for name, value in (on_content | {"num_host_blocks": num_host_blocks}).items():
            if value and self.windows:
                raise InvalidConfig(f"{name} needs no windows, got {self.windows}")
        self.policy = policy
        self._ledger = Ledger(
            self.num_blocks,
            self.block_size,
            prefix_caching=self.prefix_caching,
            partial_reuse=self.partial_reuse,
            policy=make_policy(policy),
            max_pinned=max_pinned_blocks(pin_limit, self.num_blocks),
            num_host_blocks=self.num_host_blocks,
            windows=self.windows,
            digest=digest,
            log=EventLog(self.block_size) if events else None,
            memory=Memory(4 * self.num_blocks) if explains else None,
            lifetimes=Lifetimes(clock) if clock else None,
        )

    # ── the life of a sequence ───────────────────────────────────────────────────────────────

    def allocate(
        self,
        seq_id: SequenceId,
        tokens: Iterable[int] | int,
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
        priority: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> Allocation:
        """Take blocks for a whole prompt, cached ones by reference; committed = computed = cached.

        What it may share is said by `match`. With `partial_reuse`, cached positions of a block that
        differs later are copied: these are computed, and committed when you say so. Blocks are taken
        for `num_lookahead_tokens` beyond the prompt as well.

        Without a prefix cache token ids are not kept, and their number is enough. What this sequence
        holds and computes is cached with its `priority`, or a higher one that it has: the policy
        "priority" evicts the lowest first. O(len(tokens) + blocks). `SequenceExists`,
        `InvalidTokens`, `InvalidNamespace`, `InvalidLength`, `OutOfBlocks`.
        """
        priority = operator.index(priority)
        lookahead = read_lookahead(num_lookahead_tokens)
        if (
            type(tokens) is int
            and not (self.prefix_caching or self.windows)
            and (salt, adapter, media) == (None, None, ())
            and (taken := allocate_count(self._ledger, seq_id, tokens, priority, lookahead))
        ):
            return taken
        prompt = read_prompt(self._ledger, tokens, salt, adapter, media)
        self._ledger.tick()
        memory = self._ledger.memory
        if memory is None:
            return allocate(self._ledger, seq_id, prompt, priority, lookahead)
        explanation = explain(self._ledger, memory, prompt)
        allocation = allocate(self._ledger, seq_id, prompt, priority, lookahead)
        self._ledger.sequences[seq_id].explanation = explanation
        memory.note_namespace(prompt.namespace)
        return allocation

    def append(self, batch: Batch) -> StepPlan:
        """Schedule the next positions of several sequences; take blocks only past their capacity.

        An entry is a count, or the token ids of the positions computed, computed + 1, ... A write
        into a block that others hold goes to a block of its own, and the positions that are
        already there are copied; the last holder writes in place. O(tokens scheduled).
        `UnknownSequence`, `InvalidBatch`, `InvalidTokens`, `InvalidLength`, `OutOfBlocks`; then
        nothing changed.
        """
        return append(self._ledger, batch)

    def reserve(self, lengths: Mapping[Any, int]) -> Reservation:
        """See to it that sequences have blocks for so many positions each, all or nothing.

        Until then `append` and decode batches need no block for them, and `truncate` keeps them.
        A block that others hold and that would be written is exchanged now: the answer says what
        to copy, as a plan would. A smaller number than before keeps less from the next `truncate`
        on, 0 nothing. A fork does not share what is reserved, but it does share a block that is
        begun, which the first to write copies: reserve again after a fork. Who is swapped out, or
        freed, gives its reservation up. A decode batch goes on without a sequence that gets blocks.
        O(blocks).
        `UnknownSequence`, `InvalidLength`, `OutOfBlocks`; `InvalidConfig` where there are windows.

        >>> manager = BlockManager(num_blocks=7, block_size=4)
        >>> manager.allocate("a", range(16)).num_new_blocks
        4
        >>> manager.reserve({"a": 20}).new_blocks
        {'a': (4,)}
        >>> print(manager.can_allocate(range(100, 112)))  # two would wait for each other later
        blocks needed: 3, available: 2; 1 short until sequences are freed
        """
        reservation = plan_reservation(self._ledger, lengths)
        self._ledger.tick()
        return reserve(self._ledger, reservation)

    def commit(
        self, seq_id: SequenceId, num_tokens: int, token_ids: Iterable[int] = ()
    ) -> tuple[BlockMerge, ...]:
        """Declare that positions [0, num_tokens) are written: full blocks may be shared from now on.

        `token_ids` brings the ids that were unknown when the positions were appended; without a
        prefix cache they are not kept. Equal content is stored once: where a full block's content is
        there already, the sequence adopts that block and gives its own back, and the answer says so:
        whoever mirrors block tables changes these entries. O(blocks that became full).
        `UnknownSequence`, `InvalidTokens`, `InvalidLength`.
        """
        num_tokens, packed = operator.index(num_tokens), pack_tokens(token_ids)
        sequence = self._ledger.get(seq_id)
        if not packed and sequence.batch is None and sequence.only_moves(num_tokens):
            self._ledger.tick()
            sequence.num_committed = num_tokens
            return ()
        if not sequence.num_committed <= num_tokens <= sequence.num_computed:
            raise InvalidLength(
                f"commit needs committed <= num_tokens <= computed, got "
                f"{sequence.num_committed} <= {num_tokens} <= {sequence.num_computed}"
            )
        if sequence.keeps_ids:
            sequence.check_ids(num_tokens, packed)
        hashes: list[bytes] = []
        self._ledger.tick()
        if self._ledger.needs_hashes:
            hashes = self._ledger.hash_news(sequence, num_tokens, packed)
        self._ledger.leave_batch(sequence)
        sequence.num_committed = num_tokens
        if sequence.keeps_ids:
            sequence.token_ids.extend(packed)
        merges: tuple[BlockMerge, ...] = ()
        if sequence.keeps_ids and sequence.num_unpublished >= self.block_size:
            merges = self._ledger.publish(sequence, hashes)
        if sequence.windows:
            self._ledger.windows.slide(sequence)
        return merges

    def truncate(self, seq_id: SequenceId, num_tokens: int) -> None:
        """Forget positions from `num_tokens` on, such as rejected drafts; surplus blocks go back.

        What of a prompt was not scheduled yet is forgotten too, with its blocks. O(blocks given
        back). `UnknownSequence`, `InvalidLength` unless committed <= num_tokens <= computed.
        """
        num_tokens = operator.index(num_tokens)
        sequence = self._ledger.get(seq_id)
        if not sequence.num_committed <= num_tokens <= sequence.num_computed:
            raise InvalidLength(
                f"truncate needs committed <= num_tokens <= computed, got "
                f"{sequence.num_committed} <= {num_tokens} <= {sequence.num_computed}"
            )
        self._ledger.leave_batch(sequence)
        self._ledger.pool.give_back(sequence.truncate(num_tokens), sequence.last_step)

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Make a sequence that shares all blocks of another; nothing is copied until one writes.

        What is computed must be committed: positions in flight are nobody's to copy yet, and their
        ids could still differ. O(blocks of the parent). `UnknownSequence`, `SequenceExists`,
        `InvalidLength`.
        """
        parent = self._ledger.get(parent_id)
        self._ledger.require_new(child_id)
        if parent.num_committed != parent.num_computed:
            raise InvalidLength(
                f"fork needs committed = computed, got {parent.num_committed} and "
                f"{parent.num_computed}: commit or truncate first"
            )
        self._ledger.leave_batch(parent)
        num_full = parent.num_committed // self.block_size
        full = parent.block_table[parent.num_run_blocks : num_full]
        # Without a prefix cache nothing was published; who was swapped in together may share blocks.
        if full and self._ledger.pool.shared.keys().isdisjoint(full):
            parent.run = self._ledger.runs.set_apart(parent.run, full)
            parent.num_run_blocks = num_full
        child = parent.fork()
        self._ledger.sequences[child_id] = child
        self._ledger.runs.add_holder(parent.run)
        self._ledger.pool.share(child.loose_blocks)
        for table in parent.windows:
            self._ledger.pool.share(table.held)
        self._ledger.count["forks"] += 1

    def free(self, seq_id: SequenceId) -> None:
        """Give up a sequence; its full committed blocks stay cached until they are evicted.

        The host blocks of one that is swapped out are free. O(blocks of the sequence).
        `UnknownSequence`.
        """
        if seq_id in self._ledger.swapped:
            self._ledger.tick()
            free_swapped(self._ledger, seq_id)
            return
        sequence = self._ledger.get(seq_id)
        self._ledger.tick()
        self._ledger.leave_batch(sequence)
        del self._ledger.sequences[seq_id]
        self._ledger.pool.give_back(sequence.loose_blocks, sequence.last_step)
        self._ledger.runs.release(sequence.run, sequence.last_step)
        for table in sequence.windows:
            self._ledger.windows.give_up(table.held, sequence.last_step)

    def swap_out(self, seq_ids: Iterable[SequenceId]) -> tuple[BlockSwap, ...]:
        """Move sequences to host blocks, all or nothing; returns the pairs (device, host) to copy.

        The blocks that hold computed positions move, and capacity beyond is given back. A block that
        several of them share is one host block; full blocks whose content is on the host already,
        with a sequence swapped out earlier, are not copied again. Then the sequences hold no device
        blocks: nothing but `swap_in`, `free` and questions about lengths and hashes is answered
        for them. A decode batch goes on without them.

        What is computed must be committed, and no block of it be one that the open step swaps in or
        copies to: a step carries out its swap-outs, then its swap-ins, then its copies, then it
        writes. The blocks that are left stay as they are until it completes. O(tokens). `UnknownSequence`, `InvalidSwap`;
        `OutOfBlocks`, of host blocks.

        >>> manager = BlockManager(num_blocks=4, block_size=4, num_host_blocks=2)
        >>> manager.allocate("a", [1, 2, 3, 4, 5]).block_ids
        (0, 1)
        >>> _ = manager.append({"a": 5}), manager.commit("a", 5)
        >>> manager.swap_out(["a"])
        (BlockSwap(source=0, destination=0), BlockSwap(source=1, destination=1))
        >>> manager.swap_in(["a"])  # block 0 was still in the prefix cache
        (BlockSwap(source=1, destination=1),)
        """
        leaving = read_leaving(self._ledger, seq_ids)
        self._ledger.tick()
        return swap_out(self._ledger, leaving)

    def swap_in(self, seq_ids: Iterable[SequenceId]) -> tuple[BlockSwap, ...]:
        """Move sequences to device blocks again, all or nothing; the pairs (host, device) to copy.

        They are as they were, but for the ids of their blocks. Full blocks whose content is in the
        prefix cache are taken by reference; those that are copied can be found from now on. What
        several of them shared they share again. The host blocks are free, or are when the open
        step completes. O(tokens). `UnknownSequence`, `InvalidSwap`, `OutOfBlocks`.
        """
        returning = read_returning(self._ledger, seq_ids)
        self._ledger.tick()
        return swap_in(self._ledger, returning)

    def decode_batch(self, seq_ids: Iterable[SequenceId] = ()) -> DecodeBatch:
        """Let sequences advance together, one token each a step, at the cost of a few.

        See `DecodeBatch.join`. O(sequences).
        """
        batch = self._make_batch()
        listed = list(seq_ids)
        for seq_id in listed:
            batch.check_join(seq_id)
        if repeated := [seq_id for seq_id, times in Counter(listed).items() if times > 1]:
            raise InvalidBatch(f"a sequence joins a batch once, got {repeated[0]!r} again")
        for seq_id in listed:
            batch.join(seq_id)
        return batch

    def _make_batch(self) -> DecodeBatch:
        return DecodeBatch(self._ledger)

    def pin(
        self,
        name: PinName,
        tokens: Iterable[int],
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
    ) -> Match:
        """Keep the full blocks of a prefix from eviction, until `unpin(name)` or a reset.

        All of them must be cached, and no more than `pin_limit` may be pinned: blocks, or a
        fraction of the pool. O(len(tokens) + runs of all pins). `InvalidPin`, `PinLimit`,
        `InvalidTokens`, `InvalidNamespace`.
        """
        packed, namespace = pack_tokens(tokens), make_namespace(salt, adapter)
        keys = keys_of(namespace, read_media(media), self.block_size)
        num_full = len(packed) // self.block_size
        found = find_prefix(self._ledger, packed, num_full, keys)
        self._ledger.pin(name, namespace.key, found, num_full)
        return Match(num_full * self.block_size, found.blocks)

    def unpin(self, name: PinName) -> None:
        """Let a prefix be evicted when nobody holds it. O(runs of all pins). `InvalidPin`."""
        self._ledger.tick()
        self._ledger.pins.unpin(name)

    def reset_prefix_cache(self, *, salt: str | AllSalts | None = ALL_SALTS) -> Forgotten:
        """Forget all content, or that of one salt (None: that of no salt), as after new weights.

        The content of all adapters goes with its salt.

        At once and for good: no later prompt finds it, nor what sequences that are running now
        compute from it; they keep their blocks. Open steps are waited for. O(cached runs +
        sequences).

        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> manager.reset_prefix_cache()
        Forgotten(num_free_blocks=0, num_fenced_blocks=0, num_held_blocks=0)
        """
        return self._ledger.forget(b"" if isinstance(salt, AllSalts) else salt_key(salt))

    def take_events(self) -> list[Event]:
        """What became findable and what no longer is, since this was asked last, in order.

        `kvblocks.events` has the types. They wait until they are taken, and need the more memory the
        longer they do. O(1). `InvalidConfig` without `events=True`.

        >>> manager = BlockManager(num_blocks=8, block_size=2, events=True)
        >>> _ = manager.allocate("a", [1, 2, 3, 4, 5]), manager.append({"a": 5})
        >>> _ = manager.commit("a", 5), manager.reset_prefix_cache()
        >>> stored, cleared = manager.take_events()
        >>> stored.token_ids, stored.block_hashes == manager.block_hashes("a"), cleared
        ((1, 2, 3, 4), True, AllBlocksCleared())
        """
        log = self._ledger.log
        if log is None:
            raise InvalidConfig("take_events needs a manager that was made with events=True")
        return log.take()

    # ── steps in flight ──────────────────────────────────────────────────────────────────────

    def begin_step(self) -> int:
        """Open a step: later changes belong to it, until the next one begins. O(1)."""
        return self._ledger.begin_step()

    def complete_step(self, step: int) -> None:
        """Complete every step up to `step`: blocks that only they used can be had again.

        O(blocks that were fenced). `InvalidStep`.
        """
        self._ledger.complete_step(operator.index(step))

    # ── copies ───────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> bytes:
        """The whole state, for `restore` in this or another process. Changes nothing. O(state).

        Sequences in a `DecodeBatch` are stored as ones that go on by themselves. Ids of sequences
        and names of pins must be plain values: `InvalidSnapshot`.

        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> snapshot = manager.snapshot()
        >>> manager.allocate("a", [1, 2, 3]).block_ids
        (0,)
        >>> "a" in BlockManager.restore(snapshot)
        False
        """
        from kvblocks.snapshots import dump_state  # noqa: PLC0415 -- few need pickle and json

        return dump_state(vars(self), self._ledger, self.policy, self._ledger.digest)

    @classmethod
    def restore(
        cls, snapshot: bytes, *, digest: Digest = sha256_digest, clock: Clock | None = None
    ) -> Self:
        """A new manager in the state of a snapshot; `digest` is the one that its manager had.

        Where its manager had a `clock`, time stands still without one.

        Try a plan on a copy, and keep the copy or not. A snapshot is a pickle of this package's own
        classes: read none that you do not trust. O(state). `InvalidSnapshot`.
        """
        from kvblocks.snapshots import load_state  # noqa: PLC0415 -- few need pickle and json

        manager = cls.__new__(cls)
        vars(manager).update(load_state(snapshot, digest, clock))
        return manager


def _check_sizes(num_blocks: int, block_size: int, num_host_blocks: int) -> None:
    """Refuse sizes that no pool has, or whose blocks and slots have no numbers. `InvalidConfig`."""
    if num_blocks < 1:
        raise InvalidConfig(f"num_blocks must be at least 1, got {num_blocks}")
    if block_size < 1:
        raise InvalidConfig(f"block_size must be at least 1, got {block_size}")
    if num_host_blocks < 0:
        raise InvalidConfig(f"num_host_blocks must not be negative, got {num_host_blocks}")
    for name, value in {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks}.items():
        if value > _MAX_BLOCKS:
            raise InvalidConfig(
                f"{name} must be at most 2**31 - 1, as block ids are int32, got {value}"
            )
    if num_blocks * block_size > _MAX_SLOTS:
        raise InvalidConfig(
            f"num_blocks * block_size must be less than 2**63, as slots are int64, got "
            f"{num_blocks} * {block_size}"
        )
