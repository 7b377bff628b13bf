"""What kvblocks writes is what NumPy and torch hold: the same memory, without a copy in between."""

import numpy as np
import pytest
import torch

from kvblocks import BlockManager, InvalidBuffer


@pytest.fixture
def manager() -> BlockManager:
    """A with 3 blocks, B with 1."""
    manager = BlockManager(8, 4, prefix_caching=False)
    for name, num_tokens in (("A", 9), ("B", 2)):
        manager.allocate(name, num_tokens)
        manager.append({name: num_tokens})
        manager.commit(name, num_tokens)
    return manager


def test_tables_are_written_into_an_array(manager: BlockManager) -> None:
    out = np.zeros((3, 4), np.int32)
    manager.write_block_tables(out, "AB")
    assert out.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [-1, -1, -1, -1]]


def test_tables_are_written_into_a_tensor(manager: BlockManager) -> None:
    out = torch.zeros(2, 3, dtype=torch.int32)
    manager.write_block_tables(out.numpy(), "AB")
    assert out.tolist() == [[0, 1, 2], [3, -1, -1]]


def test_tables_are_written_into_the_first_rows_of_a_larger_array(manager: BlockManager) -> None:
    out = np.zeros((3, 3), np.int32)
    manager.write_block_tables(out[:2], "AB")
    assert out.tolist() == [[0, 1, 2], [3, -1, -1], [0, 0, 0]]


def test_slots_are_written_into_arrays_and_tensors(manager: BlockManager) -> None:
    plan = manager.append({"A": 1, "B": 2})
    out = np.zeros(4, np.int64)
    manager.write_slot_mapping(out, plan)
    assert out.tolist() == [9, 14, 15, -1]
    tensor = torch.zeros(3, dtype=torch.int64)
    manager.write_slot_mapping(tensor.numpy(), plan)
    assert tensor.tolist() == [9, 14, 15]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_array_has_room_for_nobody(manager: BlockManager, shape: tuple[int, int]) -> None:
    out = np.zeros(shape, np.int32)
    manager.write_block_tables(out, "")
    with pytest.raises(InvalidBuffer, match="must have room for 1 rows of up to 3 blocks"):
        manager.write_block_tables(out, "A")


def test_an_array_that_does_not_fit_is_not_written(manager: BlockManager) -> None:
    read_only = np.zeros((2, 3), np.int32)
    read_only.flags.writeable = False
    for out, message in (
        (np.zeros((2, 3), np.int64), "must be int32, got the format 'l' of 8 bytes"),
        (np.zeros((2, 3), np.uint32), "must be int32, got the format 'I' of 4 bytes"),
        (np.zeros((2, 3), ">i4"), "must be int32, got the format '>i' of 4 bytes"),
        (np.zeros((2, 6), np.int32)[:, ::2], "must be contiguous"),
        (np.zeros((3, 2), np.int32).T, "must be contiguous"),
        (read_only, "must be writable"),
        (torch.zeros(2, 3, dtype=torch.int32), "must offer the buffer protocol"),
    ):
        with pytest.raises(InvalidBuffer, match=message):
            manager.write_block_tables(out, "AB")
        assert not out.any()
