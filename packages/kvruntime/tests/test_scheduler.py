"""Who runs, with how many tokens, in which blocks; no model is needed to say it."""

from dataclasses import replace

import numpy as np

from kvruntime import FinishReason, SamplingParams
from kvruntime.request import Request, Sequence

from .scheduling import NEXT_TOKEN, add, counts, make, run


def test_prompts_and_decoding_share_one_budget() -> None:
    scheduler = make(budget=10)
    add(scheduler, 0, range(4))
    assert counts(run(scheduler)) == {(0, 0): 4}
    add(scheduler, 1, range(100, 120))
    assert counts(run(scheduler)) == {(0, 0): 1, (1, 0): 9}
    assert counts(run(scheduler)) == {(0, 0): 1, (1, 0): 9}
    assert counts(run(scheduler)) == {(0, 0): 1, (1, 0): 2}
    assert counts(run(scheduler)) == {(0, 0): 1, (1, 0): 1}


def test_a_token_is_chosen_only_when_the_prompt_is_complete() -> None:
    scheduler = make(budget=6)
    request = add(scheduler, 0, range(8))
    assert [item.completes for item in run(scheduler).scheduled] == [False]
    assert [item.completes for item in run(scheduler).scheduled] == [True]
    assert request.sequences[0].output_token_ids == [NEXT_TOKEN]


def test_slots_follow_the_block_table() -> None:
    scheduler = make()
    add(scheduler, 0, range(6))
    output = run(scheduler)
    assert np.asarray(output.block_tables).tolist() == [[0, 1]]
    assert output.slot_mapping.tolist() == [0, 1, 2, 3, 4, 5]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler = make(num_blocks=5, budget=64)
    add(scheduler, 0, range(16))
    add(scheduler, 1, range(100, 112))
    add(scheduler, 2, range(200, 202))
    assert counts(run(scheduler)) == {(0, 0): 16}
    assert [sequence.seq_id for sequence in scheduler.waiting] == [(1, 0), (2, 0)]


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    scheduler = make()
    add(scheduler, 0, range(10))
    second = add(scheduler, 1, range(10))
    assert counts(run(scheduler)) == {(0, 0): 10}
    assert counts(run(scheduler)) == {(0, 0): 1, (1, 0): 2}
    assert second.num_cached_tokens == 8


def test_without_prefix_caching_nobody_waits_for_a_prefix() -> None:
    scheduler = make(caching=False)
    add(scheduler, 0, range(10))
    add(scheduler, 1, range(10))
    assert counts(run(scheduler)) == {(0, 0): 10, (1, 0): 10}


def test_a_prefix_shorter_than_a_block_is_no_reason_to_wait() -> None:
    scheduler = make()
    add(scheduler, 0, range(10))
    add(scheduler, 1, range(3))
    assert counts(run(scheduler)) == {(0, 0): 10, (1, 0): 3}


def test_samples_take_seats_before_they_exist() -> None:
    scheduler = make(seqs=4)
    add(scheduler, 0, range(4), n=3)
    add(scheduler, 1, range(100, 104), n=2)
    add(scheduler, 2, range(200, 204))
    assert counts(run(scheduler)) == {(0, 0): 4}
    assert counts(run(scheduler)) == {(0, 0): 1, (0, 1): 1, (0, 2): 1}


def test_samples_share_the_prompt_and_copy_its_tail_once_each_but_one() -> None:
    scheduler = make()
    request = add(scheduler, 0, range(6), n=4)
    run(scheduler)
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2, 3]
    output = run(scheduler)
    assert len(output.copies) == 3
    assert {copy.source for copy in output.copies} == {1}
    first, second = np.asarray(output.block_tables).T.tolist()
    assert set(first) == {0}
    assert len(set(second)) == 4


def test_the_newest_gives_its_blocks_up_and_is_computed_again_with_its_output() -> None:
    scheduler = make(num_blocks=5, caching=False)
    old = add(scheduler, 0, range(7)).sequences[0]
    new = add(scheduler, 1, range(100, 107)).sequences[0]
    run(scheduler)
    run(scheduler)
    assert counts(run(scheduler)) == {(0, 0): 1}
    assert scheduler.counters.num_preemptions_recompute == 1
    assert new.num_computed_tokens == 0
    scheduler.finish(old, FinishReason.LENGTH)
    assert counts(run(scheduler)) == {(1, 0): 9}
    assert new.output_token_ids == [NEXT_TOKEN] * 3


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    scheduler = make(num_blocks=5, caching=False)
    add(scheduler, 0, range(7))
    add(scheduler, 1, range(100, 107))
    add(scheduler, 2, range(200, 207))
    for _ in range(3):
        run(scheduler)
    assert [sequence.seq_id for sequence in scheduler.waiting] == [(1, 0), (2, 0)]


