"""A step in the block manager's terms: what a batch needs, where it writes, when it is committed.

Sequences that decode, a token each, are advanced together in one call, so that a step costs little
for each of them; all others are appended one by one.

Knows sequences and the block manager. Does not know who should run, or what to do about a shortage.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import NamedTuple

from kvblocks import BlockCopy, BlockManager, BlockSwap, Verdict, When
from kvruntime.request import Sequence
from kvruntime.steps import ScheduledSequence, SchedulerOutput

__all__ = ["Paging", "Part", "needing"]


class Part(NamedTuple):
    """A part of a step that has its blocks: tokens a sequence, the slots they go to, and copies.

    The first `num_decoding` sequences are those that advance together.
    """

    batch: Mapping[Sequence, int]
    slots: Iterable[int]
    copies: tuple[BlockCopy, ...]
    num_decoding: int = 0


class Paging:
    """The sequences of a scheduler in the blocks of a manager.

    A sequence decodes with the others from its second token on, while no two steps are open: by
    then its last block is its own, and all that is known of it is committed.
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self._decoding = manager.decode_batch()
        self._members: dict[Hashable, Sequence] = {}  # who joined; some may have left
        self._fence = 0
        self._num_open = 0

    @property
    def num_open_steps(self) -> int:
        """Steps that have begun and are not complete."""
        return self._num_open

    def begin(self) -> None:
        """Open a step: what it touches is handed out to nobody before it completes."""
        self._fence = self.manager.begin_step()
        self._num_open += 1

    def cancel(self) -> None:
        """Take back a step that has just begun, and in which nothing is."""
        self._num_open -= 1
        if not self._num_open:
            self.manager.complete_step(self._fence)

    def can_append(self, batch: Mapping[Sequence, int]) -> Verdict:
        """Whether there are blocks for so many more tokens of each. O(tokens)."""
        rows, others = self._divide(batch)
        if not rows:
            return self.manager.can_append(self._entries(others))
        together = self._decoding.can_append()
        if not others:
            return together
        apart = self.manager.can_append(self._entries(others))
        return needing(apart, apart.num_needed_blocks + together.num_needed_blocks)

    def append(self, batch: Mapping[Sequence, int]) -> Part:
        """Take the blocks of a batch; tokens that are computed again get slot -1."""
        if not batch:
            return Part({}, (), ())
        rows, others = self._divide(batch)
        slots: list[Iterable[int]] = []
        copies: tuple[BlockCopy, ...] = ()
        if rows:
            plan = self._decoding.append()
            slots.append(plan.slot_mapping)
            copies = plan.copies
        if others:
            entries = self._entries(others)
            plan = self.manager.append(entries)
            copies += plan.copies
            if len(plan.slot_mapping) == sum(others.values()):
                slots.append(plan.slot_mapping)
            else:
                written = (len(entries.get(sequence.seq_id, ())) for sequence in others)
                slots.append(_with_gaps(plan.slot_mapping, others.values(), written))
        in_order = dict.fromkeys(rows, 1) | others
        return Part(in_order, chain.from_iterable(slots), copies, len(rows))

    def describe(
        self,
        step: int,
        parts: list[Part],
        swaps_out: Iterable[BlockSwap],
        swaps_in: Iterable[BlockSwap],
    ) -> SchedulerOutput:
        """The step that has begun, as who runs it needs it."""
        assert not any(part.num_decoding for part in parts[1:]), "those that decode come first"
        batch = list(chain.from_iterable(part.batch.items() for part in parts))
        return SchedulerOutput(
            step=step,
            fence=self._fence,
            swaps_out=tuple(swaps_out),
            swaps_in=tuple(swaps_in),
            scheduled=tuple([_describe(sequence, num_tokens) for sequence, num_tokens in batch]),
            num_decoding=parts[0].num_decoding if parts else 0,
            block_tables=self._block_tables([sequence for sequence, _ in batch]),
            slot_mapping=array("q", chain.from_iterable(part.slots for part in parts)),
            copies=tuple(chain.from_iterable(part.copies for part in parts)),
        )

    def complete(self, output: SchedulerOutput) -> None:
        """Close a step that has run: its positions are written, and may be shared."""
        self._num_open -= 1
        # Where no step is left open, those that were taken back are closed with it.
        self.manager.complete_step(output.fence if self._num_open else self._fence)
        scheduled = output.scheduled
        if output.num_decoding:
            together = islice(scheduled, output.num_decoding)
            self._decoding.commit(array("I", [item.token_ids[0] for item in together]))
        for item in scheduled:
            item.sequence.num_computed_tokens = item.start + len(item.token_ids)
        for item in islice(scheduled, output.num_decoding, None):
            sequence = item.sequence
            if sequence.is_dropped:
                continue
            seq_id = sequence.seq_id
            self.manager.commit(seq_id, self.manager.num_computed_tokens(seq_id))
            is_decoding = item.completes and len(item.token_ids) == 1
            if is_decoding and not self._num_open and sequence.request.beam_search is None:
                self._decoding.join(seq_id)
                self._members[seq_id] = sequence

    def fail(self, *, swaps_in: bool) -> None:
        """Close all open steps, though they may not have run: whoever was in them is to be dropped."""
        self.manager.complete_step(self.manager.begin_step())
        self._num_open = 0
        self._decoding = self.manager.decode_batch()
        self._members.clear()
        if swaps_in:
            # They can be found already, and may never have been copied.
            self.manager.reset_prefix_cache()

    def _divide(self, batch: Mapping[Sequence, int]) -> tuple[list[Sequence], dict[Sequence, int]]:
        """Those of a batch that advance together, in the order of their rows, and the others.

        All rows advance or none: who stays behind, for want of budget, goes on by itself.
        """
        rows = self._rows()
        counts = [batch.get(sequence, 0) for sequence in rows]
        if not any(counts):
            return [], dict(batch)
        if counts.count(1) != len(counts):
            for sequence, num_tokens in zip(rows, counts, strict=True):
                if num_tokens != 1:
                    self._decoding.leave(sequence.seq_id)
            rows = self._rows()
        if len(self._members) > len(rows):
            self._members = {sequence.seq_id: sequence for sequence in rows}
        if len(rows) == len(batch):
            return rows, {}
        apart = set(rows)
        return rows, {s: n for s, n in batch.items() if s not in apart}

    def _rows(self) -> list[Sequence]:
        """The sequences that advance together, in the order of the manager."""
        members = self._members
        return [members[seq_id] for seq_id in self._decoding.seq_ids]

    def _entries(self, batch: Mapping[Sequence, int]) -> dict[tuple[int, int], list[int]]:
        """The token ids of each sequence's next positions, but those whose KV was found."""
        entries = {
            s.seq_id: s.token_ids[self._first_unwritten(s) : s.num_computed_tokens + n]
            for s, n in batch.items()
        }
        return {seq_id: token_ids for seq_id, token_ids in entries.items() if token_ids}

    def _first_unwritten(self, sequence: Sequence) -> int:
        if not sequence.request.wants_prompt_logprobs:
            return sequence.num_computed_tokens
        return self.manager.num_computed_tokens(sequence.seq_id)

    def _block_tables(self, sequences: list[Sequence]) -> memoryview:
        """The tables of these sequences as rows, padded with -1."""
        block_size = self.manager.block_size
        longest = max((len(sequence.token_ids) for sequence in sequences), default=1)
        shape = (max(len(sequences), 1), -(-longest // block_size))
        tables = memoryview(bytearray(4 * shape[0] * shape[1])).cast("B").cast("i", shape)
        self.manager.write_block_tables(tables, [sequence.seq_id for sequence in sequences])
        return tables


def needing(verdict: Verdict, num_blocks: int) -> Verdict:
    """A verdict on the same pool when so many blocks are needed, at least as many as it says."""
    is_short = verdict.is_now and num_blocks > verdict.num_available_blocks
    when = When.LATER if is_short else verdict.when
    return verdict._replace(when=when, num_needed_blocks=num_blocks)


def _describe(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    start, known = sequence.num_computed_tokens, sequence.token_ids
    return ScheduledSequence(
        sequence,
        start,
        known[start : start + num_tokens],
        start + num_tokens == len(known),
        sequence.request.wants_prompt_logprobs,
    )


def _with_gaps(
    slots: Iterable[int], num_tokens: Iterable[int], num_written: Iterable[int]
) -> Iterator[int]:
    """The slots of a batch in which each sequence's first tokens may write nothing."""
    following = iter(slots)
    for tokens, written in zip(num_tokens, num_written, strict=True):
        yield from repeat(-1, tokens - written)
        yield from islice(following, written)
