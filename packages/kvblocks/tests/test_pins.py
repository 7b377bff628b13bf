"""Pins: prefixes that stay, whatever else is cached, up to a share of the pool."""

import pytest

from kvblocks import BlockManager, InvalidConfig, InvalidPin, OutOfBlocks, PinLimit, When

from .helpers import filled, refused


@pytest.fixture
def manager() -> BlockManager:
    """8 blocks, of which 4 may be pinned; 2 full ones of 0..7 are cached."""
    manager = BlockManager(8, 4)
    filled(manager, "A", 10)
    manager.free("A")
    return manager


def test_a_pinned_prefix_is_not_evicted(manager: BlockManager) -> None:
    match = manager.pin("system", range(8))
    assert (match.num_tokens, match.block_ids) == (8, (0, 1))
    for number in range(20):
        filled(manager, "B", 6 * 4, first_token=100 * (1 + number))
        manager.free("B")
        manager.check()
    assert manager.match(range(9)).block_ids == (0, 1)


def test_what_is_unpinned_is_cached_and_may_be_evicted(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    manager.unpin("system")
    manager.check()
    stats = manager.stats()
    assert (stats.num_pinned_blocks, stats.num_cached_blocks) == (0, 2)
    manager.allocate("B", range(100, 132))
    assert manager.match(range(9)).num_tokens == 0


def test_pinned_blocks_are_counted_once_and_as_held(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    manager.pin("twice", range(8))
    manager.pin("half", range(4))
    stats = manager.stats()
    assert (stats.num_pinned_blocks, stats.num_held_blocks, stats.num_free_blocks) == (2, 2, 6)
    assert manager.ref_count(0) == 0
    manager.unpin("twice")
    manager.unpin("system")
    manager.check()
    assert manager.stats().num_pinned_blocks == 1


def test_a_pin_and_a_sequence_hold_the_same_blocks(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    assert manager.allocate("B", range(10)).num_cached_tokens == 8
    manager.append({"B": 2})
    manager.unpin("system")
    manager.check()
    assert manager.stats().num_held_blocks == 3
    manager.free("B")
    assert manager.stats().num_cached_blocks == 2


def test_the_tail_behind_a_full_block_is_not_pinned(manager: BlockManager) -> None:
    assert manager.pin("system", range(6)).num_tokens == 4
    manager.allocate("B", range(100, 128))
    assert manager.match(range(9)).num_tokens == 4


def test_content_behind_a_pin_is_evicted_as_ever(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    filled(manager, "B", 12)
    manager.free("B")
    manager.allocate("C", range(100, 124))
    assert manager.match(range(13)).num_tokens == 8
    manager.check()


@pytest.mark.parametrize(
    ("limit", "num_blocks"), [(0, 0), (1, 1), (3, 3), (8, 8), (0.0, 0), (0.3, 2), (1.0, 8)]
)
def test_no_more_is_pinned_than_the_limit(limit: float, num_blocks: int) -> None:
    manager = BlockManager(8, 4, pin_limit=limit)
    filled(manager, "A", 8 * 4)
    for number in range(num_blocks):
        manager.pin(number, range(4 + 4 * number))
    assert manager.stats().num_pinned_blocks == num_blocks
    if num_blocks < 8:
        message = f"at most {num_blocks} blocks, got {num_blocks + 1} with 'more'"
        with refused(manager, PinLimit, message) as caught:
            manager.pin("more", range(4 + 4 * num_blocks))
        assert isinstance(caught.value, MemoryError)


def test_a_limit_counts_what_pins_share_once(manager: BlockManager) -> None:
    filled(manager, "B", [*range(4), 20, 21, 22, 23])
    filled(manager, "C", [*range(4), 30, 31, 32, 33])
    manager.pin("A", range(8))
    manager.pin("B", [*range(4), 20, 21, 22, 23])
    manager.pin("C", [*range(4), 30, 31, 32, 33])
    assert manager.stats().num_pinned_blocks == 4
    manager.check()


@pytest.mark.parametrize("limit", [-1, 9, -0.1, 1.1, float("nan"), "half", None])
def test_a_limit_is_a_number_of_blocks_or_a_fraction(limit: float) -> None:
    with pytest.raises(InvalidConfig) as caught:
        BlockManager(8, pin_limit=limit)
    assert str(caught.value) == (
        f"pin_limit must be a number of blocks up to 8 or a fraction from 0.0 to 1.0, got {limit!r}"
    )


@pytest.mark.parametrize(
    ("tokens", "numbers"),
    [
        (range(12), "got 3, of which 2 are cached"),
        (range(3), "got 0, of which 0 are cached"),
        (range(50, 54), "got 1, of which 0 are cached"),
    ],
)
def test_all_full_blocks_of_a_pin_must_be_cached(
    manager: BlockManager, tokens: range, numbers: str
) -> None:
    with refused(manager, InvalidPin, numbers):
        manager.pin("system", tokens)


def test_a_pin_is_of_its_salt(manager: BlockManager) -> None:
    with refused(manager, InvalidPin, "of which 0 are cached"):
        manager.pin("system", range(8), salt="")


def test_a_name_pins_one_prefix(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    with refused(manager, InvalidPin, "a pin 'system' exists already; unpin it first"):
        manager.pin("system", range(4))


def test_a_name_that_pins_nothing_is_refused(manager: BlockManager) -> None:
    with refused(manager, InvalidPin, "no pin 'system'"):
        manager.unpin("system")


def test_what_has_no_room_beside_pins_is_never_served(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    assert manager.can_allocate(range(100, 124)).is_now
    assert manager.can_allocate(range(100, 125)).when is When.NEVER
    assert manager.can_allocate(range(32)).is_now  # which has the pinned blocks itself
    assert manager.can_allocate(range(33)).when is When.NEVER
    assert manager.can_allocate([*range(4), *range(100, 124)]).is_now  # and the first of them
    assert manager.can_allocate([*range(4), *range(100, 125)]).when is When.NEVER
    filled(manager, "B", 24, first_token=100)
    with refused(manager, OutOfBlocks) as caught:
        manager.append({"B": 1})
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict.when is When.NEVER
    assert manager.can_append({"B": 2}).when is When.NEVER
    assert manager.decode_batch(["B"]).can_append().when is When.NEVER
    manager.unpin("system")
    assert manager.can_append({"B": 2}).is_now


def test_who_has_the_pinned_blocks_waits_for_others(manager: BlockManager) -> None:
    manager.pin("system", range(8))
    filled(manager, "B", 12)
    filled(manager, "C", 20, first_token=100)
    assert manager.can_append({"B": 1}).when is When.LATER
    assert manager.decode_batch(["B"]).can_append().when is When.LATER


def test_a_reset_unpins_what_it_forgets() -> None:
    manager = BlockManager(16, 4)
    for name, salt in (("A", None), ("B", "x")):
        filled(manager, name, 8, salt=salt)
        manager.free(name)
        manager.pin(name, range(8), salt=salt)
    assert manager.reset_prefix_cache(salt="x").num_free_blocks == 2
    manager.check()
    assert manager.stats().num_pinned_blocks == 2
    with refused(manager, InvalidPin, "no pin 'B'"):
        manager.unpin("B")
    assert manager.reset_prefix_cache().num_free_blocks == 2
    assert manager.stats().num_free_blocks == 16
    manager.check()


def test_a_pin_of_fenced_blocks_gives_them_back_to_their_step(manager: BlockManager) -> None:
    step = manager.begin_step()
    manager.allocate("B", range(10))
    manager.append({"B": 2})
    manager.free("B")
    manager.pin("system", range(8))
    manager.check()
    manager.unpin("system")
    manager.check()
    assert manager.stats().num_fenced_blocks == 3
    manager.complete_step(step)
    assert manager.stats().num_cached_blocks == 2


def test_a_pin_does_not_raise_a_priority() -> None:
    manager = BlockManager(2, 4, policy="priority")
    for number in range(2):
        filled(manager, "A", 4, first_token=100 * number)
        manager.free("A")
    for first_token in (0, 100):
        manager.pin("any", range(first_token, first_token + 4))
        manager.unpin("any")
    filled(manager, "A", 4, first_token=200)
    manager.free("A")
    manager.allocate("B", [1])
    assert manager.match(range(100, 105)).num_tokens == 0  # it was older than what came last
    assert manager.match(range(200, 205)).num_tokens == 4


def test_a_pin_is_no_hit() -> None:
    manager = BlockManager(2, 4, policy="lfu")
    for number in range(2):
        filled(manager, "A", 4, first_token=100 * number)
        manager.free("A")
    manager.pin("first", range(4))
    manager.unpin("first")
    manager.allocate("B", [1])
    assert manager.match(range(5)).num_tokens == 4  # neither was found; the other is older now


def test_the_peak_counts_pins() -> None:
    lone = BlockManager(8, 4)
    filled(lone, "A", 8)
    filled(lone, "B", 8, first_token=100)
    for name in "AB":
        lone.free(name)
    filled(lone, "C", 12, first_token=200)
    lone.pin("A", range(8))
    lone.pin("B", range(100, 108))
    assert lone.stats().peak_held_blocks == 7


def test_the_digest_knows_what_is_pinned_under_which_name() -> None:
    digests = set()
    for name in ("one", "other"):
        manager = BlockManager(8, 4)
        filled(manager, "A", 8)
        manager.pin(name, range(8))
        digests.add(manager.state_digest())
    assert len(digests) == 2


def test_without_a_prefix_cache_nothing_can_be_pinned() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    filled(manager, "A", 8)
    with refused(manager, InvalidPin, "of which 0 are cached"):
        manager.pin("system", range(8))
