"""Partial reuse: of a cached block that goes on as the prompt does, the part in common is copied."""

import pytest

from kvblocks import BlockCopy, BlockManager, InvalidConfig, InvalidLength, Media, OutOfBlocks

from .helpers import filled, refused


def a_manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, block_size=4, partial_reuse=True)


def test_the_part_in_common_is_copied_into_a_block_of_ones_own() -> None:
    manager = a_manager()
    filled(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    match = manager.match([1, 2, 3, 4, 5, 6, 9, 9])
    assert (match.num_tokens, match.num_partial_tokens, match.block_ids) == (4, 2, (0,))
    answer = manager.allocate("b", [1, 2, 3, 4, 5, 6, 9, 9])
    assert answer.num_cached_tokens == 6
    assert answer.block_ids == (0, 2)
    assert answer.copies == (BlockCopy(source=1, destination=2, num_tokens=2),)
    assert manager.num_computed_tokens("b") == 6
    assert manager.append({"b": 2}).slot_mapping.tolist() == [10, 11]
    manager.commit("b", 8)
    assert manager.match([1, 2, 3, 4, 5, 6, 9, 9, 0]).block_ids == (0, 2)
    assert manager.stats().num_copies == 1
    assert manager.stats().num_cached_tokens == 6


def test_it_is_off_unless_asked_for() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    filled(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.match([1, 2, 3, 4, 5, 6, 9, 9]).num_partial_tokens == 0
    assert manager.allocate("b", [1, 2, 3, 4, 5, 6, 9, 9]).copies == ()


def test_one_token_is_left_to_compute() -> None:
    manager = a_manager()
    filled(manager, "a", [1, 2, 3, 4])
    answer = manager.allocate("b", [1, 2, 3, 4])
    assert answer.num_cached_tokens == 3
    assert manager.allocate("c", [1]).num_cached_tokens == 0


def test_the_longest_of_several_is_taken() -> None:
    manager = a_manager()
    for name, tokens in {"a": [1, 9, 9, 9], "b": [1, 2, 3, 9], "c": [1, 2, 9, 9]}.items():
        filled(manager, name, tokens)
    answer = manager.allocate("d", [1, 2, 3, 4, 5])
    assert answer.copies == (BlockCopy(1, 3, 3),)


def test_what_stands_in_the_midst_of_a_stretch_is_found() -> None:
    manager = a_manager()
    filled(manager, "a", range(12))
    answer = manager.allocate("b", [0, 1, 2, 3, 4, 5, 99])
    assert answer.num_cached_tokens == 6
    assert answer.copies == (BlockCopy(1, 3, 2),)
    manager.check()


def test_nothing_is_copied_across_salts_or_media() -> None:
    manager = a_manager(16)
    filled(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8], salt="x")
    assert manager.match([1, 2, 3, 9, 9]).num_partial_tokens == 0
    assert manager.match([1, 2, 3, 9, 9], salt="x").num_partial_tokens == 3
    media = [Media(6, b"cat")]
    manager.allocate("b", [1, 2, 3, 4, 5, 6, 7, 8], media=media)
    manager.append({"b": 8})
    manager.commit("b", 8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 9, 9]
    assert manager.match(prompt, media=media).num_partial_tokens == 3
    assert manager.match(prompt, media=[Media(6, b"dog")]).num_partial_tokens == 0
    assert manager.match(prompt, media=[Media(5, b"cat")]).num_partial_tokens == 0
    assert manager.match(prompt).num_partial_tokens == 0


def test_the_source_is_kept_until_the_step_that_copies_it_completes() -> None:
    manager = a_manager(4)
    filled(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    step = manager.begin_step()
    answer = manager.allocate("b", [1, 2, 9])
    assert answer.copies[0].source == 0
    with refused(manager, OutOfBlocks):
        manager.allocate("c", range(10, 22))
    manager.free("b")
    with refused(manager, OutOfBlocks):  # nor may anybody write what the copy still writes
        manager.allocate("c", range(10, 22))
    manager.complete_step(step)
    manager.allocate("c", range(10, 22))
    manager.check()


def test_where_only_the_source_is_left_it_is_evicted_rather_than_copied() -> None:
    manager = a_manager(1)
    filled(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    assert manager.can_allocate([1, 2, 9]).is_now
    answer = manager.allocate("b", [1, 2, 9])
    assert (answer.num_cached_tokens, answer.copies) == (0, ())
    manager.check()


def test_copied_positions_are_in_flight_until_they_are_committed() -> None:
    manager = a_manager()
    filled(manager, "a", [1, 2, 3, 4])
    manager.allocate("b", [1, 2, 9])
    assert manager.num_committed_tokens("b") == 0
    with refused(manager, InvalidLength):
        manager.fork("b", "c")
    manager.append({"b": 1})
    manager.commit("b", 3)
    manager.fork("b", "c")


def test_it_needs_a_prefix_cache() -> None:
    with pytest.raises(InvalidConfig, match="partial_reuse needs prefix_caching"):
        BlockManager(8, prefix_caching=False, partial_reuse=True)


def test_only_the_newest_of_many_siblings_are_looked_at() -> None:
    manager = BlockManager(100, block_size=2, partial_reuse=True)
    for i in range(40):
        filled(manager, i, [i, 0])
    assert manager.match([39, 1, 1]).num_partial_tokens == 1
    assert manager.match([0, 1, 1]).num_partial_tokens == 0
