"""When a request for blocks can be served: now, after a step, later, or never."""

import pytest

from kvblocks import BlockManager, OutOfBlocks, Verdict, When

from .helpers import filled, refused


def allocation_is_refused(manager: BlockManager, num_tokens: int, expected: Verdict) -> None:
    """The verdict, and the same verdict from the call that changes things."""
    prompt = range(500, 500 + num_tokens)
    assert manager.can_allocate(prompt) == expected
    with refused(manager, OutOfBlocks) as caught:
        manager.allocate("refused", prompt)
    assert isinstance(caught.value, OutOfBlocks)
    assert caught.value.verdict == expected


def test_a_hit_is_not_evicted_by_its_own_request() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 12)
    manager.free("A")
    assert manager.can_allocate(range(13)) == Verdict(When.NOW, 1, 1)
    allocation = manager.allocate("B", range(13))
    assert allocation.num_cached_tokens == 12
    assert sorted(allocation.block_ids) == [0, 1, 2, 3]


def test_a_hit_is_not_evicted_by_its_own_request_though_it_is_the_oldest() -> None:
    manager = BlockManager(2, 4)
    for name, first_token in (("A", 0), ("B", 100)):
        filled(manager, name, 4, first_token)
    manager.free("A")
    manager.free("B")
    assert manager.allocate("C", range(5)).block_ids == (0, 1)


def test_hits_are_not_counted_as_free() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 12)
    filled(manager, "other", 4, first_token=900)
    manager.free("A")
    verdict = manager.can_allocate(range(13))
    assert verdict == Verdict(When.LATER, 1, 0)
    assert verdict.num_missing_blocks == 1
    with refused(manager, OutOfBlocks):
        manager.allocate("B", range(13))


def test_a_prompt_larger_than_the_pool_never_fits() -> None:
    manager = BlockManager(10, 4)
    assert manager.can_allocate(range(40)) == Verdict(When.NOW, 10, 10)
    allocation_is_refused(manager, 41, Verdict(When.NEVER, 11, 10))


def test_a_prompt_that_fits_an_emptier_pool_fits_later() -> None:
    manager = BlockManager(10, 4)
    filled(manager, "busy", 12)
    assert manager.can_allocate(range(500, 528)).is_now
    allocation_is_refused(manager, 32, Verdict(When.LATER, 8, 7))
    manager.free("busy")
    manager.allocate("next", range(500, 532))


def test_a_prompt_never_fits_even_if_most_of_it_is_cached() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 8)
    assert manager.can_allocate([*range(8), 9]).when is When.NEVER


def test_a_sequence_that_would_outgrow_the_pool_never_fits() -> None:
    manager = BlockManager(3, 4)
    filled(manager, "A", 8)
    assert manager.can_append({"A": 4}) == Verdict(When.NOW, 1, 1)
    assert manager.can_append({"A": 5}) == Verdict(When.NEVER, 2, 1)


def test_a_sequence_that_another_keeps_from_growing_fits_later() -> None:
    manager = BlockManager(3, 4)
    filled(manager, "A", 8)
    filled(manager, "B", 4, first_token=100)
    assert manager.can_append({"A": 1}) == Verdict(When.LATER, 1, 0)
    manager.free("B")
    manager.append({"A": 1})


def test_cached_blocks_count_as_available() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "A", 8)
    manager.free("A")
    allocation_is_refused(manager, 17, Verdict(When.NEVER, 5, 4))
    assert manager.can_allocate(range(500, 516)) == Verdict(When.NOW, 4, 4)


@pytest.fixture
def in_flight() -> BlockManager:
    """Of 6 blocks, 1 is held, 1 is free, 2 wait for step 1 and 2 for step 2."""
    manager = BlockManager(6, 4, prefix_caching=False)
    filled(manager, "held", 4)
    for name in "AB":
        manager.allocate(name, range(8))
    for name in "AB":
        manager.begin_step()
        manager.append({name: 8})
        manager.free(name)
    return manager


@pytest.mark.parametrize(
    ("num_blocks", "when", "step"),
    [
        (1, When.NOW, None),
        (2, When.AFTER_STEP, 1),
        (3, When.AFTER_STEP, 1),
        (4, When.AFTER_STEP, 2),
        (5, When.AFTER_STEP, 2),
        (6, When.LATER, None),
        (7, When.NEVER, None),
    ],
)
def test_a_verdict_names_the_first_step_that_is_enough(
    in_flight: BlockManager, num_blocks: int, when: When, step: int | None
) -> None:
    expected = Verdict(when, num_blocks, 1, step)
    assert in_flight.can_allocate(range(num_blocks * 4)) == expected


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5])
def test_after_the_named_step_the_call_succeeds_and_not_before(
    in_flight: BlockManager, num_blocks: int
) -> None:
    prompt = range(num_blocks * 4)
    step = in_flight.can_allocate(prompt).step
    assert step is not None
    if step > 1:
        in_flight.complete_step(step - 1)
        assert not in_flight.can_allocate(prompt).is_now
    in_flight.complete_step(step)
    in_flight.allocate("next", prompt)


def test_the_same_holds_for_append(in_flight: BlockManager) -> None:
    assert in_flight.can_append({"held": 4}).is_now
    assert in_flight.can_append({"held": 5}) == Verdict(When.AFTER_STEP, 2, 1, 1)
    in_flight.complete_step(1)
    in_flight.append({"held": 5})


def test_fenced_hits_do_not_count_as_coming_back() -> None:
    manager = BlockManager(4, 4)
    filled(manager, "held", 4, first_token=900)
    filled(manager, "A", 8)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    assert manager.match(range(9)).num_tokens == 8
    assert manager.can_allocate(range(9)) == Verdict(When.AFTER_STEP, 1, 0, step)
    assert manager.can_allocate(range(13)) == Verdict(When.LATER, 2, 0)
    manager.complete_step(step)
    assert manager.allocate("B", range(9)).num_cached_tokens == 8


def test_asking_changes_nothing_and_is_no_refusal() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 8)
    before = manager.state_digest()
    manager.can_allocate(range(99))
    manager.can_append({"A": 99})
    manager.match(range(99))
    assert manager.state_digest() == before
    assert manager.stats().num_refusals == 0


def test_refusals_are_counted() -> None:
    manager = BlockManager(2, 4)
    filled(manager, "A", 8)
    with pytest.raises(OutOfBlocks):
        manager.allocate("B", [9])
    with pytest.raises(OutOfBlocks):
        manager.append({"A": 1})
    assert manager.stats().num_refusals == 2


@pytest.mark.parametrize(
    ("verdict", "text", "num_missing"),
    [
        (Verdict(When.NOW, 2, 5), "blocks needed: 2, available: 5; can be served now", 0),
        (
            Verdict(When.AFTER_STEP, 6, 5, 3),
            "blocks needed: 6, available: 5; enough once step 3 completes",
            1,
        ),
        (
            Verdict(When.LATER, 7, 5),
            "blocks needed: 7, available: 5; 2 short until sequences are freed",
            2,
        ),
        (
            Verdict(When.NEVER, 11, 5),
            "blocks needed: 11, available: 5; not even freeing every sequence would do",
            6,
        ),
    ],
)
def test_a_verdict_says_what_is_needed(verdict: Verdict, text: str, num_missing: int) -> None:
    assert str(verdict) == text
    assert str(OutOfBlocks(verdict)) == text
    assert verdict.num_missing_blocks == num_missing
    assert verdict.is_now == (verdict.when is When.NOW)


def test_a_verdict_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Verdict(When.NOW, 1, 1).step = 3  # type: ignore[misc]  # what is tested
