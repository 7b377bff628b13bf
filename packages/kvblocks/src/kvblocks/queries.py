"""What can be asked of a manager without changing it: matches, verdicts, tables, counters, proof.

Knows how answers are read off the state. Does not know how the state changes: see `kvblocks.manager`.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from kvblocks.append import judge_append, plan_writes
from kvblocks.checks import check
from kvblocks.errors import InvalidConfig, UnknownBlock, UnknownGroup
from kvblocks.hashing import (
    Adapter,
    Media,
    chain_hashes,
    media_keys,
    split_blocks,
)
from kvblocks.insight import count_freeing, explain_occupancy, list_states
from kvblocks.ledger import Ledger
from kvblocks.prompts import (
    judge_allocation,
    read_lookahead,
    read_prompt,
)
from kvblocks.reservations import judge_reservation, plan_reservation
from kvblocks.results import (
    Batch,
    BlockState,
    Explanation,
    Freeing,
    Match,
    Occupancy,
    SequenceId,
    Stats,
    StepPlan,
    Usage,
    Verdict,
)
from kvblocks.swap import (
    judge_swap_in,
    judge_swap_out,
    read_leaving,
    read_returning,
)
from kvblocks.views import write_row, write_rows


class Queries:
    """The calls of `BlockManager` that change nothing a caller could observe."""

    num_blocks: int
    block_size: int
    _ledger: Ledger

    def match(
        self,
        tokens: Iterable[int],
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
    ) -> Match:
        """The longest cached prefix of a prompt, in full blocks; at least one token is left over.

        Only content of the same namespace is found: that of the `salt` and the `adapter`, behind the
        same `media`; those beyond the tokens given belong to tokens that come later. A pure query.
        O(len(tokens) + blocks matched). `InvalidTokens` for what is no token id, `InvalidNamespace`.
        """
        prompt = read_prompt(self._ledger, tokens, salt, adapter, media)
        blocks, partial = prompt.found.blocks, prompt.partial
        num_tokens = len(blocks) * self.block_size
        return Match(num_tokens, blocks, partial.num_tokens if partial else 0)

    def can_allocate(
        self,
        tokens: Iterable[int] | int,
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
        num_lookahead_tokens: int = 0,
    ) -> Verdict:
        """Whether `allocate` would succeed. A pure query at the cost of `match`."""
        lookahead = read_lookahead(num_lookahead_tokens)
        prompt = read_prompt(self._ledger, tokens, salt, adapter, media)
        return judge_allocation(self._ledger, prompt, lookahead)[0]

    def can_append(self, batch: Batch) -> Verdict:
        """Whether `append` would succeed. A pure query; raises what `append` would for bad input."""
        return judge_append(self._ledger, plan_writes(self._ledger, batch))

    def can_reserve(self, lengths: Mapping[Any, int]) -> Verdict:
        """Whether `reserve` would succeed. A pure query; raises for bad input."""
        return judge_reservation(self._ledger, plan_reservation(self._ledger, lengths))

    def can_swap_out(self, seq_ids: Iterable[SequenceId]) -> Verdict:
        """Whether `swap_out` would succeed: of host blocks. A pure query; raises for bad input."""
        return judge_swap_out(self._ledger, read_leaving(self._ledger, seq_ids))

    def can_swap_in(self, seq_ids: Iterable[SequenceId]) -> Verdict:
        """Whether `swap_in` would succeed: of device blocks. A pure query; raises for bad input."""
        return judge_swap_in(self._ledger, read_returning(self._ledger, seq_ids).values())

    def is_swapped(self, seq_id: SequenceId) -> bool:
        """Whether a sequence is swapped out. O(1). `UnknownSequence`."""
        self._ledger.find(seq_id)
        return seq_id in self._ledger.swapped

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._ledger.sequences or seq_id in self._ledger.swapped

    @property
    def seq_ids(self) -> tuple[SequenceId, ...]:
        """All sequences, those in the pool before those out of it. O(sequences)."""
        return (*self._ledger.sequences, *self._ledger.swapped)

    def block_table(self, seq_id: SequenceId, group: int = 0) -> array[int]:
        """The physical block of each logical block, as an int32 copy: one memcpy.

        `group` 0 is full attention, the others are the `windows` in their order: there, blocks
        before the window are -1. `UnknownSequence`, `UnknownGroup`; `InvalidSwap` for a sequence
        that is swapped out.
        """
        return self._ledger.get(seq_id).table_of(group)[:]

    def write_block_tables(
        self, out: object, seq_ids: Iterable[SequenceId], group: int = 0
    ) -> None:
        """Write block tables into rows of a caller's buffer, in this order; all else in it is -1.

        `out` is int32 of two dimensions, contiguous and writable, and offers the buffer protocol:
        NumPy arrays do, and torch tensors by `.numpy()`. One memcpy a row, after one that fills it.
        `InvalidBuffer`; otherwise as `block_table`. What is refused writes nothing.

        >>> from kvblocks import BlockManager
        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> _ = manager.allocate("a", [1, 2, 3, 4, 5]), manager.allocate("b", [6])
        >>> out = memoryview(bytearray(24)).cast("i", (2, 3))
        >>> manager.write_block_tables(out, ["a", "b"])
        >>> out.tolist()
        [[0, 1, -1], [2, -1, -1]]
        """
        sequences = self._ledger.get_tables(list(seq_ids))
        write_rows(out, [sequence.table_of(group) for sequence in sequences])

    def write_slot_mapping(self, out: object, plan: StepPlan, group: int = 0) -> None:
        """Write a plan's slots into a caller's buffer; behind them it is -1, which writes nothing.

        `out` is int64 of one dimension; see `write_block_tables`. One memcpy, after one that fills
        it. `InvalidBuffer`, `UnknownGroup`.
        """
        mappings = plan.slot_mappings
        if not 0 <= group < len(mappings):
            raise UnknownGroup(f"groups are 0..{len(mappings) - 1}, got {group}")
        write_row(out, mappings[group])

    def num_committed_tokens(self, seq_id: SequenceId) -> int:
        """Positions whose KV is written and may be shared."""
        return self._ledger.find(seq_id).num_committed

    def num_computed_tokens(self, seq_id: SequenceId) -> int:
        """Positions that have been scheduled: the next append writes here."""
        return self._ledger.find(seq_id).num_computed

    def ref_count(self, block_id: int) -> int:
        """How many tables hold a block: counted, O(blocks in all tables). `UnknownBlock`."""
        block_id = operator.index(block_id)
        if not 0 <= block_id < self.num_blocks:
            raise UnknownBlock(f"block ids are 0..{self.num_blocks - 1}, got {block_id}")
        sequences = self._ledger.sequences.values()
        return sum(table.count(block_id) for s in sequences for table, _ in s.tables)

    def block_hashes(self, seq_id: SequenceId) -> tuple[bytes, ...]:
        """The chained SHA-256 of each full committed block, equal in every process.

        O(committed tokens): computed when asked for. None without a prefix cache, which keeps no ids.
        """
        sequence = self._ledger.find(seq_id)
        num_full = sequence.num_committed // self.block_size if sequence.keeps_ids else 0
        tokens = self._ledger.runs.path_tokens(sequence.run) + sequence.token_ids.tobytes()
        blocks = split_blocks(tokens, self.block_size, num_full)
        media = media_keys(sequence.media, self.block_size)
        return tuple(chain_hashes(sequence.namespace.root, blocks, media, self._ledger.digest))

    def freeing(self, seq_ids: Iterable[SequenceId]) -> Freeing:
        """What it would yield to free these sequences together: now, and after which step.

        Whoever looks for room asks before it preempts. O(blocks and runs of these sequences).
        `UnknownSequence`; `InvalidSwap` for one that is swapped out.

        >>> from kvblocks import BlockManager
        >>> manager = BlockManager(num_blocks=4, block_size=4)
        >>> for name in "ab":
        ...     _ = manager.allocate(name, [1, 2, 3])
        >>> step = manager.begin_step()
        >>> _ = manager.append({"b": 3})
        >>> print(manager.freeing(["a", "b"]))
        1 blocks now, 1 after step 1
        """
        return count_freeing(self._ledger, seq_ids)

    def why_full(self) -> Occupancy:
        """Who holds the pool, and what waits for which step. O(blocks in all tables).

        >>> from kvblocks import BlockManager
        >>> manager = BlockManager(num_blocks=4, block_size=4)
        >>> _ = manager.allocate("a", range(9))
        >>> print(manager.why_full())
        1 of 4 blocks can be had: 1 free, 0 cached; fenced: none
        shared: 0; pinned, and in no table: 0
        sequence 'a': 3 blocks, 3 its own, 3 not begun
        """
        return explain_occupancy(self._ledger)

    def block_states(self) -> tuple[BlockState, ...]:
        """The state of every block, as they can be had or not. O(pool + blocks in all tables).

        >>> from kvblocks import BlockManager
        >>> manager = BlockManager(num_blocks=3, block_size=4)
        >>> _ = manager.allocate("a", [1, 2, 3])
        >>> [state.value for state in manager.block_states()]
        ['held', 'free', 'free']
        """
        return list_states(self._ledger)

    def explain(self, seq_id: SequenceId) -> Explanation:
        """Why no more of a sequence's prompt was cached when it was allocated. O(1).

        A fork has the answer of its parent. `InvalidConfig` without `explains=True`, which costs a
        SHA-256 for each full block, and at `allocate` a look at every sequence. `UnknownSequence`.

        >>> from kvblocks import BlockManager
        >>> manager = BlockManager(num_blocks=8, block_size=2, explains=True)
        >>> _ = manager.allocate("a", [1, 2, 3, 4]), manager.append({"a": 4})
        >>> _ = manager.allocate("b", [1, 2, 3, 4])
        >>> print(manager.explain("b"))
        0 of 4 tokens cached: from position 0 sequence 'a' has it to compute
        """
        explanation = self._ledger.find(seq_id).explanation
        if explanation is None:
            raise InvalidConfig("explain needs a manager that was made with explains=True")
        return explanation

    def usage(self) -> Usage:
        """What the held blocks hold, shared blocks counted once. O(blocks in all tables)."""
        return self._ledger.usage()

    def stats(self) -> Stats:
        """The counters. O(1)."""
        return self._ledger.stats()

    def check(self) -> None:
        """Prove the invariants, or raise `InvariantViolation` with numbers. O(state)."""
        check(self._ledger)

    def state_digest(self) -> str:
        """A digest of all that answers depend on. O(state).

        Not of what is only told: refusals, durations, explanations, and events that wait.
        """
        return hashlib.sha256(repr(self._ledger.state()).encode()).hexdigest()
