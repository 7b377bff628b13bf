"""Sequences that advance together, one token a step: the loop in which an engine spends its life.

The rows' next slots are lanes of one integer, so that a step is one addition; only rows that begin a
block are touched one by one, 1 / block_size of them in a step. Lengths are counted once for all rows
and written back to a sequence when somebody asks for it.

Knows rows and steps. Does not know prompts, chunks or drafts: for those a sequence goes on by itself.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter

from kvblocks.errors import InvalidBatch, InvalidLength, InvalidTokens
from kvblocks.hashing import pack_tokens
from kvblocks.ledger import Ledger
from kvblocks.results import BlockCopy, BlockMerge, SequenceId, StepPlan, Verdict
from kvblocks.sequence import Sequence


class _Row:
    """A sequence's place in a batch, and the lengths it joined with."""

    __slots__ = ("base", "index", "joined_at", "num_kept", "phase", "seq_id", "sequence")

    def __init__(self, seq_id: SequenceId, sequence: Sequence, index: int, joined_at: int) -> None:
        self.seq_id = seq_id
        self.sequence = sequence
        self.index = index
        self.joined_at = joined_at  # steps of the batch before it
        self.num_kept = joined_at  # committed steps whose tokens its sequence has
        self.base = sequence.num_computed
        # It begins a block in every step whose number is this, modulo the block size.
        self.phase = (joined_at - self.base) % sequence.block_size


_ROW_ORDER = attrgetter("index")


