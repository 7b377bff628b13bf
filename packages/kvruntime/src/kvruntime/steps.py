"""What one step is made of, and the line that the step log keeps of it.

Knows plain data. Does not know how it was decided, nor who carries it out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from kvblocks import BlockCopy, BlockSwap
from kvruntime.request import Event, Sequence

__all__ = ["ScheduledSequence", "SchedulerOutput", "StepRecord"]


class ScheduledSequence(NamedTuple):
    """The tokens of a sequence to compute now."""

    sequence: Sequence
    start: int  # the position of the first token
    token_ids: list[int]
    completes: bool  # no known token is left after this step, so that the next one is chosen
    wants_logits: bool  # of all its tokens, not only of the last

    @property
    def stop(self) -> int:
        """The position after the last token: the length of the context after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what moves first, then one flat batch of tokens, each with its slot.

    Blocks go to the host first, since what comes back may be given the same blocks; then come
    copies on write, and then the writes of the forward pass.

    `block_tables` is int32 [sequences, blocks], padded with -1: the blocks that the whole context
    of each scheduled sequence lies in.
    """

    step: int
    fence: int  # what the block manager knows the step by
    scheduled: tuple[ScheduledSequence, ...]
    block_tables: memoryview
    slot_mapping: array[int]
    copies: tuple[BlockCopy, ...]
    swaps_out: tuple[BlockSwap, ...] = ()  # from the device to the host
    swaps_in: tuple[BlockSwap, ...] = ()  # from the host to the device
    num_decoding: int = 0  # the first of them, which the block manager advances together


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A line of the step log: who ran with how many tokens, what happened to whom, the pool.

    The pool is that of the forward pass. `events` are complete when the next step is scheduled:
    what ends, ends after it.
    """

    step: int
    scheduled: tuple[tuple[tuple[int, int], int], ...]
    events: list[Event]
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_evicted_blocks: int  # since the engine was made
    num_swapped_out_blocks: int = 0  # in this step
    num_swapped_in_blocks: int = 0
    copies: tuple[BlockCopy, ...] = ()  # on write

    def __str__(self) -> str:
        ran = " ".join(f"{request}.{index}+{n}" for (request, index), n in self.scheduled)
        swapped = ""
        if self.num_swapped_out_blocks or self.num_swapped_in_blocks:
            swapped = f", swapped {self.num_swapped_out_blocks} out {self.num_swapped_in_blocks} in"
        return (
            f"step {self.step}: {ran} | blocks held {self.num_held_blocks}, cached "
            f"{self.num_cached_blocks}, free {self.num_free_blocks}, evicted "
            f"{self.num_evicted_blocks}{swapped}"
        )
