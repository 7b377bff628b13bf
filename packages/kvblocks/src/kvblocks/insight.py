"""What stands in the way of more sequences: what each would yield, and who holds the pool.

Knows how to count what sequences, steps and pins hold. Changes nothing, and does not know whom to
preempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from kvblocks.ledger import Ledger
from kvblocks.results import BlockState, Freeing, Holder, Occupancy, SequenceId
from kvblocks.runs import Run, parent_of, path_of
from kvblocks.sequence import Sequence


def count_freeing(ledger: Ledger, seq_ids: Iterable[SequenceId]) -> Freeing:
    """Count what it would yield to free sequences; see `BlockManager.freeing`."""
    sequences = ledger.get_all(dict.fromkeys(seq_ids))
    yields = _count_loose(ledger, sequences) + _count_runs(ledger, sequences)
    completed = ledger.pool.completed_step
    fenced = {step: yields[step] for step in sorted(yields) if step > completed}
    return Freeing(yields.total() - sum(fenced.values()), fenced)


def list_states(ledger: Ledger) -> tuple[BlockState, ...]:
    """Tell the state of every block; see `BlockManager.block_states`."""
    states = [BlockState.CACHED] * ledger.num_blocks  # all that is neither of the others
    tables = [table[start:] for s in ledger.all_sequences().values() for table, start in s.tables]
    fenced_runs = [run.blocks for runs in ledger.runs.fenced.values() for run in runs]
    for state, parts in (
        (BlockState.FREE, [ledger.pool.free]),
        (BlockState.FENCED, [ledger.windows.fenced, *ledger.pool.fenced.values(), *fenced_runs]),
        (BlockState.HELD, [ledger.pins.blocks, *tables]),
    ):
        for block in chain.from_iterable(parts):
            states[block] = state
    return tuple(states)


def explain_occupancy(ledger: Ledger) -> Occupancy:
    """Count who holds what; see `BlockManager.why_full`."""
    sequences = ledger.all_sequences()
    pinned = ledger.pins.blocks
    held = {
        seq_id: [block for table, start in sequence.tables for block in table[start:]]
        for seq_id, sequence in sequences.items()
    }
    num_tables = Counter(block for blocks in held.values() for block in blocks)
    holders = []
    for seq_id, blocks in held.items():
        num_begun = ledger.num_blocks_for(sequences[seq_id].num_computed)
        num_unused = sum(max(0, len(table) - num_begun) for table, _ in sequences[seq_id].tables)
        num_own = sum(num_tables[block] == 1 and block not in pinned for block in blocks)
        holders.append(Holder(seq_id, len(blocks), num_own, num_unused))
    holders.sort(key=lambda holder: (-holder.num_own_blocks, -holder.num_blocks))
    return Occupancy(
        num_blocks=ledger.num_blocks,
        num_free_blocks=ledger.pool.num_free,
        num_cached_blocks=ledger.runs.num_cached,
        num_fenced_blocks=dict(sorted(ledger.fenced_blocks().items())),
        num_shared_blocks=sum(n > 1 or block in pinned for block, n in num_tables.items()),
        num_pinned_blocks=len(pinned - num_tables.keys()),
        holders=tuple(holders),
    )


def _count_loose(ledger: Ledger, sequences: Iterable[Sequence]) -> Counter[int]:
    """Of blocks outside runs that nobody else holds, how many each step still uses; 0 for none."""
    pool = ledger.pool
    num_tables: Counter[int] = Counter()
    last_step: dict[int, int] = {}
    for sequence in sequences:
        tables = (sequence.loose_blocks, *(table.held for table in sequence.windows))
        for block in (block for table in tables for block in table):
            num_tables[block] += 1
            last_step[block] = max(last_step.get(block, 0), sequence.last_step)
    return Counter(
        _open(ledger, max(last_step[block], pool.touched.get(block, 0)))
        for block, count in num_tables.items()
        if count == pool.shared.get(block, 1)
    )


def _count_runs(ledger: Ledger, sequences: Iterable[Sequence]) -> Counter[int]:
    """The same of blocks in runs."""
    touched = ledger.pool.touched
    num_left: dict[Run, int] = {}
    last_step: dict[Run, int] = {}
    freed: list[Run] = []
    for sequence in sequences:
        for run in path_of(sequence.run):
            last_step[run] = max(last_step.get(run, run.last_step), sequence.last_step)
        run = sequence.run
        num_left[run] = num_left.get(run, run.holders) - 1
        while not num_left[run]:
            freed.append(run)
            run = parent_of(run)
            num_left[run] = num_left.get(run, run.holders) - 1
    return Counter(
        _open(ledger, max(last_step[run], 0 if run.is_kept else touched.get(block, 0)))
        for run in freed
        for block in run.blocks
    )


def _open(ledger: Ledger, step: int) -> int:
    """A step, or 0 if it is completed."""
    return step if step > ledger.pool.completed_step else 0