class DecodeBatch:
    """Running sequences that are appended to and committed in one call, a token each.

    Made by `BlockManager.decode_batch`. Whatever else a sequence is asked for works as ever; a
    sequence that is changed by itself (append, commit, truncate, fork, free) leaves its batch.

    >>> from kvblocks import BlockManager
    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> for name in "ab":
    ...     _ = manager.allocate(name, [1, 2, 3]), manager.append({name: 3})
    ...     _ = manager.commit(name, 3)
    >>> batch = manager.decode_batch("ab")
    >>> batch.append().slot_mapping.tolist()
    [3, 7]
    >>> batch.commit([10, 11])
    {}
    >>> batch.append().new_blocks
    {'a': (2,), 'b': (3,)}
    """

    def __init__(self, ledger: Ledger) -> None:
        if ledger.windows.sizes:
            raise InvalidBatch(f"a decode batch needs no windows, got {ledger.windows.sizes}")
        self._ledger = ledger
        self._rows: list[_Row] = []
        self._row_of: dict[Sequence, _Row] = {}
        self._next_slots = array("q")  # but for rows that begin a block
        self._ones = 0  # a 1 in each lane
        self._by_phase: list[dict[_Row, None]] = [{} for _ in range(ledger.block_size)]
        self._joined: list[_Row] = []  # since the last append
        self._pending: deque[list[_Row]] = deque()  # the rows of each step that is not committed
        self._columns: list[array[int]] = []  # the tokens of the last steps committed, by row
        self._num_appended = 0
        self._num_committed = 0
        self._last_step = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def seq_ids(self) -> tuple[SequenceId, ...]:
        """The sequences in the order of the rows. O(rows)."""
        return tuple(row.seq_id for row in self._rows)

    def join(self, seq_id: SequenceId) -> None:
        """Add a sequence as the last row; it leaves another batch that it was in. O(1).

        `UnknownSequence`; `InvalidBatch` if it is in this batch already, or unless everything known
        of it is computed and committed.
        """
        self.check_join(seq_id)
        sequence = self._ledger.get(seq_id)
        self._ledger.leave_batch(sequence)
        self._detach_pending()
        row = _Row(seq_id, sequence, len(self._rows), self._num_appended)
        index, offset = divmod(row.base, self._ledger.block_size)
        slot = sequence.block_table[index] * self._ledger.block_size + offset if offset else 0
        self._rows.append(row)
        self._row_of[sequence] = row
        self._next_slots.append(slot)
        self._by_phase[row.phase][row] = None
        self._joined.append(row)
        self._ones = 0
        sequence.batch = self

    def check_join(self, seq_id: SequenceId) -> None:
        """Raise what `join` would, and change nothing."""
        sequence = self._ledger.get(seq_id)
        if sequence.batch is self:
            raise InvalidBatch(f"sequence {seq_id!r} is in this batch already")
        lengths = (sequence.num_committed, sequence.num_computed, sequence.num_known)
        if len(set(lengths)) > 1:
            raise InvalidBatch(
                f"sequence {seq_id!r} must have committed, computed and known the same tokens to "
                f"join a batch, got {lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        if sequence.capacity - sequence.num_computed >= self._ledger.block_size and not (
            self._has_reserved_the_rest(sequence)
        ):
            raise InvalidBatch(
                f"sequence {seq_id!r} must have computed its whole prompt to join a batch, got "
                f"{sequence.num_computed} computed positions in blocks for {sequence.capacity}"
            )

    def _has_reserved_the_rest(self, sequence: Sequence) -> bool:
        """Whether all blocks that are not begun are reserved, and nobody else's."""
        table = sequence.block_table
        rest = table[-(-sequence.num_computed // self._ledger.block_size) :]
        is_own = self._ledger.pool.shared.keys().isdisjoint(rest)
        return len(table) <= sequence.num_reserved_blocks and is_own

    def leave(self, seq_id: SequenceId) -> None:
        """Let a sequence go on by itself; the last row takes its place. O(1).

        `UnknownSequence`; `InvalidBatch` if it is not in this batch.
        """
        sequence = self._ledger.get(seq_id)
        if sequence.batch is not self:
            raise InvalidBatch(f"sequence {seq_id!r} is not in this batch")
        self.drop(sequence)

    def can_append(self) -> Verdict:
        """Whether `append` would succeed. O(rows that begin a block)."""
        starting = self._taking
        needed = len(starting) + len(self._with_shared_tail())
        beside = (
            self._ledger.num_beside_pins(row.sequence, len(row.sequence.block_table) + 1)
            for row in starting
        )
        return self._ledger.judge(needed, max(beside, default=0))

    def append(self) -> StepPlan:
        """Schedule the next position of every row, in their order, all or nothing.

        O(rows that begin a block), and one pass over the slots in C. `OutOfBlocks`.
        """
        starting = self._taking
        needing = sorted([*starting, *self._with_shared_tail()], key=_ROW_ORDER)
        if len(needing) > self._ledger.num_available:
            self._ledger.serve(self.can_append())
        self._ledger.tick()
        self._last_step = self._ledger.pool.open_step or self._last_step

        size, slots = self._ledger.block_size, self._next_slots
        if len(starting) < len(self._starting):
            self._begin_reserved_blocks(slots)
        copies: list[BlockCopy] = []
        gained: dict[SequenceId, tuple[int, ...]] = {}
        for row, block in zip(needing, self._ledger.take(len(needing)), strict=True):
            gained[row.seq_id] = (block,)
            if row in starting:
                row.sequence.block_table.append(block)
                slots[row.index] = block * size
            else:
                row.sequence.last_step = max(row.sequence.last_step, self._last_step)
                index = self._next_index(row)
                copies += self._ledger.exchange(
                    row.sequence, row.sequence.block_table, (index,), (block,)
                )
                slots[row.index] = block * size + row.base % size
        self._next_slots = self._advance(slots)
        self._joined.clear()
        self._pending.append(self._rows)
        self._num_appended += 1
        return StepPlan(size, tuple(copies), gained, slots=slots)

    def commit(self, token_ids: Iterable[int] = ()) -> dict[SequenceId, tuple[BlockMerge, ...]]:
        """Declare the oldest step that is not committed as written, with the token of each row.

        Rows that have left the batch since then are passed over. The answer says which blocks were
        exchanged in whose table, as `BlockManager.commit` does. O(rows), and what `commit` costs
        for rows whose block became full; without a prefix cache ids are not kept, and it is O(1)
        without them. `InvalidTokens`; `InvalidLength` if no step waits.
        """
        packed = pack_tokens(token_ids)
        if not self._pending:
            raise InvalidLength("commit needs a step that was appended, got none that waits")
        rows, keeps_ids = self._pending[0], self._ledger.prefix_caching
        if len(packed) != len(rows) and (packed or keeps_ids):
            raise InvalidTokens(
                f"commit needs one token id for each of the {len(rows)} rows, got {len(packed)}"
            )
        self._ledger.tick()
        hashes = self._hash_full_blocks(rows, packed) if self._ledger.needs_hashes else {}
        self._pending.popleft()
        self._num_committed += 1
        if not keeps_ids:
            return {}
        self._keep(rows, packed)
        return self._publish_full_blocks(hashes)

    def _keep(self, rows: list[_Row], packed: array[int]) -> None:
        """Keep the tokens of a step just committed until somebody asks for those of a row."""
        if rows is self._rows:
            self._columns.append(packed)
            size = self._ledger.block_size
            if len(self._columns) > 2 * size:  # every row was asked for since its last block
                del self._columns[:-size]
            return
        self._num_committed -= 1
        for row in rows:
            self._hand_over(row)
        self._num_committed += 1
        self._columns.clear()
        for row, token in zip(rows, packed, strict=True):
            if self._row_of.get(row.sequence) is row:
                row.sequence.token_ids.append(token)
                row.num_kept = self._num_committed

    def _hand_over(self, row: _Row) -> None:
        """Give a sequence the tokens of its row that were committed since the last time."""
        num_new = self._num_committed - row.num_kept
        if num_new > 0 and self._columns:
            index = row.index
            row.sequence.token_ids.extend([step[index] for step in self._columns[-num_new:]])
            row.num_kept = self._num_committed

    def _hash_full_blocks(self, rows: list[_Row], packed: array[int]) -> dict[_Row, list[bytes]]:
        """The keys of the blocks that the next commit fills. Changes nothing: a digest may raise."""
        num_committed = self._num_committed + 1
        full = self._by_phase[num_committed % self._ledger.block_size]
        hashes = {}
        for row, token in zip(rows, packed, strict=True):
            if row in full and num_committed > row.joined_at:
                self._hand_over(row)
                num_tokens = row.base + num_committed - row.joined_at
                hashes[row] = self._ledger.hash_news(row.sequence, num_tokens, array("I", (token,)))
        return hashes

    def _publish_full_blocks(
        self, hashes: dict[_Row, list[bytes]]
    ) -> dict[SequenceId, tuple[BlockMerge, ...]]:
        """Publish the blocks that the step just committed has filled."""
        size = self._ledger.block_size
        merges: dict[SequenceId, tuple[BlockMerge, ...]] = {}
        for row in sorted(self._by_phase[self._num_committed % size], key=_ROW_ORDER):
            sequence, num_tokens = row.sequence, self._num_committed - row.joined_at
            if num_tokens > 0:
                self._hand_over(row)
                sequence.num_committed = row.base + num_tokens
                if merged := self._ledger.publish(sequence, hashes.get(row, [])):
                    merges[row.seq_id] = merged
        return merges

    def settle(self, sequence: Sequence) -> None:
        """Bring the lengths of one of the rows up to date. O(1)."""
        row = self._row_of[sequence]
        num_appended = self._num_appended - row.joined_at
        sequence.num_computed = row.base + num_appended
        sequence.num_committed = row.base + max(0, self._num_committed - row.joined_at)
        self._hand_over(row)
        if num_appended:
            sequence.last_step = max(sequence.last_step, self._last_step)

    def drop(self, sequence: Sequence) -> None:
        """Let one of the rows go on by itself. O(1)."""
        self.settle(sequence)
        self._detach_pending()
        row = self._row_of.pop(sequence)
        del self._by_phase[row.phase][row]
        if row in self._joined:
            self._joined.remove(row)
        last, slot = self._rows.pop(), self._next_slots.pop()
        if last is not row:
            self._hand_over(last)
            last.index = row.index
            self._rows[row.index] = last
            self._next_slots[row.index] = slot
        self._ones = 0
        sequence.batch = None

    @property
    def _starting(self) -> dict[_Row, None]:
        """The rows that begin a block in the next step."""
        return self._by_phase[self._num_appended % self._ledger.block_size]

    @property
    def _taking(self) -> dict[_Row, None]:
        """Those of them that have not reserved the block."""
        if not self._ledger.has_reservations:
            return self._starting
        return {
            row: None
            for row in self._starting
            if len(row.sequence.block_table) == self._next_index(row)
        }

    def _next_index(self, row: _Row) -> int:
        """The table index of a row's next position."""
        return (row.base + self._num_appended - row.joined_at) // self._ledger.block_size

    def _begin_reserved_blocks(self, slots: array[int]) -> None:
        """Let the rows that begin a block begin that which they have reserved, if so."""
        for row in self._starting:
            for block in row.sequence.block_table[self._next_index(row) :][:1]:
                slots[row.index] = block * self._ledger.block_size

    def _with_shared_tail(self) -> list[_Row]:
        """Rows that must copy before they write. Only who has just joined can share a tail."""
        shared = self._ledger.pool.shared
        found: list[_Row] = []
        given_up: Counter[int] = Counter()
        for row in sorted(self._joined, key=_ROW_ORDER) if shared else ():
            if row in self._starting:
                continue  # it may have no block yet
            block = row.sequence.block_table[self._next_index(row)]
            if shared.get(block, 1) - given_up[block] > 1:
                given_up[block] += 1
                found.append(row)
        return found

    def _advance(self, slots: array[int]) -> array[int]:
        """Add 1 to every slot: one addition of integers with a lane a row."""
        width = slots.itemsize * len(slots)
        if not self._ones:
            self._ones = int.from_bytes((array("q", (1,)) * len(slots)).tobytes(), sys.byteorder)
        lanes = int.from_bytes(slots.tobytes(), sys.byteorder) + self._ones
        return array("q", lanes.to_bytes(width, sys.byteorder))

    def _detach_pending(self) -> None:
        """Keep the rows of steps that wait as they were: rows are about to change."""
        if self._pending and self._pending[-1] is self._rows:
            self._rows = self._rows[:]
