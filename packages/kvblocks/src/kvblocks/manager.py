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
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
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
from kvblocks.hashing import chain_hashes, namespace_root, pack_tokens, split_blocks
from kvblocks.pool import BlockPool
from kvblocks.results import (
    Allocation,
    Batch,
    BlockCopy,
    Match,
    SequenceId,
    Span,
    Stats,
    StepPlan,
    Usage,
    Verdict,
    When,
)
from kvblocks.runs import Found, RunTree
from kvblocks.sequence import Sequence, Write, read_entry


class _Prompt(NamedTuple):
    tokens: array[int]
    root: bytes
    found: Found


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
        self._runs = RunTree(self._pool, self.block_size)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._count: Counter[str] = Counter()
        self._peak_held = 0

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def match(self, tokens: Iterable[int], *, salt: str | None = None) -> Match:
        """The longest cached prefix of a prompt, in full blocks; at least one token is left over.

        A pure query. O(len(tokens) + blocks matched). `InvalidTokens` for what is no token id.
        """
        blocks = self._read_prompt(tokens, salt).found.blocks
        return Match(len(blocks) * self.block_size, blocks)

    def can_allocate(self, tokens: Iterable[int], *, salt: str | None = None) -> Verdict:
        """Whether `allocate` would succeed. A pure query at the cost of `match`."""
        return self._judge_allocation(self._read_prompt(tokens, salt))

    def can_append(self, batch: Batch) -> Verdict:
        """Whether `append` would succeed. A pure query; raises what `append` would for bad input."""
        return self._judge_append(self._plan_writes(batch).values())

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
        """How many tables hold a block: counted, O(blocks in all tables). `UnknownBlock`."""
        if not 0 <= block_id < self.num_blocks:
            raise UnknownBlock(f"block ids are 0..{self.num_blocks - 1}, got {block_id}")
        return sum(s.block_table.count(block_id) for s in self._sequences.values())

    def block_hashes(self, seq_id: SequenceId) -> tuple[bytes, ...]:
        """The chained SHA-256 of each full committed block, equal in every process.

        O(committed tokens): computed when asked for.
        """
        sequence = self._get(seq_id)
        num_full = sequence.num_committed // self.block_size
        tokens = self._runs.path_tokens(sequence.run) + sequence.token_ids.tobytes()
        return tuple(chain_hashes(sequence.root, split_blocks(tokens, self.block_size, num_full)))

    def usage(self) -> Usage:
        """What the held blocks hold, shared blocks counted once. O(blocks in all tables)."""
        stored: dict[int, int] = {}
        for sequence in self._sequences.values():
            for index, block in enumerate(sequence.block_table):
                stored[block] = max(stored.get(block, 0), sequence.num_valid(index))
        return Usage(len(stored), len(stored) * self.block_size, sum(stored.values()))

    def stats(self) -> Stats:
        """The counters. O(1)."""
        return Stats(
            num_blocks=self.num_blocks,
            num_free_blocks=len(self._pool.free),
            num_cached_blocks=self._runs.num_cached,
            num_held_blocks=self._num_held,
            num_fenced_blocks=self._pool.num_fenced + self._runs.num_fenced,
            peak_held_blocks=self._peak_held,
            num_sequences=len(self._sequences),
            num_forks=self._count["forks"],
            num_copies=self._count["copies"],
            num_merged_blocks=self._count["merged_blocks"],
            num_evicted_blocks=self._runs.num_evicted,
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

        num_tokens, found = len(prompt.tokens), prompt.found
        num_cached = len(found.blocks) * self.block_size
        run = self._runs.hold(found)  # before anything is evicted: a hit must not evict itself
        new = self._take(self._num_blocks_for(num_tokens) - len(found.blocks))
        self._sequences[seq_id] = Sequence(
            block_size=self.block_size,
            root=prompt.root,
            run=run,
            num_run_blocks=len(found.blocks),
            block_table=found.blocks + new,
            token_ids=prompt.tokens[num_cached:],
            first_id=num_cached,
            num_committed=num_cached,
            num_computed=num_cached,
        )
        if self.prefix_caching:
            self._count["queried_tokens"] += num_tokens
            self._count["cached_tokens"] += num_cached
        return Allocation(num_cached, len(new), found.blocks + new)

    def append(self, batch: Batch) -> StepPlan:
        """Schedule the next positions of several sequences; take blocks only past their capacity.

        An entry is a count, or the token ids of the positions computed, computed + 1, ... A write
        into a block that others hold goes to a block of its own, and the positions that are
        already there are copied; the last holder writes in place. O(tokens scheduled).
        `UnknownSequence`, `InvalidTokens`, `InvalidLength`, `OutOfBlocks`; then nothing changed.
        """
        writes = self._plan_writes(batch)
        self._serve(self._judge_append(writes.values()))

        new = self._take(sum(write.num_new_blocks for write in writes.values()))
        spans: list[Span] = []
        copies: list[BlockCopy] = []
        gained: dict[SequenceId, tuple[int, ...]] = {}
        at = 0
        for seq_id, write in writes.items():
            sequence = self._sequences[seq_id]
            sequence.last_step = max(sequence.last_step, self._pool.open_step)
            left = array("i", (sequence.block_table[index] for index in write.replaced))
            own = new[at : at + write.num_new_blocks]
            at += write.num_new_blocks
            copied, span = sequence.apply_write(write, own)
            spans.append(span)
            if own:
                gained[seq_id] = tuple(own)
            if left:
                copies += copied
                self._pool.give_back(left, sequence.last_step)
        self._count["copies"] += len(copies)
        return StepPlan(self.block_size, tuple(spans), tuple(copies), gained)

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
        num_known = sequence.num_known + len(packed)
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
        sequence.num_committed = num_tokens
        if self.prefix_caching and num_tokens // self.block_size > sequence.num_run_blocks:
            self._publish(sequence)

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
        del sequence.token_ids[num_tokens - sequence.first_id :]
        sequence.num_computed = num_tokens
        self._pool.give_back(surplus, sequence.last_step)

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
        num_full = parent.num_committed // self.block_size
        if num_full > parent.num_run_blocks:  # without a prefix cache nothing was published
            full = parent.block_table[parent.num_run_blocks : num_full]
            parent.run = self._runs.set_apart(parent.run, full)
            parent.num_run_blocks = num_full
        self._sequences[child_id] = parent.fork()
        self._runs.add_holder(parent.run)
        self._pool.share(parent.loose_blocks)
        self._count["forks"] += 1

    def free(self, seq_id: SequenceId) -> None:
        """Give up a sequence; its full committed blocks stay cached until they are evicted.

        O(blocks of the sequence). `UnknownSequence`.
        """
        sequence = self._get(seq_id)
        del self._sequences[seq_id]
        self._pool.give_back(sequence.loose_blocks, sequence.last_step)
        self._runs.release(sequence.run, sequence.last_step)

    # ── steps in flight ──────────────────────────────────────────────────────────────────────

    def begin_step(self) -> int:
        """Open a step: later changes belong to it, until the next one begins. O(1)."""
        return self._pool.begin_step()

    def complete_step(self, step: int) -> None:
        """Complete every step up to `step`: blocks that only they used can be had again.

        O(blocks that were fenced). `InvalidStep`.
        """
        step = operator.index(step)
        if self._pool.complete_step(step):
            self._runs.complete_step(step)

    # ── proof ────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Prove the invariants, or raise `InvariantViolation` with numbers. O(state)."""
        checks.check_pool(self._pool, self._runs, self._sequences)
        checks.check_holders(self._pool, self._runs, self._sequences)
        checks.check_runs(self._pool, self._runs, self.block_size)
        checks.check_sequences(self._sequences)
        checks.check_paths(self._sequences, findable=self.prefix_caching)

    def state_digest(self) -> str:
        """A digest of everything a caller could observe but the counter of refusals. O(state)."""
        pool, count = self._pool, self._count - Counter(refusals=self._count["refusals"])
        state = (
            (pool.free, sorted(pool.shared.items()), sorted(pool.touched.items())),
            (pool.step, pool.completed_step, sorted(pool.fenced.items())),
            self._runs.state(),
            [(seq_id, sequence.state()) for seq_id, sequence in self._sequences.items()],
            (self._peak_held, sorted(count.items())),
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

    @property
    def _num_held(self) -> int:
        runs, pool = self._runs, self._pool
        resting = runs.num_cached + runs.num_fenced + pool.num_fenced
        return self.num_blocks - len(pool.free) - resting

    def _read_prompt(self, tokens: Iterable[int], salt: str | None) -> _Prompt:
        """Pack a prompt and find its cached prefix."""
        packed = pack_tokens(tokens)
        if not packed:
            raise InvalidTokens("a prompt must have at least 1 token, got 0")
        root = namespace_root(salt)
        # One token is always left to compute: its logits are what a prompt is run for.
        num_full = (len(packed) - 1) // self.block_size if self.prefix_caching else 0
        full = packed[: num_full * self.block_size].tobytes()
        return _Prompt(packed, root, self._runs.find(root, full))

    def _plan_writes(self, batch: Batch) -> dict[SequenceId, Write]:
        """Check a batch and find the blocks it needs, without changing anything."""
        # All entries are read before anything is looked at: a generator may do anything.
        entries = {seq_id: read_entry(entry) for seq_id, entry in batch.items()}
        writes: dict[SequenceId, Write] = {}
        shared = self._pool.shared
        given_up: Counter[int] = Counter()  # places in tables that earlier entries leave
        for seq_id, entry in entries.items():
            sequence = self._get(seq_id)
            write = sequence.plan_write(seq_id, entry, shared, given_up)
            given_up.update(sequence.block_table[index] for index in write.replaced)
            writes[seq_id] = write
        return writes

    def _judge_allocation(self, prompt: _Prompt) -> Verdict:
        num_total = self._num_blocks_for(len(prompt.tokens))
        cached, fenced = self._runs.reused(prompt.found)
        return self._judge(num_total - len(prompt.found.blocks), num_total, cached, fenced)

    def _judge_append(self, writes: Collection[Write]) -> Verdict:
        needed = sum(write.num_new_blocks for write in writes)
        return self._judge(needed, max((write.num_blocks for write in writes), default=0))

    def _judge(
        self,
        num_needed: int,
        num_total: int,
        reused_cached: int = 0,
        reused_fenced: Mapping[int, int] = MappingProxyType({}),
    ) -> Verdict:
        """Judge a need for new blocks, `num_total` in all for one sequence.

        What the need reuses of cached and of fenced blocks cannot be taken. O(open steps), and
        O(fenced runs) if it cannot be served now.
        """
        available = len(self._pool.free) + self._runs.num_cached - reused_cached
        if num_total > self.num_blocks:
            return Verdict(When.NEVER, num_needed, available)
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available)
        within_reach = available
        for step in sorted({*self._pool.fenced, *self._runs.fenced}):
            within_reach += len(self._pool.fenced.get(step, ())) - reused_fenced.get(step, 0)
            within_reach += sum(len(run.blocks) for run in self._runs.fenced.get(step, ()))
            if num_needed <= within_reach:
                return Verdict(When.AFTER_STEP, num_needed, available, step)
        return Verdict(When.LATER, num_needed, available)

    def _serve(self, verdict: Verdict) -> None:
        if not verdict.is_now:
            self._count["refusals"] += 1
            raise OutOfBlocks(verdict)

    def _take(self, num_blocks: int) -> array[int]:
        """Take blocks, free ones before cached ones. A verdict has made sure of enough."""
        taken = self._pool.take(min(num_blocks, len(self._pool.free)))
        if len(taken) < num_blocks:
            taken += self._runs.evict(num_blocks - len(taken))
        self._peak_held = max(self._peak_held, self._num_held)
        return taken

    def _publish(self, sequence: Sequence) -> None:
        """Make blocks findable that became full; exchange those whose content is here already."""
        num_full = sequence.num_committed // self.block_size
        start = sequence.num_run_blocks
        num_tokens = num_full * self.block_size - sequence.first_id
        tokens = sequence.token_ids[:num_tokens].tobytes()
        own = sequence.block_table[start:num_full]
        found = self._runs.publish(sequence.run, sequence.root, tokens, own)
        if found.blocks:
            surplus = own[: len(found.blocks)]
            sequence.block_table[start : start + len(surplus)] = found.blocks
            self._pool.give_back(surplus, sequence.last_step)
            self._count["merged_blocks"] += len(surplus)
        sequence.run, sequence.num_run_blocks = found.run, num_full
        del sequence.token_ids[:num_tokens]
        sequence.first_id += num_tokens
