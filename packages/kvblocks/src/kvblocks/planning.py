"""What each block size means for given lengths and a given pool, and which one to take.

Knows sequences that are there at the same time and share nothing. Does not know how they grow, what
they share, or, unless it is told, how fast a kernel reads blocks of a size: the recommendation says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from kvblocks.errors import InvalidSize
from kvblocks.sizing import (
    num_blocks,
    num_held_blocks,
    num_moved_tokens,
    require,
    table_bytes,
)

# What paging is said to waste at most (Kwon et al., 2023, "near-zero"): above, a smaller block pays.
ACCEPTABLE_WASTE = Fraction(4, 100)
# Measured speeds that differ by less count as equal.
EQUAL_SPEED = Fraction(5, 100)
UNKNOWN_GROWTH = (
    "what sequences share (small blocks find longer common prefixes), and how far they grow"
)
UNKNOWN = f"how fast a kernel reads blocks of this size, {UNKNOWN_GROWTH}"


class WindowPart(NamedTuple):
    """That part of a token's bytes which layers keep for the last `window` tokens only."""

    bytes_per_token: int
    window: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What one block size means for given lengths, and for a pool where there is one.

    Blocks and slots are those of the layers that keep most; bytes are those of all layers.
    """

    block_size: int
    num_blocks: int
    num_slots: int
    num_bytes: int
    tail_waste_slots: int
    table_entries: int
    fits: bool | None  # None without a pool, and so are the rest
    free_slots: int | None
    short_slots: int | None
    short_bytes: int | None

    @property
    def tail_waste_ratio(self) -> float:
        """The share of the slots that hold no token."""
        return self.tail_waste_slots / self.num_slots if self.num_slots else 0.0

    @property
    def table_bytes(self) -> int:
        """An int32 an entry."""
        return table_bytes(self.table_entries)

    @property
    def table_ratio(self) -> Fraction:
        """The tables' bytes over those of the blocks."""
        return Fraction(self.table_bytes, self.num_bytes) if self.num_bytes else Fraction(0)


