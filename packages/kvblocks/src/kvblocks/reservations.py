"""Reservations: blocks for positions that are not scheduled yet, of several sequences, all or nothing.

          0      computed            reserved
          |---------|-------------------|
                     nobody else's blocks, whatever is truncated

Who holds all blocks that it may come to need always finishes, and gives them back for the others. An
engine that reserves before it admits never has two sequences that wait for each other's blocks.

Knows how reservations are read, judged and carried out on a ledger. Does not know who is admitted.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvblocks.errors import InvalidConfig, InvalidLength
from kvblocks.ledger import Ledger
from kvblocks.results import BlockCopy, Reservation, SequenceId, Verdict
from kvblocks.sequence import Sequence, Write, require_mapping


class Reserving(NamedTuple):
    """A checked wish of one sequence; no `write` where it has the blocks."""

    sequence: Sequence
    num_blocks: int
    write: Write | None


def plan_reservation(ledger: Ledger, lengths: Mapping[Any, int]) -> list[Reserving]:
    """Check a reservation and find the blocks that it needs, without changing anything."""
    if ledger.windows.sizes:
        raise InvalidConfig(f"reserve needs no windows, got {ledger.windows.sizes}")
    require_mapping(lengths)
    entries = {seq_id: operator.index(length) for seq_id, length in lengths.items()}
    wishes: list[Reserving] = []
    given_up: Counter[int] = Counter()
    for seq_id, num_tokens in entries.items():
        sequence = ledger.get(seq_id)
        if num_tokens < 0:
            raise InvalidLength(
                f"sequence {seq_id!r} must reserve 0 or more positions, got {num_tokens}"
            )
        write = None
        if num_tokens > sequence.num_computed:
            todo = num_tokens - sequence.num_computed
            write = sequence.plan_write(seq_id, todo, ledger.pool.shared, given_up)
            given_up.update(sequence.block_table[index] for index in write.replaced)
        wishes.append(Reserving(sequence, ledger.num_blocks_for(num_tokens), write))
    return wishes


def judge_reservation(ledger: Ledger, wishes: list[Reserving]) -> Verdict:
    """Judge the need for new blocks. Never means: not even if these sequences were the only ones."""
    writes = [wish.write for wish in wishes if wish.write]
    needed = sum(write.num_new_blocks for write in writes)
    if needed <= ledger.num_available:
        return ledger.judge(needed, 0)
    kept = {
        block
        for sequence, _, write in wishes
        for index, block in enumerate(sequence.block_table)
        if not write or index not in write.replaced
    }
    return ledger.judge(needed, needed + len(kept - ledger.pins.blocks))


def reserve(ledger: Ledger, wishes: list[Reserving]) -> Reservation:
    """Carry a reservation out, all or nothing; see `BlockManager.reserve`."""
    verdict = judge_reservation(ledger, wishes)
    ledger.serve(verdict)
    new, at = ledger.take(verdict.num_needed_blocks), 0
    copies: list[BlockCopy] = []
    gained: dict[SequenceId, tuple[int, ...]] = {}
    for sequence, num_blocks, write in wishes:
        if write and write.num_new_blocks:
            own = new[at : at + write.num_new_blocks]
            at += write.num_new_blocks
            gained[write.seq_id] = tuple(own)
            ledger.leave_batch(sequence)
            if write.replaced:
                sequence.last_step = ledger.pool.open_step or sequence.last_step
                copies += ledger.exchange(sequence, sequence.block_table, write.replaced, own)
            sequence.block_table.extend(own[len(write.replaced) :])
        sequence.num_reserved_blocks = num_blocks
        ledger.has_reservations |= num_blocks > 0
    return Reservation(tuple(copies), gained)
