"""Scheduling the next positions of a batch: who writes where, in which blocks, after which copies.

Knows how a batch is read, planned and carried out on a ledger. Does not know prompts, commits, or
what becomes of the plan.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from kvblocks.hashing import pack_tokens
from kvblocks.ledger import Ledger
from kvblocks.results import Batch, BlockCopy, SequenceId, Span, StepPlan, Verdict
from kvblocks.sequence import (
    Sequence,
    WindowTable,
    Write,
    read_entry,
    require_mapping,
    shared_places,
)

_LISTS = ({tuple}, {list})
_NO_BLOCKS: Mapping[SequenceId, tuple[int, ...]] = MappingProxyType({})


class WindowWrite(NamedTuple):
    """What a write needs in the table of one window."""

    write: Write
    table: WindowTable
    replaced: tuple[int, ...]  # table indices of blocks that others hold too
    num_new_blocks: int


def append(ledger: Ledger, batch: Batch) -> StepPlan:
    """Schedule a batch, all or nothing; see `BlockManager.append`."""
    if type(batch) is not dict:  # which takes no time to see
        require_mapping(batch)
    if (
        not ledger.pool.shared
        and not ledger.windows.sizes
        and (plan := _append_simply(ledger, batch))
    ):
        return plan
    writes = plan_writes(ledger, batch)
    needed = sum([write.num_new_blocks for write in writes])
    groups = _plan_in_windows(ledger, writes) if ledger.windows.sizes else []
    for group in groups:
        needed += sum(part.num_new_blocks for part in group)
    if needed > ledger.num_available:
        ledger.serve(judge_append(ledger, writes))

    ledger.tick()
    new = ledger.take(needed)
    windows = _write_in_windows(ledger, groups, new) if groups else ()
    spans: list[Span] = []
    copies: list[BlockCopy] = []
    gained: dict[SequenceId, tuple[int, ...]] = {}
    step, at = ledger.pool.open_step, 0
    for write in writes:
        sequence = write.sequence
        ledger.leave_batch(sequence)
        sequence.last_step = step or sequence.last_step
        if write.num_new_blocks:
            own = new[at : at + write.num_new_blocks]
            at += write.num_new_blocks
            gained[write.seq_id] = tuple(own)
            if write.replaced:
                copies += ledger.exchange(sequence, sequence.block_table, write.replaced, own)
            sequence.block_table.extend(own[len(write.replaced) :])
        spans.append(sequence.schedule(write))
    for plan in windows:
        copies += plan.copies
    return StepPlan(ledger.block_size, tuple(copies), gained, spans=spans, windows=windows)


def _plan_in_windows(ledger: Ledger, writes: Iterable[Write]) -> list[list[WindowWrite]]:
    """Of each window, what writes need in it."""
    shared, size = ledger.pool.shared, ledger.block_size
    groups: list[list[WindowWrite]] = []
    for group in range(len(ledger.windows.sizes)):
        given_up: Counter[int] = Counter()
        parts: list[WindowWrite] = []
        for write in writes:
            start, table = write.sequence.num_computed, write.sequence.windows[group]
            stop = ledger.num_blocks_for(start + write.num_tokens)
            places = shared_places(table.blocks, start // size, stop, shared, given_up)
            given_up.update(table.blocks[index] for index in places)
            num_new = len(places) + max(0, stop - len(table.blocks))
            parts.append(WindowWrite(write, table, places, num_new))
        groups.append(parts)
    return groups


def _write_in_windows(
    ledger: Ledger, groups: Iterable[list[WindowWrite]], new: array[int]
) -> tuple[StepPlan, ...]:
    """Put the last of the new blocks into the tables of windows, and plan where those are written."""
    plans: list[StepPlan] = []
    step, at = ledger.pool.open_step, len(new)
    for parts in groups:
        at -= sum(part.num_new_blocks for part in parts)
        start = at
        spans: list[Span] = []
        copies: list[BlockCopy] = []
        gained: dict[SequenceId, tuple[int, ...]] = {}
        for write, table, places, num_new in parts:
            sequence = write.sequence
            sequence.last_step = step or sequence.last_step
            if num_new:
                own = new[start : start + num_new]
                start += num_new
                gained[write.seq_id] = tuple(own)
                copies += ledger.exchange(sequence, table.blocks, places, own)
                table.blocks.extend(own[len(places) :])
            spans.append(sequence.next_span(table.blocks, write.num_tokens))
        plans.append(StepPlan(ledger.block_size, tuple(copies), gained, spans=spans))
    return tuple(plans)


def plan_writes(ledger: Ledger, batch: Batch) -> list[Write]:
    """Check a batch and find the blocks it needs, without changing anything."""
    require_mapping(batch)
    # All entries are read before anything is looked at: a generator may do anything.
    entries = {
        seq_id: entry if type(entry) is int else read_entry(entry)
        for seq_id, entry in batch.items()
    }
    writes: list[Write] = []
    shared = ledger.pool.shared
    given_up: Counter[int] = Counter()  # places in tables that earlier entries leave
    for seq_id, entry in entries.items():
        write = ledger.get(seq_id).plan_write(seq_id, entry, shared, given_up)
        if write.replaced:
            table = write.sequence.block_table
            given_up.update(table[index] for index in write.replaced)
        writes.append(write)
    return writes


def judge_append(ledger: Ledger, writes: Collection[Write]) -> Verdict:
    """Judge the need of a batch for new blocks."""
    needed = sum(write.num_new_blocks for write in writes)
    if ledger.windows.sizes:
        parts = chain.from_iterable(_plan_in_windows(ledger, writes))
        needed += sum(part.num_new_blocks for part in parts)
    beside = (
        ledger.num_beside_pins(write.sequence, write.num_blocks)
        + ledger.num_windows_beside_pins(write)
        for write in writes
    )
    return ledger.judge(needed, max(beside, default=0))


def _append_simply(ledger: Ledger, batch: Batch) -> StepPlan | None:
    """What most steps are, in few passes: nothing is shared, and one sequence goes on, or all by one."""
    if len(batch) == 1 and (plan := _append_within(ledger, batch)):
        return plan
    entries: Collection[Any] = batch.values()
    kinds = set(map(type, entries))
    if kinds == {int} and set(entries) == {1}:
        return _append_one_each(ledger, batch)
    if kinds in _LISTS and set(map(len, entries)) == {1}:
        return _append_known_each(ledger, batch, pack_tokens([*chain.from_iterable(entries)]))
    return None


def _append_within(ledger: Ledger, batch: Batch) -> StepPlan | None:
    """Append to one sequence that has room for it: the commonest call in the fewest steps."""
    ((seq_id, entry),) = batch.items()
    sequence = ledger.sequences.get(seq_id)
    if sequence is None or sequence.batch is not None:
        return None
    size, start, table = ledger.block_size, sequence.num_computed, sequence.block_table
    news = None
    if type(entry) is int:
        num_tokens = entry
    elif (type(entry) is tuple or type(entry) is list) and sequence.is_open_at(start):
        news = pack_tokens(entry)
        num_tokens = len(news)
    else:
        return None
    end = start + num_tokens
    if num_tokens < 1 or end > len(table) * size:
        return None
    if news:
        sequence.token_ids.extend(news)
    sequence.num_computed = end
    if ledger.pool.step > ledger.pool.completed_step:
        sequence.last_step = ledger.pool.step
    first = start // size
    if num_tokens == 1:
        slots = array("q", (table[first] * size + start % size,))
        return StepPlan(size, (), _NO_BLOCKS, slots=slots)
    span = Span(table[first : -(-end // size)], start % size, num_tokens)
    return StepPlan(size, (), _NO_BLOCKS, spans=(span,))


def _append_known_each(
    ledger: Ledger, batch: Iterable[SequenceId], packed: array[int]
) -> StepPlan | None:
    """Append one token each by its id; None if for somebody that is more than one id more."""
    sequences = ledger.get_all(batch)
    for sequence in sequences:
        if not sequence.is_open_at(sequence.num_computed):
            return None
    plan = _append_one_each(ledger, batch)
    for sequence, token in zip(sequences, packed, strict=True):
        sequence.token_ids.append(token)
    return plan


def _append_one_each(ledger: Ledger, batch: Iterable[SequenceId]) -> StepPlan:
    """Append one token each where no tail is shared: the common step, in a few passes."""
    size = ledger.block_size
    sequences = ledger.get_all(batch)
    starting = [s for s in sequences if s.num_computed == len(s.block_table) * size]
    gained = _begin_blocks(ledger, batch, sequences, starting) if starting else {}
    slots, step = array("q"), ledger.pool.open_step
    for sequence in sequences:
        if sequence.batch is not None:
            sequence.batch.drop(sequence)
        position = sequence.num_computed
        slots.append(sequence.block_table[position // size] * size + position % size)
        sequence.num_computed = position + 1
        if step:
            sequence.last_step = step
    return StepPlan(size, (), gained, slots=slots)


def _begin_blocks(
    ledger: Ledger,
    seq_ids: Iterable[SequenceId],
    sequences: Collection[Sequence],
    starting: Collection[Sequence],
) -> dict[SequenceId, tuple[int, ...]]:
    """Give each sequence that is full a block more, or refuse them all."""
    ledger.tick()
    if len(starting) > ledger.num_available:
        beside = max(ledger.num_beside_pins(s, len(s.block_table) + 1) for s in starting)
        ledger.serve(ledger.judge(len(starting), beside))
    for sequence, block in zip(starting, ledger.take(len(starting)), strict=True):
        sequence.block_table.append(block)
    full = set(starting)
    return {
        seq_id: (sequence.block_table[-1],)
        for seq_id, sequence in zip(seq_ids, sequences, strict=True)
        if sequence in full
    }
