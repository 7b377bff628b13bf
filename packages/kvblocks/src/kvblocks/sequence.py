"""One sequence: its block table, its lengths, and which blocks a write needs.

          0        committed     computed          capacity
          |------------|-------------|-----------------|
           written, may  scheduled,    blocks are held,
           be shared     in flight     nothing scheduled

The first blocks of the table are those of the path to `run`; the others are loose.

Knows its own table and tokens. Does not know the pool: it is told which blocks others hold, and given
blocks.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvblocks.errors import InvalidBatch, InvalidLength, InvalidTokens, UnknownGroup
from kvblocks.hashing import Media, Namespace, keys_of, pack_tokens
from kvblocks.results import Explanation, SequenceId, Span
from kvblocks.runs import Run

_NOTHING = array("I")


@dataclass(slots=True)
class WindowTable:
    """A sequence's blocks in a group with a window: -1 before the first that can be read still."""

    blocks: array[int]
    start: int

    @property
    def held(self) -> array[int]:
        """The blocks that are held."""
        return self.blocks[self.start :]

    def cut(self, start: int) -> array[int]:
        """Let the window begin at another block; returns the blocks that it leaves."""
        gone = self.blocks[self.start : start]
        self.blocks[self.start : start] = array("i", (-1,)) * len(gone)
        self.start = start
        return gone


class Write(NamedTuple):
    """A checked write of the next positions of one sequence, and the blocks it needs."""

    seq_id: SequenceId
    sequence: Sequence
    num_tokens: int
    new_tokens: array[int]  # ids that the sequence does not know yet
    replaced: tuple[int, ...]  # table indices of blocks that others hold too
    num_blocks: int  # length of the table after the write
    num_new_blocks: int


