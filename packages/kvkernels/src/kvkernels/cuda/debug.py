"""Checks of what only the data tells, for debugging: the call waits for the GPU and copies it to the host.

It knows how to bring lengths, tables and slots there; the rules are those of the CPU.
"""

from typing import Any

from kvkernels.arguments import AttentionCall
from kvkernels.cuda import launch


def check_batch(
    call: AttentionCall, num_rows: int, pool: tuple[int, ...], window_left: int
) -> None:
    """Check lengths, offsets and every table entry that the rows of a call would read."""
    from kvkernels.cpu import values  # noqa: PLC0415  # importing Numba is slow
    from kvkernels.inputs import view_batch  # noqa: PLC0415  # likewise, with what it imports

    offsets = None if call.cu_seqlens_q is None else launch.to_host(call.cu_seqlens_q)
    tables, lengths = launch.to_host(call.block_table), launch.to_host(call.seq_lens)
    batch = view_batch(tables, lengths, offsets, num_rows)
    values.check_batch(batch, num_rows, pool[0], pool[2], window_left)


def check_slots(slot_mapping: Any, pool: tuple[int, ...]) -> None:
    """Check that slots are -1 or in the pool, and that none comes twice."""
    from kvkernels.cpu import values  # noqa: PLC0415  # importing Numba is slow

    slots = launch.to_host(slot_mapping)
    values.check_slots(slots, pool[0] * pool[2])
    values.check_slots_once(slots)
