"""What an engine talks to: sequences in, plain data out, all or nothing.

One step of an engine, with what each call guarantees:

    step = manager.begin_step()        from here on, blocks in use stay untouched until the step completes
    manager.allocate("a", prompt)      blocks for the whole prompt; cached ones by reference
    plan = manager.append({"a": 512})  schedules the next positions; says where to write, what to copy
    ...                                copies, then the forward pass
    manager.complete_step(step)
    manager.commit("a", 512)           these positions are written, and may be shared from now on

Knows sequences, the pool and the content index, and keeps them consistent. Does not know arrays,
devices, models or time. One manager belongs to one thread.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvblocks import checks
from kvblocks.errors import (
    InvalidConfig,
    InvalidLength,
    InvalidTokens,
    OutOfBlocks,
    SequenceExists,
    UnknownBlock,
    UnknownSequence,
)
from kvblocks.hashing import chain_hashes, namespace_root, pack_tokens
from kvblocks.pool import BlockPool
from kvblocks.prefix import PrefixIndex
from kvblocks.results import (
    Allocation,
    Batch,
    BlockCopy,
    Match,
    SequenceId,
    Stats,
    StepPlan,
    Usage,
    Verdict,
)
from kvblocks.sequence import Sequence, Write, read_entry, split_blocks


class _Prompt(NamedTuple):
    tokens: array[int]
    root: bytes
    cached: list[int]  # the blocks that hold its cached prefix


class BlockManager:
    """Block tables, copy-on-write and prefix caching over a pool of fixed-size blocks.

    Every id 0..num_blocks-1 is usable, and a fresh manager hands out 0, 1, 2, ... Costs are stated
    per call; none depends on the size of the pool or of the cache.

    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> manager.allocate("a", [1, 2, 3, 4, 5, 6]).block_ids
    (0, 1)
    >>> manager.append({"a": 6}).slot_mapping.tolist()
    [0, 1, 2, 3, 4, 5]
    >>> manager.commit("a", 6)
    >>> manager.fork("a", "b")
    >>> manager.append({"a": [7], "b": [8]}).copies
    (BlockCopy(source=1, destination=2, num_tokens=2),)
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True
    ) -> None:
        self.num_blocks = operator.index(num_blocks)
        self.block_size = operator.index(block_size)
        self.prefix_caching = prefix_caching
        if self.num_blocks < 1:
            raise InvalidConfig(f"num_blocks must be at least 1, got {num_blocks}")
        if self.block_size < 1:
            raise InvalidConfig(f"block_size must be at least 1, got {block_size}")
        self._pool = BlockPool(self.num_blocks)
        self._index = PrefixIndex(self._pool)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._count: Counter[str] = Counter()

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def match(self, tokens: Iterable[int], *, salt: str | None = None) -> Match:
        """The longest cached prefix of a prompt, in full blocks; at least one token is left over.

        A pure query. O(len(tokens) + blocks matched). `InvalidTokens` for what is no token id.
        """
        cached = self._read_prompt(tokens, salt).cached
        return Match(len(cached) * self.block_size, tuple(cached))

    def can_allocate(self, tokens: Iterable[int], *, salt: str | None = None) -> Verdict:
        """Whether `allocate` would succeed. A pure query at the cost of `match`."""
        return self._judge_allocation(self._read_prompt(tokens, salt))

    def can_append(self, batch: Batch) -> Verdict:
        """Whether `append` would succeed. A pure query; raises what `append` would for bad input."""
        return self._judge_append(self._plan_writes(batch))

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    def block_table(self, seq_id: SequenceId) -> array[int]:
        """The physical block of each logical block, as an int32 copy: one memcpy."""
        return self._get(seq_id).block_table[:]

    def num_committed_tokens(self, seq_id: SequenceId) -> int:
        """Positions whose KV is written and may be shared."""
        return self._get(seq_id).num_committed

    def num_computed_tokens(self, seq_id: SequenceId) -> int:
        """Positions that have been scheduled: the next append writes here."""
        return self._get(seq_id).num_computed

    def ref_count(self, block_id: int) -> int:
        """How many tables hold a block. `UnknownBlock` for an id outside the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise UnknownBlock(f"block ids are 0..{self.num_blocks - 1}, got {block_id}")
        return self._pool.ref_counts[block_id]

    def block_hashes(self, seq_id: SequenceId) -> tuple[bytes, ...]:
        """The chained SHA-256 of each full committed block, equal in every process.

        O(committed tokens): computed when asked for.
        """
        sequence = self._get(seq_id)
        num_full = sequence.num_committed // self.block_size
        return tuple(chain_hashes(sequence.root, sequence.block_tokens(0, num_full)))

    def usage(self) -> Usage:
        """What the held blocks hold, shared blocks counted once. O(blocks in all tables)."""
        stored: dict[int, int] = {}
        for sequence in self._sequences.values():
            for index, block in enumerate(sequence.block_table):
                stored[block] = max(stored.get(block, 0), sequence.num_valid(index))
        return Usage(len(stored), len(stored) * self.block_size, sum(stored.values()))

    def stats(self) -> Stats:
        """The counters. O(open steps)."""
        return Stats(
            num_blocks=self.num_blocks,
            num_free_blocks=len(self._pool.free),
            num_cached_blocks=len(self._pool.cached),
            num_held_blocks=self._pool.num_held,
            num_fenced_blocks=self._pool.num_fenced,
            peak_held_blocks=self._pool.peak_held,
            num_sequences=len(self._sequences),
            num_forks=self._count["forks"],
            num_copies=self._count["copies"],
            num_merged_blocks=self._count["merged_blocks"],
            num_evicted_blocks=self._index.num_evicted,
            num_queried_tokens=self._count["queried_tokens"],
            num_cached_tokens=self._count["cached_tokens"],
            num_refusals=self._count["refusals"],
        )

    # ── the life of a sequence ───────────────────────────────────────────────────────────────

    def allocate(
        self, seq_id: SequenceId, tokens: Iterable[int], *, salt: str | None = None
    ) -> Allocation:
        """Take blocks for a whole prompt, cached ones by reference; committed = computed = cached.

        O(len(tokens) + blocks). `SequenceExists`, `InvalidTokens`, `OutOfBlocks`.
        """
        prompt = self._read_prompt(tokens, salt)
        self._require_new(seq_id)
        self._serve(self._judge_allocation(prompt))

        cached, num_tokens = prompt.cached, len(prompt.tokens)
        num_cached = len(cached) * self.block_size
        self._pool.acquire(cached)  # before anything is evicted: a hit must not evict itself
        new = self._take(self._num_blocks_for(num_tokens) - len(cached))
        self._sequences[seq_id] = Sequence(
            block_size=self.block_size,
            root=prompt.root,
            block_table=array("i", cached + new),
            token_ids=prompt.tokens,
            num_committed=num_cached,
            num_computed=num_cached,
        )
        if self.prefix_caching:
            self._count["queried_tokens"] += num_tokens
            self._count["cached_tokens"] += num_cached
        return Allocation(num_cached, tuple(cached + new), len(new))

    def append(self, batch: Batch) -> StepPlan:
        """Schedule the next positions of several sequences; take blocks only past their capacity.

        An entry is a count, or the token ids of the positions computed, computed + 1, ... A write
        into a block that others hold goes to a block of its own, and the positions that are
        already there are copied; the last holder writes in place. O(tokens scheduled).
        `UnknownSequence`, `InvalidTokens`, `InvalidLength`, `OutOfBlocks`; then nothing changed.
        """
        writes = self._plan_writes(batch)
        self._serve(self._judge_append(writes))

        slots = array("q")
        copies: list[BlockCopy] = []
        gained: dict[SequenceId, tuple[int, ...]] = {}
        for seq_id, write in writes.items():
            new = self._take(write.num_new_blocks)
            sequence = self._sequences[seq_id]
            sequence.last_step = self._pool.step
            copies += sequence.apply_write(write, new)
            self._pool.release(write.sources, sequence.last_step)
            for block_slots in sequence.slots(sequence.num_computed - write.num_tokens):
                slots.extend(block_slots)
            if new:
                gained[seq_id] = tuple(new)
        self._count["copies"] += len(copies)
        return StepPlan(slots, tuple(copies), gained)

    def commit(self, seq_id: SequenceId, num_tokens: int, token_ids: Iterable[int] = ()) -> None:
        """Declare that positions [0, num_tokens) are written: full blocks may be shared from now on.

        `token_ids` brings the ids that were unknown when the positions were appended. If the index
        holds the content of a block already, the sequence adopts that block and gives its own back
        (equal content is stored once). O(blocks that became full).
        `UnknownSequence`, `InvalidTokens`, `InvalidLength`.
        """
        num_tokens, packed = operator.index(num_tokens), pack_tokens(token_ids)
        sequence = self._get(seq_id)
        if not sequence.num_committed <= num_tokens <= sequence.num_computed:
            raise InvalidLength(
                f"commit needs committed <= num_tokens <= computed, got "
                f"{sequence.num_committed} <= {num_tokens} <= {sequence.num_computed}"
            )
        num_known = len(sequence.token_ids) + len(packed)
        if packed and num_known > sequence.num_computed:
            raise InvalidTokens(
                f"token ids may not go past the computed {sequence.num_computed} positions, "
                f"got ids up to {num_known}"
            )
        if num_known < num_tokens:
            raise InvalidTokens(
                f"committed positions need known token ids: {num_known} of {num_tokens} are known"
            )
        sequence.token_ids.extend(packed)
        num_published = sequence.num_committed // self.block_size
        sequence.num_committed = num_tokens
        if self.prefix_caching:
            self._publish(sequence, num_published)

    def truncate(self, seq_id: SequenceId, num_tokens: int) -> None:
        """Forget positions from `num_tokens` on, such as rejected drafts; surplus blocks go back.

        What of a prompt was not scheduled yet is forgotten too, with its blocks. O(blocks given
        back). `UnknownSequence`, `InvalidLength` unless committed <= num_tokens <= computed.
        """
        num_tokens = operator.index(num_tokens)
        sequence = self._get(seq_id)
        if not sequence.num_committed <= num_tokens <= sequence.num_computed:
            raise InvalidLength(
                f"truncate needs committed <= num_tokens <= computed, got "
                f"{sequence.num_committed} <= {num_tokens} <= {sequence.num_computed}"
            )
        keep = self._num_blocks_for(num_tokens)
        surplus = sequence.block_table[keep:]
        del sequence.block_table[keep:]
        del sequence.token_ids[num_tokens:]
        sequence.num_computed = num_tokens
        self._pool.release(reversed(surplus), sequence.last_step)

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Make a sequence that shares all blocks of another; nothing is copied until one writes.

        What is computed must be committed: positions in flight are nobody's to copy yet, and their
        ids could still differ. O(blocks of the parent). `UnknownSequence`, `SequenceExists`,
        `InvalidLength`.
        """
        parent = self._get(parent_id)
        self._require_new(child_id)
        if parent.num_committed != parent.num_computed:
            raise InvalidLength(
                f"fork needs committed = computed, got {parent.num_committed} and "
                f"{parent.num_computed}: commit or truncate first"
            )
        self._sequences[child_id] = parent.fork()
        self._pool.acquire(parent.block_table)
        self._count["forks"] += 1

    def free(self, seq_id: SequenceId) -> None:
        """Give up a sequence; its full committed blocks stay cached until they are evicted.

        O(blocks of the sequence). `UnknownSequence`.
        """
        sequence = self._get(seq_id)
        del self._sequences[seq_id]
        self._pool.release(reversed(sequence.block_table), sequence.last_step)

    # ── steps in flight ──────────────────────────────────────────────────────────────────────

    def begin_step(self) -> int:
        """Open a step: later changes belong to it, until the next one begins. O(1)."""
        return self._pool.begin_step()

    def complete_step(self, step: int) -> None:
        """Complete every step up to `step`: blocks that only they used can be had again.

        O(blocks that were fenced). `InvalidStep`.
        """
        self._pool.complete_step(operator.index(step))

    # ── proof ────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Prove the invariants, or raise `InvariantViolation` with numbers. O(state)."""
        checks.check_pool(self._pool)
        checks.check_references(self._pool, self._sequences)
        checks.check_index(self._pool, self._index)
        checks.check_sequences(self._sequences)
        if self.prefix_caching:
            checks.check_published(self._index, self._sequences)

    def state_digest(self) -> str:
        """A digest of everything a caller could observe but the counter of refusals. O(state)."""
        pool, count = self._pool, self._count - Counter(refusals=self._count["refusals"])
        state = (
            (pool.ref_counts, pool.free, list(pool.cached), sorted(pool.keyed)),
            [(step, list(blocks)) for step, blocks in sorted(pool.fenced.items())],
            (pool.step, pool.completed_step, sorted(pool.touched.items())),
            (pool.peak_held, self._index.num_evicted),
            sorted(self._index.items()),
            list(self._sequences.items()),
            sorted(count.items()),
        )
        return hashlib.sha256(repr(state).encode()).hexdigest()

    # ── within ───────────────────────────────────────────────────────────────────────────────

    def _get(self, seq_id: SequenceId) -> Sequence:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise UnknownSequence(f"no sequence {seq_id!r}") from None

    def _require_new(self, seq_id: SequenceId) -> None:
        if seq_id in self._sequences:
            raise SequenceExists(f"a sequence {seq_id!r} exists already; free it first")

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _read_prompt(self, tokens: Iterable[int], salt: str | None) -> _Prompt:
        """Pack a prompt and find the blocks that hold its cached prefix."""
        packed = pack_tokens(tokens)
        if not packed:
            raise InvalidTokens("a prompt must have at least 1 token, got 0")
        root = namespace_root(salt)
        # One token is always left to compute: its logits are what a prompt is run for.
        num_full = (len(packed) - 1) // self.block_size
        blocks = split_blocks(packed, self.block_size, 0, num_full)
        return _Prompt(packed, root, self._index.match(root, blocks))

    def _plan_writes(self, batch: Batch) -> dict[SequenceId, Write]:
        """Check a batch and find the blocks it needs, without changing anything."""
        # All entries are read before anything is looked at: a generator may do anything.
        entries = {seq_id: read_entry(entry) for seq_id, entry in batch.items()}
        writes: dict[SequenceId, Write] = {}
        given_up: Counter[int] = Counter()  # references that earlier entries of the batch drop
        for seq_id, entry in entries.items():
            write = self._get(seq_id).plan_write(
                seq_id, entry, lambda block: self._pool.ref_counts[block] - given_up[block]
            )
            given_up.update(write.sources)
            writes[seq_id] = write
        return writes

    def _judge_allocation(self, prompt: _Prompt) -> Verdict:
        num_total, hits = self._num_blocks_for(len(prompt.tokens)), frozenset(prompt.cached)
        return self._pool.judge(num_total - len(hits), num_total, hits)

    def _judge_append(self, writes: Mapping[SequenceId, Write]) -> Verdict:
        needed = sum(write.num_new_blocks for write in writes.values())
        longest = max((write.num_blocks for write in writes.values()), default=0)
        return self._pool.judge(needed, longest)

    def _serve(self, verdict: Verdict) -> None:
        if not verdict.is_now:
            self._count["refusals"] += 1
            raise OutOfBlocks(verdict)

    def _take(self, num_blocks: int) -> list[int]:
        """Take blocks, free ones before cached ones. A verdict has made sure of enough."""
        self._index.evict(max(0, num_blocks - len(self._pool.free)))
        return self._pool.take(num_blocks)

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Make blocks findable that became full, from `start` on; adopt blocks of equal content."""
        table, num_full = sequence.block_table, sequence.num_committed // self.block_size
        for index, tokens in enumerate(sequence.block_tokens(start, num_full), start):
            own = table[index]
            found = self._index.publish(table[index - 1] if index else sequence.root, tokens, own)
            if found != own:
                table[index] = found
                self._pool.release((own,), sequence.last_step)
                self._pool.acquire((found,))
                self._count["merged_blocks"] += 1