class Rows(Protocol):
    """A batch that keeps its sequences' lengths for them while they advance together."""

    def settle(self, sequence: Sequence) -> None:
        """Bring a sequence's lengths up to date."""

    def drop(self, sequence: Sequence) -> None:
        """Let a sequence go on by itself."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one sequence. `token_ids` are those known from position `first_id` on."""

    block_size: int
    namespace: Namespace
    media: tuple[Media, ...]
    keys: Mapping[int, bytes]  # what stands before blocks: the namespace, media
    run: Run
    num_run_blocks: int  # blocks of the path to `run`
    block_table: array[int]
    keeps_ids: bool
    token_ids: array[int]
    first_id: int
    num_committed: int
    num_computed: int
    priority: int = 0
    last_step: int = 0
    num_reserved_blocks: int = 0  # how many the table keeps whatever is truncated
    batch: Rows | None = None
    explanation: Explanation | None = None
    windows: tuple[WindowTable, ...] = ()

    @property
    def capacity(self) -> int:
        """Positions that the held blocks can store."""
        return len(self.block_table) * self.block_size

    @property
    def num_known(self) -> int:
        """Positions whose token ids are known; where ids are not kept, none is missing."""
        return self.first_id + len(self.token_ids) if self.keeps_ids else self.num_computed

    def is_open_at(self, position: int) -> bool:
        """Whether the ids known and kept are just those before a position."""
        return self.keeps_ids and self.first_id + len(self.token_ids) == position

    def only_moves(self, num_tokens: int) -> bool:
        """Whether a commit only moves a length: it is valid, ids are known, and no block is full."""
        if not self.num_committed <= num_tokens <= self.num_computed or self.windows:
            return False
        return not self.keeps_ids or (
            num_tokens < (self.num_run_blocks + 1) * self.block_size
            and num_tokens <= self.first_id + len(self.token_ids)
        )

    @property
    def num_unpublished(self) -> int:
        """Committed positions past the path to `run`."""
        return self.num_committed - self.num_run_blocks * self.block_size

    @property
    def loose_blocks(self) -> array[int]:
        """The blocks past the path to `run`."""
        return self.block_table[self.num_run_blocks :]

    @property
    def tables(self) -> list[tuple[array[int], int]]:
        """The table of each group, and the index from which on it holds blocks."""
        return [(self.block_table, 0), *((table.blocks, table.start) for table in self.windows)]

    def table_of(self, group: int) -> array[int]:
        """The table of a group. `UnknownGroup`."""
        if not 0 <= group <= len(self.windows):
            raise UnknownGroup(f"groups are 0..{len(self.windows)}, got {group}")
        return self.windows[group - 1].blocks if group else self.block_table

    def state(self, completed_step: int) -> tuple[object, ...]:
        """All that matters from now on, for comparison."""
        last_step = self.last_step if self.last_step > completed_step else 0
        lengths = (self.first_id, self.num_committed, self.num_computed, self.num_run_blocks)
        windows = tuple(table.blocks for table in self.windows)
        kept = (self.priority, self.num_reserved_blocks)
        return (
            (self.keys, self.block_table, self.token_ids, lengths, kept, last_step),
            windows,
        )

    def num_valid(self, index: int) -> int:
        """Computed positions in the block at `index` of the table."""
        return min(max(self.num_computed - index * self.block_size, 0), self.block_size)

    def plan_write(
        self,
        seq_id: SequenceId,
        entry: array[int] | int,
        shared: Mapping[int, int],
        given_up: Mapping[int, int],
    ) -> Write:
        """Check a write of the next positions and find the blocks it needs; changes nothing.

        `shared` counts the tables that hold a loose block, `given_up` those of them that earlier
        entries of the batch take it out of.
        """
        num_tokens = entry if isinstance(entry, int) else len(entry)
        if num_tokens < 1:
            raise InvalidLength(
                f"sequence {seq_id!r} must append at least 1 token, got {num_tokens}"
            )
        new_tokens = _NOTHING if isinstance(entry, int) else self._find_news(seq_id, entry)
        num_held = len(self.block_table)
        num_blocks = -(-(self.num_computed + num_tokens) // self.block_size)
        replaced: tuple[int, ...] = ()
        if shared:
            first = self.num_computed // self.block_size
            replaced = shared_places(self.block_table, first, num_blocks, shared, given_up)
        num_new_blocks = len(replaced) + max(0, num_blocks - num_held)
        return Write(
            seq_id,
            self,
            num_tokens,
            new_tokens,
            replaced,
            max(num_held, num_blocks),
            num_new_blocks,
        )

    def check_ids(self, num_tokens: int, packed: array[int]) -> None:
        """Check that `packed` brings the ids that a commit of `num_tokens` positions needs."""
        num_known = self.num_known + len(packed)
        if packed and num_known > self.num_computed:
            raise InvalidTokens(
                f"token ids may not go past the computed {self.num_computed} positions, "
                f"got ids up to {num_known}"
            )
        if num_known < num_tokens:
            raise InvalidTokens(
                f"committed positions need known token ids: {num_known} of {num_tokens} are known"
            )

    def schedule(self, write: Write) -> Span:
        """Schedule the positions of a write whose blocks are in the table."""
        span = self.next_span(self.block_table, write.num_tokens)
        self.num_computed += write.num_tokens
        if write.new_tokens:
            self.token_ids.extend(write.new_tokens)
        return span

    def next_span(self, table: array[int], num_tokens: int) -> Span:
        """Where the next positions lie in one of its tables."""
        start, size = self.num_computed, self.block_size
        stop = -(-(start + num_tokens) // size)
        return Span(table[start // size : stop], start % size, num_tokens)

    def truncate(self, num_tokens: int) -> array[int]:
        """Forget positions from `num_tokens` on; returns the blocks that only they needed.

        What is reserved is kept.
        """
        keep = max(-(-num_tokens // self.block_size), self.num_reserved_blocks)
        surplus = array("i")
        for table in (self.block_table, *(table.blocks for table in self.windows)):
            surplus += table[keep:]
            del table[keep:]
        del self.token_ids[max(0, num_tokens - self.first_id) :]
        self.num_computed = num_tokens
        if self.media and self.media[-1].position >= num_tokens:
            self.media = tuple(item for item in self.media if item.position < num_tokens)
            self.keys = keys_of(self.namespace, self.media, self.block_size)
        return surplus

    def fork(self) -> Sequence:
        """A sequence with the same tokens, lengths and blocks, but for those that are reserved.

        The caller notes the new holder.
        """
        table = self.block_table[:]
        if self.num_reserved_blocks:
            del table[-(-self.num_known // self.block_size) :]
        child = Sequence(  # dataclasses.replace takes twice as long
            self.block_size,
            self.namespace,
            self.media,
            self.keys,
            self.run,
            self.num_run_blocks,
            table,
            self.keeps_ids,
            self.token_ids[:],
            self.first_id,
            self.num_committed,
            self.num_computed,
            self.priority,
        )
        child.explanation = self.explanation
        if self.windows:
            child.windows = tuple([WindowTable(t.blocks[:], t.start) for t in self.windows])
        return child

    def _find_news(self, seq_id: SequenceId, packed: array[int]) -> array[int]:
        """Of the token ids of the next positions, those to keep that are not known yet."""
        if not self.keeps_ids:
            return _NOTHING
        start, num_known = self.num_computed, self.num_known
        if start == num_known:
            return packed
        if start > num_known:
            raise InvalidTokens(
                f"sequence {seq_id!r} has {start} computed positions but {num_known} known token "
                f"ids: commit the missing ids first, or append a count"
            )
        known = self.token_ids[start - self.first_id :][: len(packed)]
        if packed[: len(known)] != known:
            at = next(i for i, token in enumerate(known) if token != packed[i])
            raise InvalidTokens(
                f"token ids must agree with the known ones: sequence {seq_id!r} has {known[at]} "
                f"at position {start + at}, got {packed[at]}"
            )
        return packed[len(known) :]


def shared_places(
    table: array[int],
    start: int,
    stop: int,
    shared: Mapping[int, int],
    given_up: Mapping[int, int],
) -> tuple[int, ...]:
    """Where, from `start` up to `stop`, a table holds blocks that others hold too; see `plan_write`."""
    return tuple(
        [
            index
            for index in range(start, min(len(table), stop))
            if shared.get(table[index], 1) - given_up.get(table[index], 0) > 1
        ]
    )


def require_mapping(given: object) -> None:
    """Refuse what does not map sequence ids to something. `InvalidBatch`."""
    if not isinstance(given, Mapping):
        raise InvalidBatch(
            f"a batch must be a mapping of sequence ids, such as a dict, got a {type(given).__name__}"
        )


def read_entry(entry: Any) -> array[int] | int:
    """One entry of a batch: packed token ids, or a count."""
    if isinstance(entry, int):
        return entry
    return pack_tokens(entry) if isinstance(entry, Iterable) else operator.index(entry)
