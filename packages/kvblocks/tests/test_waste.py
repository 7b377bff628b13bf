"""How much of the memory holds tokens: sums, beside arithmetic, and the order of the ways."""

from collections.abc import Iterable
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.baselines import NAMES, make_baseline
from kvblocks.errors import InvalidSize
from kvblocks.waste import Lengths, Waste, measure_waste, sharegpt_like

STATES = ("tokens", "reserved", "over_allocated", "rounding", "external", "idle")

lengths = st.lists(
    st.builds(Lengths, st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12
)


def measured(
    name: str, requests: Iterable[Lengths], num_slots: int = 16_384, max_steps: int = 400
) -> Waste:
    baseline = make_baseline(name, num_slots, max_length=2048)
    return measure_waste(baseline, requests, max_steps=max_steps)


# ── what adds up ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(requests=lengths, num_slots=st.integers(128, 400))
def test_every_slot_is_in_one_state(name: str, requests: list[Lengths], num_slots: int) -> None:
    baseline = make_baseline(name, num_slots, max_length=120, block_size=8, step=12)
    waste = measure_waste(baseline, cycle(requests), max_steps=30)
    assert sum(getattr(waste, state) for state in STATES) == pytest.approx(1, abs=1e-9)
    assert min(getattr(waste, state) for state in STATES) >= 0
    assert waste.internal == waste.over_allocated + waste.rounding
    assert waste.num_refused == 0


@settings(deadline=None, max_examples=40)
@given(requests=lengths, num_slots=st.integers(160, 400), block_size=st.integers(1, 32))
def test_c4_blocks_leave_nothing_between_them(
    requests: list[Lengths], num_slots: int, block_size: int
) -> None:
    num_slots -= num_slots % block_size
    baseline = make_baseline("paged", num_slots, max_length=120, block_size=block_size)
    waste = measure_waste(baseline, cycle(requests), max_steps=30)
    assert waste.external == 0
    assert waste.over_allocated == 0


# ── beside arithmetic ────────────────────────────────────────────────────────────────────────────


def counted_blocks(
    requests: Iterable[Lengths], num_blocks: int, block_size: int, max_steps: int
) -> tuple[float, float, int, int]:
    """Paged memory as counts: share of tokens, requests at once, preempted, finished."""
    stream = iter(requests)
    free, running, preempted = num_blocks, list[list[int]](), list[list[int]]()
    tokens = batch = num_preempted = num_finished = num_measured = 0
    waiting = [*next(stream), 0]  # prompt, answer, how much of it is there
    for step in range(max_steps):
        while (needed := -(-(waiting[0] + waiting[2] + 1) // block_size)) <= free:
            # A block for the token to come is asked for, and taken when it comes.
            held = -(-(waiting[0] + waiting[2]) // block_size)
            assert needed >= held
            free -= held
            running.append([*waiting, held])
            waiting = preempted.pop() if preempted else [*next(stream), 0]
        if step >= max_steps // 4:
            tokens += sum(prompt + there for prompt, _, there, _ in running)
            batch += len(running)
            num_measured += 1
        while (
            new := sum(prompt + there == held * block_size for prompt, _, there, held in running)
        ) > free:
            *last, held = running.pop()
            preempted.append(waiting)
            waiting = last
            free += held
            num_preempted += 1
        free -= new
        for each in running:
            each[3] += each[0] + each[2] == each[3] * block_size
            each[2] += 1
        done = [each for each in running if each[2] == each[1]]
        free += sum(each[3] for each in done)
        num_finished += len(done)
        running = [each for each in running if each[2] < each[1]]
    share = tokens / num_measured / (num_blocks * block_size)
    return share, batch / num_measured, num_preempted, num_finished


@settings(deadline=None, max_examples=40)
@given(requests=lengths, num_blocks=st.integers(16, 60))
def test_paged_is_what_counting_blocks_gives(requests: list[Lengths], num_blocks: int) -> None:
    baseline = make_baseline("paged", num_blocks * 8, max_length=120, block_size=8)
    found = measure_waste(baseline, cycle(requests), max_steps=80)
    share, batch, num_preempted, num_finished = counted_blocks(cycle(requests), num_blocks, 8, 80)
    assert found.tokens == pytest.approx(share)
    assert found.mean_batch == pytest.approx(batch)
    assert (found.num_preempted, found.num_finished) == (num_preempted, num_finished)


def test_a_reservation_runs_as_many_requests_as_fit_of_the_longest() -> None:
    waste = measured("reserve-max", cycle([Lengths(100, 100)]))
    assert waste.mean_batch == 8
    assert waste.over_allocated == pytest.approx((2048 - 200) / 2048)


def test_the_oracle_asks_for_what_will_be_used() -> None:
    waste = measured("oracle", sharegpt_like(0))
    assert (waste.over_allocated, waste.num_preempted) == (0, 0)
    assert waste.rounding > 0


def test_first_fit_loses_memory_only_between_runs() -> None:
    waste = measured("first-fit", sharegpt_like(0))
    assert waste.internal == 0
    assert waste.external > 0


def test_free_pieces_that_just_do_together_are_lost_between_runs() -> None:
    #    | A: 4 | B: 4 | C: 4 |    A and C end after a step; D asks for 8
    requests = [Lengths(3, 1), Lengths(1, 3), Lengths(3, 1), Lengths(1, 7)]
    baseline = make_baseline("first-fit", 12, max_length=8)
    waste = measure_waste(baseline, requests, max_steps=2)
    assert waste.external == pytest.approx((0 + 8 / 12) / 2)
    assert waste.idle == 0


def test_growing_counts_what_it_moves() -> None:
    # Four runs of 256. The first that grows needs 512 in one piece: the last two give way to it.
    baseline = make_baseline("grow", 1024, max_length=512)
    waste = measure_waste(baseline, cycle([Lengths(1, 299)]), max_steps=257)
    assert (waste.num_preempted, waste.num_moved_tokens) == (3, 256)


# ── the stream ───────────────────────────────────────────────────────────────────────────────────


def test_everyone_sees_the_same_stream() -> None:
    assert list(islice(sharegpt_like(7), 50)) == list(islice(sharegpt_like(7), 50))
    assert list(islice(sharegpt_like(7), 50)) != list(islice(sharegpt_like(8), 50))


def test_lengths_have_the_means_of_sharegpt() -> None:
    drawn = list(islice(sharegpt_like(0), 20_000))
    # Cutting at half of 2,048 takes a little of the means, 161 and 338.
    assert sum(each.num_prompt for each in drawn) / len(drawn) == pytest.approx(161, rel=0.1)
    assert sum(each.num_generated for each in drawn) / len(drawn) == pytest.approx(338, rel=0.1)
    assert max(map(sum, drawn)) <= 2048
    assert min(map(min, drawn)) == 4


def test_paging_holds_more_tokens_than_reserving_and_more_requests_run() -> None:
    found = {name: measured(name, sharegpt_like(0), max_steps=2000) for name in NAMES}
    shares = [found[name].tokens for name in ("reserve-max", "pow2", "oracle", "first-fit")]
    assert shares == sorted(shares)
    assert found["paged"].tokens > 0.95
    assert found["paged"].mean_batch > 2 * found["oracle"].mean_batch


def test_a_stream_that_ends_is_measured_while_it_lasts() -> None:
    waste = measured("reserve-max", [Lengths(10, 100)] * 24, max_steps=400)
    assert (waste.num_steps, waste.num_finished) == (200, 16)
    assert waste.tokens == pytest.approx(8 * (110 - 100 / 2 - 0.5) / 16_384)


def test_a_stream_too_short_to_measure_is_refused() -> None:
    with pytest.raises(InvalidSize, match="longer than the 100 steps that warm up, got 100 steps"):
        measured("reserve-max", [Lengths(10, 100)] * 16, max_steps=400)


def test_a_request_larger_than_the_memory_is_counted_and_left_out() -> None:
    stream = [Lengths(10, 100), Lengths(3000, 1), *[Lengths(10, 100)] * 20]
    waste = measured("first-fit", stream, num_slots=2048, max_steps=50)
    assert waste.num_refused == 0  # it waits until it is alone
    waste = measured("first-fit", stream, num_slots=2048, max_steps=400)
    assert waste.num_refused == 1


def test_a_request_that_cannot_move_is_computed_again_where_it_fits() -> None:
    baseline = make_baseline("grow", 512, max_length=400, step=256)
    waste = measure_waste(baseline, cycle([Lengths(200, 200)]), max_steps=1000)
    # A run of 512 beside one of 256 does not fit, so nothing is ever moved.
    assert (waste.num_moved_tokens, waste.num_refused) == (0, 0)
    assert waste.num_finished == 5


def test_progress_is_told_step_by_step() -> None:
    told: list[int] = []
    baseline = make_baseline("oracle", 2048, max_length=2048)
    measure_waste(baseline, sharegpt_like(0), max_steps=5, progress=told.append)
    assert told == [0, 1, 2, 3, 4]


def test_there_is_a_step_at_least() -> None:
    with pytest.raises(InvalidSize, match="max_steps must be in"):
        measured("oracle", sharegpt_like(0), max_steps=0)


def test_lengths_of_four_and_four_fit_the_longest() -> None:
    with pytest.raises(InvalidSize, match="max_length must be in"):
        next(sharegpt_like(0, max_length=7))
