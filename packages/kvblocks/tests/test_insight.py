"""What freeing would yield, and who holds the pool."""

from collections import Counter

from kvblocks import BlockManager, BlockState, Holder, InvalidSwap, UnknownSequence

from .helpers import filled, refused


def test_what_is_freed_yields_what_was_said() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "A", 9)
    filled(manager, "B", [*range(8), 99])
    step = manager.begin_step()
    manager.append({"B": [1]})
    said = manager.freeing("AB")
    assert said == (1, {step: 3})
    before = manager.stats()
    manager.free("A")
    manager.free("B")
    after = manager.stats()
    available = after.num_free_blocks + after.num_cached_blocks
    assert available - before.num_free_blocks == 1
    assert after.num_fenced_blocks == 3


def test_shared_blocks_yield_nothing_until_all_who_hold_them_are_named() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "A", 10)
    manager.fork("A", "B")
    assert manager.freeing("A").num_blocks == 0
    assert manager.freeing("AB").num_blocks == 3
    assert manager.freeing("AAB").num_blocks == 3


def test_pinned_blocks_yield_nothing() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "A", 9)
    manager.pin("system", range(4))
    assert manager.freeing("A").num_blocks == 2
    assert manager.why_full().num_shared_blocks == 1


def test_who_left_a_block_in_flight_is_waited_for() -> None:
    manager = BlockManager(16, 4, prefix_caching=False)
    filled(manager, "A", 3)
    manager.fork("A", "B")
    step = manager.begin_step()
    manager.append({"A": 1})  # copies the shared tail, which B holds alone now
    assert manager.freeing("B") == (0, {step: 1})


def test_window_blocks_count() -> None:
    manager = BlockManager(16, 4, windows=[4])
    filled(manager, "A", 10)
    num_held = manager.stats().num_held_blocks
    assert manager.freeing("A").num_blocks == num_held
    (holder,) = manager.why_full().holders
    assert holder.num_blocks == holder.num_own_blocks == num_held
    manager.fork("A", "B")
    assert manager.freeing("A").num_blocks == 0
    assert manager.freeing("AB").num_blocks == num_held
    assert manager.why_full().num_shared_blocks == num_held


def test_pinned_companions_are_pinned_blocks() -> None:
    manager = BlockManager(16, 4, windows=[4])
    filled(manager, "A", 9)
    manager.pin("system", range(8))
    manager.free("A")
    occupancy = manager.why_full()
    assert occupancy.num_pinned_blocks == manager.stats().num_pinned_blocks == 3


def test_freeing_reads_as_a_sentence() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "A", 9)
    assert str(manager.freeing("A")) == "3 blocks now"
    manager.begin_step()
    manager.append({"A": [1]})
    assert str(manager.freeing("A")) == "0 blocks now, 3 after step 1"


def test_why_full_names_who_holds_most_first() -> None:
    manager = BlockManager(16, 4)
    filled(manager, "A", 9)
    filled(manager, "B", [*range(4), *range(50, 62)])
    manager.reserve({"A": 20})
    assert manager.why_full().holders == (Holder("A", 5, 4, 2), Holder("B", 4, 3, 0))
    manager.begin_step()
    manager.append({"B": [7]})
    manager.free("B")
    assert str(manager.why_full()).splitlines() == [
        "7 of 16 blocks can be had: 7 free, 0 cached; fenced: 4 after step 1",
        "shared: 0; pinned, and in no table: 0",
        "sequence 'A': 5 blocks, 5 its own, 2 not begun",
    ]


def test_who_is_not_in_the_pool_yields_an_error() -> None:
    manager = BlockManager(16, 4, num_host_blocks=4)
    filled(manager, "A", 9)
    manager.swap_out("A")
    with refused(manager, InvalidSwap):
        manager.freeing("A")
    with refused(manager, UnknownSequence):
        manager.freeing("X")
    assert manager.why_full().holders == ()


def test_every_block_is_in_one_state() -> None:
    manager = BlockManager(8, 2)
    manager.allocate("a", [1, 2, 3, 4, 5])
    manager.append({"a": 5})
    manager.commit("a", 4)
    manager.pin("system", [1, 2])
    manager.free("a")
    manager.begin_step()
    manager.allocate("b", [9, 9, 9])
    manager.append({"b": 3})
    manager.free("b")
    counted = Counter(manager.block_states())
    assert counted == {
        BlockState.HELD: 1,  # it is pinned
        BlockState.CACHED: 1,
        BlockState.FENCED: 2,
        BlockState.FREE: 4,
    }