def plan_blocks(
    lengths: Iterable[int],
    block_size: int,
    *,
    bytes_per_token: int,
    pool_bytes: int | None = None,
    windows: Sequence[WindowPart] = (),
) -> BlockPlan:
    """Blocks, bytes and waste of sequences that are there at the same time and share nothing.

    `bytes_per_token` counts all layers, those with a window included. A pool holds whole blocks of
    all layers: `short_slots` counts those of the missing blocks. O(lengths * windows). `InvalidSize`.

    >>> plan = plan_blocks([17, 31, 32, 33], 16, bytes_per_token=131_072, pool_bytes=2**24)
    >>> plan.num_blocks, plan.num_slots, plan.tail_waste_slots, plan.fits, plan.short_slots
    (9, 144, 31, False, 16)
    """
    require("bytes_per_token", bytes_per_token)
    full_bytes = bytes_per_token - sum(part.bytes_per_token for part in windows)
    if full_bytes < 0:
        raise InvalidSize(
            f"windows must be part of bytes_per_token, got {bytes_per_token - full_bytes} of "
            f"{bytes_per_token}"
        )
    longest = None if full_bytes else max(part.window for part in windows)
    held = entries = held_tokens = held_bytes = 0
    for length in lengths:
        entries += num_blocks(length, block_size)
        held += num_held_blocks(length, block_size, longest)
        held_tokens += length if longest is None else min(length, longest)
        held_bytes += full_bytes * num_blocks(length, block_size) + sum(
            part.bytes_per_token * num_held_blocks(length, block_size, part.window)
            for part in windows
        )
    num_tables = bool(full_bytes) + len({part.window for part in windows})
    fits, free, short = _in_pool(held_bytes * block_size, block_size * bytes_per_token, pool_bytes)
    return BlockPlan(
        block_size=block_size,
        num_blocks=held,
        num_slots=held * block_size,
        num_bytes=held_bytes * block_size,
        tail_waste_slots=held * block_size - held_tokens,
        table_entries=entries * num_tables,
        fits=fits,
        free_slots=None if free is None else free * block_size,
        short_slots=None if short is None else short * block_size,
        short_bytes=None if short is None else short * block_size * bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class ContiguousPlan:
    """What one way to keep each sequence in one piece holds, once all tokens are there.

    `way` is `reserve` (so much for everyone, whatever it will need), `pow2` (the next power of two)
    or `grow` (in steps, moved to a longer piece by a copy); `size` is what is reserved, or the step.
    """

    way: str
    size: int | None
    num_slots: int
    over_allocated_slots: int
    rounding_slots: int
    moved_tokens: int


def plan_contiguous(
    lengths: Sequence[int], reservations: Iterable[int], steps: Iterable[int] = (1, 256, 512, 1024)
) -> list[ContiguousPlan]:
    """What the same sequences would take without paging. O(lengths * ways). `InvalidSize`.

    >>> [plan.over_allocated_slots for plan in plan_contiguous([200], [2048, 4096], steps=())]
    [1848, 3896, 0]
    >>> [plan.rounding_slots for plan in plan_contiguous([200], (), steps=[256, 512, 1024])]
    [56, 56, 312, 824]
    """
    useful = sum(lengths)
    plans = []
    for size in reservations:
        longest = max(lengths, default=0)
        if size < longest:
            raise InvalidSize(
                f"a reservation must hold the longest sequence of {longest:,} tokens, got {size:,}"
            )
        held = size * len(lengths)
        plans.append(ContiguousPlan("reserve", size, held, held - useful, 0, 0))
    held = sum(1 << (length - 1).bit_length() for length in lengths if length)
    plans.append(ContiguousPlan("pow2", None, held, 0, held - useful, 0))
    for step in steps:
        held = sum(num_blocks(length, step) * step for length in lengths)
        moved = sum(num_moved_tokens(length, step) for length in lengths)
        plans.append(ContiguousPlan("grow", step, held, 0, held - useful, moved))
    return plans


def _in_pool(
    needed_bytes: int, block_bytes: int, pool_bytes: int | None
) -> tuple[bool | None, int | None, int | None]:
    """Whether it fits, and the whole blocks that are left or missing."""
    if pool_bytes is None:
        return None, None, None
    require("pool_bytes", pool_bytes)
    require("the bytes of a block", block_bytes)
    spare = (pool_bytes - needed_bytes) // block_bytes  # rounded down, below zero too
    return spare >= 0, max(0, spare), max(0, -spare)


class Recommendation(NamedTuple):
    """A block size and why."""

    block_size: int
    reason: str


def recommend(
    plans: Sequence[BlockPlan], speeds: Mapping[int, float] | None = None
) -> Recommendation:
    """The largest block size that fits and wastes little; see `UNKNOWN`. `InvalidSize`.

    Large blocks make short tables and long stretches for kernels, small ones waste less: so the largest
    whose waste is acceptable, or else the one that wastes least. Where none fits, the one that is
    short by least.

    `speeds`, by block size and in any unit, say how fast a kernel reads: among sizes whose waste is
    acceptable the smallest of those that are about as fast as the fastest.

    >>> lengths = [17, 31, 32, 33]
    >>> plans = [plan_blocks(lengths, b, bytes_per_token=2**17, pool_bytes=2**24) for b in (8, 16, 32)]
    >>> recommend(plans)
    Recommendation(block_size=8, reason='the only one of these that fits')
    """
    if not plans:
        raise InvalidSize("a recommendation needs at least one block size")
    fitting = [plan for plan in plans if plan.fits is not False]
    has_pool = plans[0].fits is not None
    percent = f"{float(100 * ACCEPTABLE_WASTE):g} %"
    if not fitting:
        best = min(plans, key=lambda plan: (plan.short_bytes, -plan.block_size))
        reason = "none fits, and this one is short by least"
    elif len(plans) == 1:
        best, reason = plans[0], "the only one asked for"
    elif len(fitting) == 1:
        best, reason = fitting[0], "the only one of these that fits"
    elif low := [plan for plan in fitting if plan.tail_waste_ratio <= ACCEPTABLE_WASTE]:
        that = f"that {'fits and ' if has_pool else ''}leaves at most {percent} of its slots empty"
        measured = {plan.block_size: speed for plan in low if (speed := _of(plan, speeds))}
        if measured:
            least = max(measured.values()) * float(1 - EQUAL_SPEED)
            size = min(size for size, speed in measured.items() if speed >= least)
            reason = f"the smallest {that} and reads within 5 % as fast as the fastest of these"
            return Recommendation(size, reason)
        best = max(low, key=lambda plan: plan.block_size)
        reason = f"the largest {that}: large blocks make short tables and long stretches to read"
    else:
        best = min(fitting, key=lambda plan: (plan.tail_waste_ratio, -plan.block_size))
        reason = (
            f"all {'that fit ' if has_pool else ''}leave more than {percent} of their slots empty, "
            "and this one leaves least"
        )
    return Recommendation(best.block_size, reason)


def _of(plan: BlockPlan, speeds: Mapping[int, float] | None) -> float | None:
    return None if speeds is None else speeds.get(plan.block_size)
