"""What the manager answers with: small frozen values, plain data for engines.

Knows the shapes of answers. Does not know how they come about.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

SequenceId: TypeAlias = Hashable
PinName: TypeAlias = Hashable
# What a step appends to each sequence: a count, or the token ids. A mapping is invariant in its keys,
# so Any lets a caller keep their own type of id.
Batch: TypeAlias = Mapping[Any, Iterable[int] | int]


class When(Enum):
    """When a request for blocks can be served."""

    NOW = "now"
    AFTER_STEP = "after step"
    LATER = "later"
    NEVER = "never"


Pool: TypeAlias = Literal["device", "host"]


class Verdict(NamedTuple):
    """Whether blocks of a pool can be had: now, once a step completes, later, or never.

    `AFTER_STEP` names the open step whose completion alone frees enough. `LATER` means that other
    sequences must be freed first, `NEVER` that it
    would not do to free them all; what is pinned stays. The `pool` is the device's, but for
    `can_swap_out`, which asks for host blocks: there, those that are swapped out must go.
    """

    when: When
    num_needed_blocks: int
    num_available_blocks: int
    step: int | None = None
    pool: Pool = "device"

    @property
    def is_now(self) -> bool:
        """Whether the call would succeed at once."""
        return self.when is When.NOW

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that are needed and cannot be had now."""
        return max(0, self.num_needed_blocks - self.num_available_blocks)

    def __str__(self) -> str:
        blocks, whose = "blocks", "sequence"
        if self.pool == "host":
            blocks, whose = "host blocks", "swapped sequence"
        need = f"{blocks} needed: {self.num_needed_blocks}, available: {self.num_available_blocks}"
        match self.when:
            case When.NOW:
                return f"{need}; can be served now"
            case When.AFTER_STEP:
                return f"{need}; enough once step {self.step} completes"
            case When.LATER:
                return f"{need}; {self.num_missing_blocks} short until {whose}s are freed"
            case When.NEVER:  # pragma: no branch -- there is no fifth
                return f"{need}; not even freeing every {whose} would do"


class BlockCopy(NamedTuple):
    """The first `num_tokens` positions of `source` go to `destination`, before any write of the step."""

    source: int
    destination: int
    num_tokens: int


class BlockSwap(NamedTuple):
    """The whole block `source` goes to `destination`: one is a device block, the other a host block."""

    source: int
    destination: int


class BlockMerge(NamedTuple):
    """A commit gave the block `given_up` back for `adopted`, which has its content, in a table."""

    table_index: int
    given_up: int
    adopted: int
    group: int = 0


class Match(NamedTuple):
    """How much of a prompt the prefix cache holds: full blocks, never the whole prompt."""

    num_tokens: int
    block_table: array[int]
    num_partial_tokens: int = 0  # more that can be had by copying a part of a block

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The cached blocks in order."""
        return tuple(self.block_table)


class Allocation(NamedTuple):
    """What `allocate` took: cached blocks by reference, and new blocks for the rest."""

    num_cached_tokens: int
    num_new_blocks: int
    block_table: array[int]
    copies: tuple[BlockCopy, ...] = ()  # to carry out at once, before those of any plan

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks of the sequence in order."""
        return tuple(self.block_table)


class Reservation(NamedTuple):
    """What `reserve` took: copies to carry out as those of a plan, and the blocks that are new."""

    copies: tuple[BlockCopy, ...]
    new_blocks: Mapping[SequenceId, tuple[int, ...]]  # those that replace shared ones first


class Freeing(NamedTuple):
    """What it would yield to free sequences: blocks that could be had at once, and after steps.

    Cached blocks count: they can be had.
    """

    num_blocks: int
    num_fenced_blocks: Mapping[int, int]  # open step -> blocks that could be had once it completes

    def __str__(self) -> str:
        later = (f", {n} after step {step}" for step, n in self.num_fenced_blocks.items())
        return f"{self.num_blocks} blocks now" + "".join(later)


class BlockState(Enum):
    """What a block is: in exactly one of these states."""

    FREE = "free"
    HELD = "held"  # in a table, or pinned
    CACHED = "cached"  # in no table, but its content can be found
    FENCED = "fenced"  # in no table, but an open step uses it


