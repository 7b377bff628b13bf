"""Contiguous memory: the worked examples, and every run beside a map of units."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import BlockManager
from kvblocks.contiguous import Buddy, Contiguous, FirstFit, Fragmentation, Run, power_of_two
from kvblocks.errors import InvalidSize, InvariantViolation

KINDS = (FirstFit, Buddy)
FREE, USED = 0, 1


# ── worked examples ──────────────────────────────────────────────────────────────────────────────


def test_c1_free_units_in_two_pieces_refuse_what_one_piece_of_them_would_hold() -> None:
    memory = FirstFit(384)
    first, _, third, fourth = (taken(memory, size) for size in (128, 64, 128, 64))
    for run in (first, third, fourth):
        memory.release(run)
    found = memory.fragmentation()
    assert (found.free_runs, found.num_free, found.largest_run) == ((128, 192), 320, 192)
    assert found.is_fragmented_for(256)
    assert memory.allocate(256) is None
    memory.check()


def test_c1_in_blocks_the_same_demand_fits() -> None:
    manager = BlockManager(num_blocks=384 // 16, block_size=16, prefix_caching=False)
    for name, size in (("first", 128), ("second", 64), ("third", 128), ("fourth", 64)):
        manager.allocate(name, size)
    for name in ("first", "third", "fourth"):
        manager.free(name)
    assert manager.can_allocate(256).is_now


def test_c3_a_power_of_two_is_taken_whatever_is_asked_for() -> None:
    memory = Buddy(4096)
    assert [taken(memory, size).size for size in (200, 256, 257, 513)] == [256, 256, 512, 1024]


# ── each kind beside a map of units ──────────────────────────────────────────────────────────────


def taken(memory: Contiguous, size: int) -> Run:
    run = memory.allocate(size)
    assert run is not None
    return run


def first_free(units: list[int], size: int, multiple: int) -> int | None:
    """The lowest multiple at which so many units are free."""
    places = range(0, len(units) - size + 1, multiple)
    return next((place for place in places if not any(units[place : place + size])), None)


def runs_of_free(units: list[int]) -> list[int]:
    joined = "".join("." if unit == FREE else "#" for unit in units)
    return [len(run) for run in joined.split("#") if run]


programs = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60)


@settings(deadline=None)
@given(num_units=st.integers(1, 100), program=programs)
def test_first_fit_takes_the_lowest_free_run_that_is_long_enough(
    num_units: int, program: list[tuple[bool, int]]
) -> None:
    memory, units, out = FirstFit(num_units), [FREE] * num_units, list[Run]()
    for is_release, number in program:
        if is_release and out:
            run = out.pop(number % len(out))
            memory.release(run)
            units[run.address : run.address + run.size] = [FREE] * run.size
        else:
            place = first_free(units, number, 1)
            found = memory.allocate(number)
            assert found == (None if place is None else Run(place, number))
            if found is not None:
                out.append(found)
                units[found.address : found.address + number] = [USED] * number
        memory.check()
        assert list(memory.fragmentation().free_runs) == runs_of_free(units)
        assert memory.num_free == units.count(FREE)


@settings(deadline=None)
@given(num_units=st.integers(1, 100), program=programs)
def test_a_buddy_allocator_refuses_only_where_no_aligned_power_of_two_is_free(
    num_units: int, program: list[tuple[bool, int]]
) -> None:
    memory, units, out = Buddy(num_units), [FREE] * num_units, list[Run]()
    for is_release, number in program:
        if is_release and out:
            run = out.pop(number % len(out))
            memory.release(run)
            units[run.address : run.address + run.size] = [FREE] * run.size
        else:
            size = power_of_two(number)
            found = memory.allocate(number)
            assert (found is None) == (first_free(units, size, size) is None)
            if found is not None:
                assert found.size == size == memory.size_for(number)
                assert found.address % size == 0
                assert units[found.address : found.address + size] == [FREE] * size
                out.append(found)
                units[found.address : found.address + size] = [USED] * size
        memory.check()
        assert memory.num_free == memory.fragmentation().num_free == units.count(FREE)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(num_units=st.integers(1, 300), sizes=st.lists(st.integers(1, 60), max_size=20))
def test_when_all_is_released_memory_is_as_it_was(
    kind: Callable[[int], Contiguous], num_units: int, sizes: list[int]
) -> None:
    memory = kind(num_units)
    before = memory.fragmentation()
    for run in [memory.allocate(size) for size in sizes]:
        if run is not None:
            memory.release(run)
    assert memory.fragmentation() == before


def test_a_buddy_takes_the_smallest_piece_that_does() -> None:
    memory = Buddy(7)
    assert memory.fragmentation() == Fragmentation((4, 2, 1))
    assert [taken(memory, size) for size in (1, 2)] == [Run(6, 1), Run(4, 2)]


def test_of_equal_pieces_a_buddy_takes_the_lowest() -> None:
    memory = Buddy(8)
    runs = [taken(memory, 2) for _ in range(4)]
    for place in (2, 0):
        memory.release(runs[place])
    assert taken(memory, 2) == runs[0]


# ── what is refused, and what is found ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [Run(8, 8), Run(0, 4), Run(64, 1)])
def test_only_what_was_handed_out_is_released(kind: type[FirstFit | Buddy], run: Run) -> None:
    memory = kind(64)
    held = taken(memory, 8)
    with pytest.raises(InvalidSize, match="a run must be handed out to be released, got Run"):
        memory.release(run)
    memory.release(held)
    with pytest.raises(InvalidSize):
        memory.release(held)
    assert memory.num_free == 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, -1])
def test_a_run_has_at_least_one_unit(kind: type[FirstFit | Buddy], size: int) -> None:
    with pytest.raises(InvalidSize, match="size must be in"):
        kind(64).allocate(size)
    with pytest.raises(InvalidSize, match="num_units must be in"):
        kind(size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["lost", "twice", "count"])
def test_check_finds_units_that_are_lost_or_counted_twice(
    kind: type[FirstFit | Buddy], fault: str
) -> None:
    memory = kind(64)
    run = taken(memory, 8)
    if fault == "lost":
        del memory._out[run.address]
    elif fault == "twice":
        memory._out[run.address + 8] = 8
    else:
        memory.num_free += 1
    with pytest.raises(InvariantViolation, match="runs must cover"):
        memory.check()


def test_check_finds_free_runs_that_did_not_coalesce() -> None:
    memory = FirstFit(64)
    memory._starts, memory._sizes = [0, 32], [32, 32]
    with pytest.raises(InvariantViolation, match="free runs must not be adjacent"):
        memory.check()


def test_check_finds_buddies_that_did_not_coalesce() -> None:
    memory = Buddy(64)
    memory._free = {32: {0, 32}}
    with pytest.raises(InvariantViolation, match="a free run must be aligned and alone, got 0, 32"):
        memory.check()
