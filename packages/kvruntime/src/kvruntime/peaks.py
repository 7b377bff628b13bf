"""The fullest moments of an engine's memory.

Knows blocks, their slots and what was scheduled on them. Does not know why.
"""

from collections.abc import Collection
from itertools import islice

from kvblocks import BlockManager
from kvruntime.request import Sequence
from kvruntime.steps import SchedulerOutput

__all__ = ["Peaks"]


class Peaks:
    """The most samples and blocks at once, and the slots wasted when most blocks were held."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.num_blocks = 0
        self.tail_waste_slots = 0

    def note(
        self, output: SchedulerOutput, running: Collection[Sequence], manager: BlockManager
    ) -> None:
        """Look at a step that has its blocks. O(1), and O(blocks that run) at a new peak."""
        self.num_samples = max(self.num_samples, len(running))
        held = manager.stats().num_held_blocks
        if held > self.num_blocks:
            self.num_blocks = held
            self.tail_waste_slots = _num_tail_waste_slots(output, running, manager)


def _num_tail_waste_slots(
    output: SchedulerOutput, running: Collection[Sequence], manager: BlockManager
) -> int:
    """Slots of last blocks that no known token will fill, for none of the block's holders."""
    block_size = manager.block_size
    # Those that decode together have their last blocks to themselves.
    decoding = {item.sequence for item in islice(output.scheduled, output.num_decoding)}
    num_alone = sum([-len(sequence.token_ids) % block_size for sequence in decoding])
    wasted: dict[int, int] = {}
    for sequence in running:
        if sequence in decoding:
            continue
        table = manager.block_table(sequence.seq_id)
        unfilled = max(0, len(table) * block_size - len(sequence.token_ids))
        wasted[table[-1]] = min(unfilled, wasted.get(table[-1], block_size))
    return num_alone + sum(wasted.values())