class Holder(NamedTuple):
    """What one sequence holds."""

    seq_id: SequenceId
    num_blocks: int
    num_own_blocks: int  # that nobody else holds, no pin either
    num_unused_blocks: int  # beyond what is computed

    def __str__(self) -> str:
        return (
            f"sequence {self.seq_id!r}: {self.num_blocks} blocks, {self.num_own_blocks} its own, "
            f"{self.num_unused_blocks} not begun"
        )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who holds the pool.

    free + cached + fenced + shared + pinned + the own blocks of all holders = num_blocks.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # these can be had, as free ones can
    num_fenced_blocks: Mapping[int, int]  # step -> blocks that can be had once it completes
    num_shared_blocks: int  # in several tables, or in one and pinned
    num_pinned_blocks: int  # in no table
    holders: tuple[Holder, ...]  # who holds most by itself first

    def __str__(self) -> str:
        can_be_had = self.num_free_blocks + self.num_cached_blocks
        fenced = (f"{n} after step {step}" for step, n in self.num_fenced_blocks.items())
        pool = (
            f"{can_be_had} of {self.num_blocks} blocks can be had: {self.num_free_blocks} free, "
            f"{self.num_cached_blocks} cached; fenced: {', '.join(fenced) or 'none'}"
        )
        both = (
            f"shared: {self.num_shared_blocks}; pinned, and in no table: {self.num_pinned_blocks}"
        )
        return "\n".join([pool, both, *map(str, self.holders)])


class AllSalts(Enum):
    """What stands for every salt, and for none."""

    ALL_SALTS = "all salts"


ALL_SALTS = AllSalts.ALL_SALTS


class Forgotten(NamedTuple):
    """What became of the blocks whose content a reset forgot."""

    num_free_blocks: int
    num_fenced_blocks: int  # free once the open steps complete that use them
    num_held_blocks: int  # free once the sequences that hold them are freed


class Span(NamedTuple):
    """Consecutive positions of one sequence: `num_tokens` from `offset` in the first block on."""

    blocks: array[int]
    offset: int
    num_tokens: int


class StepPlan:
    """Where one step writes. It does not change, whatever becomes of the sequences."""

    __slots__ = ("_block_size", "_copies", "_new_blocks", "_slots", "_spans", "_windows")

    def __init__(
        self,
        block_size: int,
        copies: tuple[BlockCopy, ...],
        new_blocks: Mapping[SequenceId, tuple[int, ...]],
        *,
        spans: Iterable[Span] = (),
        slots: array[int] | None = None,
        windows: tuple[StepPlan, ...] = (),
    ) -> None:
        self._block_size = block_size
        self._copies = copies
        self._new_blocks = new_blocks
        self._spans = spans
        self._slots = slots
        self._windows = windows

    def __repr__(self) -> str:
        return (
            f"StepPlan(slot_mapping={self.slot_mapping}, copies={self.copies}, "
            f"new_blocks={self.new_blocks})"
        )

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """Complete them before the first write; no destination is another copy's source."""
        return self._copies

    @property
    def new_blocks(self) -> Mapping[SequenceId, tuple[int, ...]]:
        """The blocks each sequence gained, those that replace shared ones first."""
        return self._new_blocks

    @property
    def new_blocks_by_group(self) -> tuple[Mapping[SequenceId, tuple[int, ...]], ...]:
        """As `new_blocks`, of each group: full attention, then each window."""
        return (self._new_blocks, *(plan.new_blocks for plan in self._windows))

    @property
    def slot_mapping(self) -> array[int]:
        """One slot a scheduled token, int64, in the order of the batch.

        slot = block_id * block_size + offset. O(tokens), when first asked for.
        """
        if self._slots is None:
            self._slots = _slots_of(self._spans, self._block_size)
        return self._slots

    @property
    def slot_mappings(self) -> tuple[array[int], ...]:
        """As `slot_mapping`, of each group: full attention, then each window."""
        return (self.slot_mapping, *(plan.slot_mapping for plan in self._windows))


def _slots_of(spans: Iterable[Span], block_size: int) -> array[int]:
    slots = array("q")
    for blocks, offset, num_tokens in spans:
        end = offset + num_tokens  # counted from the start of the first block
        for first, block in zip(range(0, end, block_size), blocks, strict=True):
            start = block * block_size
            stop = start + min(end - first, block_size)
            slots.extend(range(start + max(offset - first, 0), stop))
    return slots


