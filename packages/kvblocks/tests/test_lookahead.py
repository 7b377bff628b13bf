"""Lookahead: blocks beyond the prompt, for tokens that are not known yet; exchanged blocks are told."""

import pytest

from kvblocks import BlockManager, BlockMerge, InvalidBatch, InvalidLength, OutOfBlocks

from .helpers import filled, refused


def test_blocks_are_taken_beyond_the_prompt() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    answer = manager.allocate("a", [1, 2, 3], num_lookahead_tokens=2)
    assert answer.block_ids == (0, 1)
    assert manager.append({"a": 5}).new_blocks == {}


def test_they_are_part_of_the_verdict() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    assert manager.can_allocate([1, 2, 3], num_lookahead_tokens=5).is_now
    assert not manager.can_allocate([1, 2, 3], num_lookahead_tokens=6).is_now
    with refused(manager, OutOfBlocks):
        manager.allocate("a", [1, 2, 3], num_lookahead_tokens=6)


def test_a_negative_lookahead_is_refused() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    with refused(manager, InvalidLength, "num_lookahead_tokens must not be negative, got -1"):
        manager.allocate("a", [1], num_lookahead_tokens=-1)


def test_a_sequence_with_blocks_ahead_does_not_join_a_decode_batch() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", [1, 2, 3], num_lookahead_tokens=2)
    manager.append({"a": 3})
    manager.commit("a", 3)
    with pytest.raises(InvalidBatch):
        manager.decode_batch(["a"])
    manager.truncate("a", 3)  # gives them back
    assert len(manager.decode_batch(["a"])) == 1


def test_a_commit_tells_which_blocks_it_exchanged() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    for name in "ab":
        manager.allocate(name, [1, 2, 3, 4, 5])
        manager.append({name: 5})
    assert manager.commit("a", 5) == ()
    merges = manager.commit("b", 5)
    assert merges == (BlockMerge(0, 3, 0), BlockMerge(1, 4, 1))
    assert manager.block_table("b").tolist() == [0, 1, 5]


def test_a_batch_tells_which_blocks_it_exchanged() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    filled(manager, "a", [1])
    manager.fork("a", "b")
    batch = manager.decode_batch("ab")
    batch.append()
    before = manager.block_table("b")[0]
    merges = batch.commit([2, 2])
    adopted = manager.block_table("a")[0]
    assert merges == {"b": (BlockMerge(table_index=0, given_up=before, adopted=adopted),)}
