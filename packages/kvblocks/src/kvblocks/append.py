"""Scheduling the next positions of a batch: who writes where, in which blocks, after which copies.

Knows how a batch is read, planned and carried out on a ledger. Does not know prompts, commits, or
what becomes of the plan.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable

from kvblocks.ledger import Ledger
from kvblocks.results import Batch, BlockCopy, SequenceId, Span, StepPlan, Verdict
from kvblocks.sequence import Write, read_entry


def append(ledger: Ledger, batch: Batch) -> StepPlan:
    """Schedule a batch, all or nothing; see `BlockManager.append`."""
    is_one_each = set(map(type, batch.values())) == {int} and set(batch.values()) == {1}
    if is_one_each and not ledger.pool.shared:
        return _append_one_each(ledger, batch)
    writes = plan_writes(ledger, batch)
    needed = sum(write.num_new_blocks for write in writes)
    if needed > ledger.num_available:
        ledger.serve(judge_append(ledger, writes))

    new = ledger.take(needed)
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
                copies += ledger.exchange(sequence, write.replaced, own)
            sequence.block_table.extend(own[len(write.replaced) :])
        spans.append(sequence.schedule(write))
    return StepPlan(ledger.block_size, copies=tuple(copies), new_blocks=gained, spans=spans)


def plan_writes(ledger: Ledger, batch: Batch) -> list[Write]:
    """Check a batch and find the blocks it needs, without changing anything."""
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
    beside = (ledger.num_beside_pins(write.sequence, write.num_blocks) for write in writes)
    return ledger.judge(needed, max(beside, default=0))


def _append_one_each(ledger: Ledger, batch: Iterable[SequenceId]) -> StepPlan:
    """Append one token each where no tail is shared: the common step, in a few passes."""
    size = ledger.block_size
    sequences = {seq_id: ledger.get(seq_id) for seq_id in batch}
    starting = {
        seq_id: sequence
        for seq_id, sequence in sequences.items()
        if sequence.num_computed == len(sequence.block_table) * size
    }
    if len(starting) > ledger.num_available:
        beside = max(
            ledger.num_beside_pins(sequence, len(sequence.block_table) + 1)
            for sequence in starting.values()
        )
        ledger.serve(ledger.judge(len(starting), beside))
    gained: dict[SequenceId, tuple[int, ...]] = {}
    for seq_id, block in zip(starting, ledger.take(len(starting)), strict=True):
        starting[seq_id].block_table.append(block)
        gained[seq_id] = (block,)

    slots, step = array("q"), ledger.pool.open_step
    for sequence in sequences.values():
        if sequence.batch is not None:
            ledger.leave_batch(sequence)
        position = sequence.num_computed
        slots.append(sequence.block_table[position // size] * size + position % size)
        sequence.num_computed = position + 1
        sequence.last_step = step or sequence.last_step
    return StepPlan(size, new_blocks=gained, slots=slots)
