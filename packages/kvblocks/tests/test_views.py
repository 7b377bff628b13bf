"""Block tables and slots written into a caller's buffer."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from kvblocks import BlockManager, InvalidBuffer, InvalidSwap, UnknownGroup, UnknownSequence

from .helpers import filled, refused


@pytest.fixture
def manager() -> BlockManager:
    """A with 3 blocks, B with 1."""
    manager = BlockManager(8, 4, num_host_blocks=4)
    filled(manager, "A", 9)
    filled(manager, "B", 2, first_token=50)
    return manager


def int32(num_rows: int, num_columns: int) -> memoryview:
    """Rows of 7, which nobody writes."""
    flat = memoryview(array("i", (7,)) * (num_rows * num_columns)).cast("B")
    return flat.cast("i", (num_rows, num_columns))


def rows(out: memoryview) -> list[list[int]]:
    return out.tolist()  # type: ignore[return-value]  # it has two dimensions


def contents(out: object) -> object:
    return out[0][:] if isinstance(out, list) else bytes(memoryview(out))  # type: ignore[arg-type]  # it is a buffer


def int64(num_slots: int) -> array[int]:
    return array("q", (7,)) * num_slots


def test_tables_stand_in_the_order_asked_for_and_all_else_is_padding(manager: BlockManager) -> None:
    out = int32(3, 4)
    manager.write_block_tables(out, iter("BA"))
    assert rows(out) == [[3, -1, -1, -1], [0, 1, 2, -1], [-1, -1, -1, -1]]


def test_a_buffer_may_be_as_large_as_what_is_written(manager: BlockManager) -> None:
    out = int32(1, 3)
    manager.write_block_tables(out, "A")
    assert rows(out) == [[0, 1, 2]]


def test_a_row_may_be_written_twice(manager: BlockManager) -> None:
    out = int32(2, 3)
    manager.write_block_tables(out, "AA")
    assert rows(out) == [[0, 1, 2], [0, 1, 2]]


def test_nobody_is_padding_only(manager: BlockManager) -> None:
    out = int32(1, 2)
    manager.write_block_tables(out, [])
    assert rows(out) == [[-1, -1]]


def test_the_table_of_a_window_begins_with_padding() -> None:
    manager = BlockManager(8, 4, windows=[3])
    filled(manager, "A", 10)
    out = int32(1, 4)
    manager.write_block_tables(out, "A", group=1)
    assert rows(out) == [[*manager.block_table("A", 1).tolist(), -1]]
    assert rows(out)[0][0] == -1
    plan = manager.append({"A": [1]})
    slots = int64(1)
    manager.write_slot_mapping(slots, plan, group=1)
    assert slots == plan.slot_mappings[1]


def test_slots_stand_before_padding(manager: BlockManager) -> None:
    plan = manager.append({"A": [1], "B": [2, 3]})
    out = int64(5)
    manager.write_slot_mapping(out, plan)
    assert out.tolist() == [9, 14, 15, -1, -1]


def test_the_slots_of_a_batch_are_written_too(manager: BlockManager) -> None:
    out = int64(2)
    manager.write_slot_mapping(out, manager.decode_batch("AB").append())
    assert out.tolist() == [9, 14]


def test_a_step_of_nobody_is_padding_only(manager: BlockManager) -> None:
    out = int64(2)
    manager.write_slot_mapping(out, manager.append({}))
    assert out.tolist() == [-1, -1]
    manager.write_slot_mapping(array("q"), manager.append({}))


def test_a_buffer_that_is_gone_is_refused(manager: BlockManager) -> None:
    released = memoryview(bytearray(24)).cast("i", (2, 3))
    released.release()
    with refused(manager, InvalidBuffer, "got memoryview: operation forbidden on released"):
        manager.write_block_tables(released, "AB")


def test_a_buffer_is_the_callers_again_afterwards(manager: BlockManager) -> None:
    out = int64(1)
    manager.write_slot_mapping(out, manager.append({"A": [1]}))
    out.append(0)  # BufferError while anybody views it


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([[0] * 4], "out must offer the buffer protocol, as NumPy arrays do, got list"),
        (memoryview(bytearray(24)).cast("f", (2, 3)), "must be int32, got the format 'f' of 4"),
        (memoryview(bytearray(24)).cast("I", (2, 3)), "must be int32, got the format 'I' of 4"),
        (memoryview(bytearray(48)).cast("q", (2, 3)), "must be int32, got the format 'q' of 8"),
        (((ctypes.c_int32 * 3) * 2)(), "must be int32, got the format '<i' of 4"),
        (memoryview(bytes(24)).cast("i", (2, 3)), "must be writable"),
        (array("i", (7,)) * 6, r"must have 2 dimensions, got 1 of the shape \(6,\)"),
        (int32(1, 4), r"must have room for 2 rows of up to 3 blocks, got the shape \(1, 4\)"),
        (int32(4, 2), r"must have room for 2 rows of up to 3 blocks, got the shape \(4, 2\)"),
    ],
)
def test_tables_need_a_buffer_that_fits(manager: BlockManager, out: object, message: str) -> None:
    before = contents(out)
    with refused(manager, InvalidBuffer, message):
        manager.write_block_tables(out, "AB")
    assert contents(out) == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (array("i", (7,)) * 4, "out must be int64, got the format 'i' of 4 bytes"),
        (int64(1), "out must have room for 2 slots, got 1"),
        (memoryview(int64(8))[::2], r"must be contiguous, got the strides \(16,\) for the shape"),
    ],
)
def test_slots_need_a_buffer_that_fits(manager: BlockManager, out: object, message: str) -> None:
    plan = manager.append({"A": [1, 2]})
    with refused(manager, InvalidBuffer, message):
        manager.write_slot_mapping(out, plan)
    assert set(memoryview(out).tolist()) == {7}  # type: ignore[arg-type]  # it is a buffer


def test_who_has_no_table_writes_nothing(manager: BlockManager) -> None:
    manager.swap_out("B")
    out = int32(2, 3)
    for seq_ids, error in (("AX", UnknownSequence), ("AB", InvalidSwap)):
        with refused(manager, error):
            manager.write_block_tables(out, seq_ids)
    with refused(manager, UnknownGroup):
        manager.write_block_tables(out, "A", group=1)
    plan = manager.append({"A": [1]})
    with refused(manager, UnknownGroup, "groups are 0..0, got 1"):
        manager.write_slot_mapping(int64(1), plan, group=1)
    assert rows(out) == [[7] * 3] * 2