@dataclass(frozen=True, slots=True)
class Usage:
    """What held blocks hold. Shared blocks count once."""

    num_blocks: int
    num_slots: int
    num_stored_tokens: int

    @property
    def num_wasted_slots(self) -> int:
        """Slots of held blocks that hold no token."""
        return self.num_slots - self.num_stored_tokens


class WhyNot(Enum):
    """Why no more of a prompt was found in the cache."""

    WHOLE = "whole"  # all its full blocks were found; one token is always left to compute
    NOT_READY = "not ready"  # a sequence is computing the next block
    EVICTED = "evicted"
    FORGOTTEN = "forgotten"  # by a reset
    OTHER_NAMESPACE = "other namespace"  # more of it is cached behind another salt or adapter
    DIFFERS = "differs"  # what is cached goes on otherwise, in the midst of the next block
    NEW = "new"  # nothing like the next block is known


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt found as much of itself as it did, when it was allocated.

    `num_cached_tokens` are those in full blocks. `position` is that of the first token that was not found in full blocks; for DIFFERS, of the
    first token that is another one. `step` is, for NOT_READY, the open step that computes the block
    (0: none does yet); for EVICTED and FORGOTTEN, the newest step begun when that happened.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    why: WhyNot
    position: int
    seq_id: SequenceId | None = None  # for NOT_READY: who computes it
    step: int = 0
    num_evicted_since: int = 0  # for EVICTED and FORGOTTEN: blocks evicted since then
    salt: str | None = None  # for OTHER_NAMESPACE: whose it is
    adapter: tuple[str | int, int] | None = None  # its name and generation

    def __str__(self) -> str:
        at = f"position {self.position}"
        since = f"in step {self.step}, {self.num_evicted_since} evicted blocks ago"
        has = f"computes it in step {self.step}" if self.step else "has it to compute"
        reason = {
            WhyNot.WHOLE: "all full blocks, as one token is left to compute",
            WhyNot.NOT_READY: f"from {at} sequence {self.seq_id!r} {has}",
            WhyNot.EVICTED: f"from {at} it was evicted {since}",
            WhyNot.FORGOTTEN: f"from {at} it was reset {since}",
            WhyNot.OTHER_NAMESPACE: f"from {at} it belongs to salt={self.salt!r}, adapter={self.adapter!r}",
            WhyNot.DIFFERS: f"at {at} what is cached goes on otherwise",
            WhyNot.NEW: f"from {at} nothing like it is known",
        }[self.why]
        return f"{self.num_cached_tokens} of {self.num_prompt_tokens} tokens cached: {reason}"


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took, for a number of blocks, by the manager's clock."""

    num_blocks: int = 0
    total: float = 0.0
    minimum: float = math.inf
    maximum: float = 0.0

    @property
    def mean(self) -> float:
        """That of an average block; 0 if there was none."""
        return self.total / self.num_blocks if self.num_blocks else 0.0

    def plus(self, num_blocks: int, duration: float) -> Durations:
        """With more blocks of one duration."""
        return Durations(
            self.num_blocks + num_blocks,
            self.total + num_blocks * duration,
            min(self.minimum, duration),
            max(self.maximum, duration),
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the manager was made, and the pool as it stands.

    free + cached + held + fenced = num_blocks, and free + held + fenced = num_host_blocks.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int  # in tables, or pinned
    num_pinned_blocks: int
    num_fenced_blocks: int
    peak_held_blocks: int
    num_sequences: int  # but for those that are swapped out
    num_swapped_sequences: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_held_host_blocks: int  # those of swapped sequences
    num_fenced_host_blocks: int
    num_swapped_out_blocks: int  # copied, since the manager was made
    num_swapped_in_blocks: int
    num_forks: int
    num_copies: int
    num_merged_blocks: int
    num_evicted_blocks: int
    idle_time: Durations
    lifetime: Durations
    num_queried_tokens: int
    num_cached_tokens: int
    num_refusals: int

    @property
    def hit_rate(self) -> float:
        """The share of all prompts' tokens that were found; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
