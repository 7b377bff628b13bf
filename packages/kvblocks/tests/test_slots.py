"""Every slot that is handed out is watched: nothing that may be shared is ever written again."""

from collections import Counter

import pytest

from kvblocks import BlockManager

from .driver import Driver


def committed_slots(manager: BlockManager) -> set[int]:
    """Every slot that holds a position declared as written."""
    size = manager.block_size
    return {
        sequence.block_table[position // size] * size + position % size
        for sequence in manager._ledger.all_sequences().values()
        for position in range(sequence.num_committed)
    }


def protected_blocks(manager: BlockManager) -> set[int]:
    """Blocks that can be found by their content, or are in several tables."""
    indexed = {block for run in manager._ledger.runs for block in run.blocks}
    sequences = manager._ledger.sequences.values()
    tables = Counter(block for sequence in sequences for block in sequence.block_table)
    return indexed | {block for block, num_tables in tables.items() if num_tables > 1}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(8, 1), (12, 2), (16, 4), (40, 3)])
def test_no_slot_of_an_indexed_or_shared_block_is_handed_out(
    num_blocks: int, block_size: int, *, caching: bool
) -> None:
    manager = BlockManager(num_blocks, block_size, prefix_caching=caching)
    driver = Driver(num_blocks, manager)
    num_slots = num_copies = 0
    for _ in range(15_000):
        committed = committed_slots(manager)
        driver.operate()
        for plan in driver.plans:
            slots = plan.slot_mapping.tolist()
            written = {slot // block_size for slot in slots}
            written |= {copy.destination for copy in plan.copies}
            assert len(set(slots)) == len(slots), "one step writes a slot twice"
            assert written.isdisjoint(protected_blocks(manager))
            assert committed_slots(manager).isdisjoint(slots)
            in_place = written - {b for blocks in plan.new_blocks.values() for b in blocks}
            assert committed.isdisjoint(s for s in slots if s // block_size in in_place)
            num_slots += len(slots)
            num_copies += len(plan.copies)
    assert num_slots > 2000, "the run has watched too little"
    assert num_copies > 20 or block_size == 1