def test_a_prompt_preempted_before_its_end_counts_only_what_it_found_at_first() -> None:
    scheduler = make(num_blocks=5, budget=8)
    add(scheduler, 0, range(7))
    new = add(scheduler, 1, range(100, 110))
    for _ in range(3):
        run(scheduler)
    assert (scheduler.counters.num_preemptions_recompute, new.num_cached_tokens) == (1, 0)
    scheduler.abort(scheduler.running[0].request)
    output = run(scheduler)
    assert [(item.sequence.seq_id, item.start) for item in output.scheduled] == [((1, 0), 8)]
    assert new.num_cached_tokens == 0
    assert scheduler.counters.num_cached_tokens == 8


def test_an_aborted_request_is_gone_wherever_it_stood() -> None:
    scheduler = make(seqs=4)
    running = add(scheduler, 0, range(6), n=3)
    waiting = add(scheduler, 1, range(100, 106), n=2)
    left = add(scheduler, 2, range(200, 203))
    run(scheduler)
    output = scheduler.schedule()
    scheduler.abort(running)
    scheduler.abort(waiting)
    scheduler.manager.check()
    assert scheduler.manager.stats().num_held_blocks == 0
    assert scheduler.manager.stats().num_fenced_blocks == 4  # the step is still to run
    scheduler.complete(output)
    assert scheduler.manager.stats().num_fenced_blocks == 0
    assert counts(run(scheduler)) == {left.sequences[0].seq_id: 3}


class TestTwoStepsInFlight:
    """The second has what is in none, and touches no block that the first writes."""

    def test_who_is_in_the_first_is_not_in_the_second(self) -> None:
        scheduler = make()
        add(scheduler, 0, range(6))
        first = scheduler.schedule()
        add(scheduler, 1, range(100, 106))
        second = scheduler.schedule()
        assert (counts(first), counts(second)) == ({(0, 0): 6}, {(1, 0): 6})
        for output in (first, second):
            scheduler.complete(output)
        scheduler.manager.check()

    def test_where_there_is_nothing_else_the_second_is_empty_and_no_step(self) -> None:
        scheduler = make()
        add(scheduler, 0, range(6))
        first = scheduler.schedule()
        assert scheduler.schedule().scheduled == ()
        scheduler.complete(first)
        assert [record.step for record in scheduler.log] == [1]
        scheduler.abort(scheduler.running[0].request)
        assert scheduler.manager.stats().num_fenced_blocks == 0
        add(scheduler, 1, range(6))
        assert scheduler.schedule().step == 2

    def test_a_shortage_waits_for_the_first_and_preempts_nobody(self) -> None:
        scheduler = make(num_blocks=6, budget=8, caching=False)
        old = add(scheduler, 0, range(8))
        run(scheduler)
        add(scheduler, 1, range(100, 106))
        first = scheduler.schedule()  # a third block for the old one, two for the new one
        assert counts(first) == {(0, 0): 1, (1, 0): 6}
        scheduler.complete(first)
        for sequence in scheduler.running:
            sequence.token_ids += [NEXT_TOKEN] * 4
        scheduler.config = replace(scheduler.config, max_num_batched_tokens=4)
        first = scheduler.schedule()
        assert counts(first) == {(0, 0): 4}
        assert scheduler.schedule().scheduled == ()  # the new one needs a block, and there is none
        assert scheduler.counters.num_preemptions_recompute == 0
        scheduler.abort(old)
        scheduler.complete(first)
        assert counts(run(scheduler)) == {(1, 0): 4}

    def test_what_leaves_in_flight_is_handed_out_when_its_step_is_complete(self) -> None:
        scheduler = make(num_blocks=4, caching=False)
        leaving = add(scheduler, 0, range(14))
        first = scheduler.schedule()
        scheduler.abort(leaving)
        add(scheduler, 1, range(100, 110))
        assert scheduler.schedule().scheduled == ()
        scheduler.complete(first)
        assert counts(run(scheduler)) == {(1, 0): 10}

    def test_steps_that_fail_drop_who_runs_and_nobody_else(self) -> None:
        scheduler = make(seqs=2)
        lost = [add(scheduler, i, range(100 * i, 100 * i + 6)) for i in range(2)]
        waiting = add(scheduler, 2, range(200, 206))
        run(scheduler)
        run(scheduler)
        scheduler.schedule()
        assert scheduler.fail() == tuple(lost)
        scheduler.manager.check()
        stats = scheduler.manager.stats()
        assert stats.num_held_blocks == stats.num_fenced_blocks == 0
        assert counts(run(scheduler)) == {waiting.sequences[0].seq_id: 6}


def test_finished_sequences_leave_no_block_behind() -> None:
    scheduler = make()
    requests = [add(scheduler, i, range(100 * i, 100 * i + 9), n=1 + i) for i in range(3)]
    for _ in range(5):
        run(scheduler)
    for sequence in [s for request in requests for s in request.sequences]:
        scheduler.finish(sequence, FinishReason.LENGTH)
    stats = scheduler.manager.stats()
    assert not scheduler.has_work
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_sequence_is_known_by_its_request_and_index() -> None:
    request = Request(3, "", [1, 2], SamplingParams(n=2), seed=0)
    child: Sequence = request.sequences[0].fork()
    assert child.seq_id == (3, 1)
    assert child.token_ids == [1, 2]
    assert child.token_ids is not request.sequences[0].token_ids
