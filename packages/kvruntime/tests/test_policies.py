"""What is done when blocks run short: each policy alone, seen working by its counter."""

from typing import Any

import pytest

from kvruntime import InvalidRequest, SamplingParams
from kvruntime.engine_config import SchedulerConfig
from kvruntime.request import Request
from kvruntime.steps import SchedulerOutput

from .scheduling import add, counts, end, kinds, make, run


def distinct(request_id: int, length: int) -> range:
    """A prompt that shares no block with any other."""
    return range(1000 * request_id, 1000 * request_id + length)


class TestDeferral:
    """A prompt starts when the whole of it has room."""

    def test_a_prompt_whose_first_chunk_alone_would_fit_waits(self) -> None:
        scheduler = make(num_blocks=10, budget=8, caching=False)
        old = add(scheduler, 0, distinct(0, 23))
        while not old.sequences[0].output_token_ids:
            run(scheduler)
        new = add(scheduler, 1, distinct(1, 28))
        for _ in range(5):
            assert counts(run(scheduler)) == {(0, 0): 1}
        assert scheduler.counters.num_deferrals == 1
        assert kinds(new) == ["deferred"]
        assert "blocks needed: 7, available: 4" in new.events[0].detail
        end(scheduler, old)
        assert counts(run(scheduler)) == {(1, 0): 8}
        assert scheduler.counters.num_preemptions_recompute == 0

    def test_a_request_is_deferred_again_after_it_ran(self) -> None:
        scheduler = make(num_blocks=5, caching=False)
        old = add(scheduler, 0, distinct(0, 7))
        new = add(scheduler, 1, distinct(1, 7))
        for _ in range(6):
            run(scheduler)
        assert kinds(new) == ["admitted", "preempted", "deferred"]
        end(scheduler, old)
        run(scheduler)
        assert kinds(new)[-1] == "admitted"

    def test_with_admission_by_output_nobody_is_preempted(self) -> None:
        scheduler = make(num_blocks=6, admission="output")
        old = add(scheduler, 0, distinct(0, 7), max_tokens=9)
        new = add(scheduler, 1, distinct(1, 3), max_tokens=6)
        for _ in range(9):
            assert counts(run(scheduler)).keys() == {(0, 0)}
        assert scheduler.counters.num_deferrals == 1
        assert "3 blocks might be needed, 4 of 6 are promised" in new.events[0].detail
        end(scheduler, old)
        assert counts(run(scheduler)) == {(1, 0): 3}
        assert scheduler.counters.num_preemptions_recompute == 0

    def test_admission_by_output_counts_every_sample(self) -> None:
        scheduler = make(num_blocks=8, admission="output")
        add(scheduler, 0, distinct(0, 4), n=3, max_tokens=4)
        add(scheduler, 1, distinct(1, 4), max_tokens=8)
        run(scheduler)
        assert counts(run(scheduler)) == {(0, 0): 1, (0, 1): 1, (0, 2): 1}


class TestSkippingAhead:
    """Strict order by default; a bound on how often one is passed otherwise."""

    def test_strict_order_lets_nobody_pass(self) -> None:
        scheduler = make(num_blocks=8, caching=False)
        holder = add(scheduler, 0, distinct(0, 20))
        run(scheduler)
        add(scheduler, 1, distinct(1, 20))
        add(scheduler, 2, distinct(2, 2))
        for _ in range(3):
            assert counts(run(scheduler)) == {(0, 0): 1}
        end(scheduler, holder)
        assert counts(run(scheduler)) == {(1, 0): 20, (2, 0): 2}

    def test_small_ones_pass_and_the_big_one_starts_within_the_bound(self) -> None:
        scheduler = make(num_blocks=8, caching=False, skip_ahead=2)
        holder = add(scheduler, 0, distinct(0, 20))
        run(scheduler)
        big = add(scheduler, 1, distinct(1, 20))
        small = [add(scheduler, 2 + i, distinct(2 + i, 2)) for i in range(4)]
        assert counts(run(scheduler)) == {(0, 0): 1, (2, 0): 2, (3, 0): 2}
        for request in small[:2]:
            end(scheduler, request)
        for _ in range(3):
            assert counts(run(scheduler)) == {(0, 0): 1}  # there is room, but it was passed twice
        assert (big.num_bypassed, scheduler.counters.num_bypasses) == (2, 2)
        end(scheduler, holder)
        assert counts(run(scheduler)) == {(1, 0): 20, (4, 0): 2, (5, 0): 2}

    def test_who_has_run_is_never_passed(self) -> None:
        scheduler = make(num_blocks=5, caching=False, skip_ahead=9)
        add(scheduler, 0, distinct(0, 7))
        new = add(scheduler, 1, distinct(1, 7))
        for _ in range(3):
            run(scheduler)
        assert kinds(new)[-1] == "preempted"
        add(scheduler, 2, distinct(2, 2))
        assert counts(run(scheduler)) == {(0, 0): 1}
        assert scheduler.counters.num_bypasses == 0


class TestPriority:
    """The lowest value first; among equals who came first."""

    def test_decides_who_is_admitted(self) -> None:
        scheduler = make(seqs=1, policy="priority")
        for request_id, priority in enumerate((5, 1, 1)):
            add(scheduler, request_id, distinct(request_id, 2), priority=priority)
        order = []
        for _ in range(3):
            [sequence] = [item.sequence for item in run(scheduler).scheduled]
            order.append(sequence.request.request_id)
            end(scheduler, sequence.request)
        assert order == [1, 2, 0]

    def test_means_nothing_to_first_come_first_served(self) -> None:
        scheduler = make(seqs=1)
        add(scheduler, 0, distinct(0, 2), priority=5)
        add(scheduler, 1, distinct(1, 2), priority=1)
        assert counts(run(scheduler)) == {(0, 0): 2}

    def test_who_is_preempted_leaves_the_step_and_gives_its_budget_back(self) -> None:
        scheduler = make(num_blocks=5, budget=8, caching=False, policy="priority")
        low = add(scheduler, 0, distinct(0, 7), priority=9)
        run(scheduler)
        add(scheduler, 1, distinct(1, 8), priority=0)
        run(scheduler)  # 7 of them
        output = run(scheduler)  # the last, and then a token that needs a block
        output = run(scheduler)
        assert counts(output) == {(1, 0): 1}
        assert kinds(low)[-1] == "preempted"
        assert len(output.slot_mapping) == 1
        assert [sequence.seq_id for sequence in scheduler.waiting] == [(0, 0)]

    def test_preempted_work_goes_before_new_work_of_equal_priority(self) -> None:
        scheduler = make(num_blocks=5, caching=False, policy="priority")
        old = add(scheduler, 0, distinct(0, 7), priority=1)
        add(scheduler, 1, distinct(1, 7), priority=1)
        for _ in range(3):
            run(scheduler)
        add(scheduler, 2, distinct(2, 7), priority=1)
        add(scheduler, 3, distinct(3, 7), priority=0)
        assert [s.seq_id for s in scheduler.waiting] == [(3, 0), (1, 0), (2, 0)]
        end(scheduler, old)
        assert counts(run(scheduler)) == {(3, 0): 7, (1, 0): 9}


class TestPreemption:
    """The newest request as a whole; the only one, sample by sample."""

    def test_all_samples_of_the_newest_request_go_together(self) -> None:
        scheduler = make(num_blocks=7, caching=False)
        old = add(scheduler, 0, distinct(0, 7))
        new = add(scheduler, 1, distinct(1, 5), n=2)
        for _ in range(3):
            run(scheduler)
        add(scheduler, 2, distinct(2, 12))
        while scheduler.counters.num_preemptions_recompute == 0:
            run(scheduler)
        assert scheduler.counters.num_preemptions_recompute == 2
        assert [s.seq_id for s in scheduler.running] == [(0, 0)]
        assert [s.seq_id for s in scheduler.waiting] == [(1, 0), (1, 1), (2, 0)]
        end(scheduler, old)
        assert counts(run(scheduler)).keys() >= {(1, 0), (1, 1)}
        assert new.num_preemptions == 2

    def test_samples_of_the_only_request_go_one_by_one(self) -> None:
        scheduler = make(num_blocks=5)
        add(scheduler, 0, distinct(0, 8), n=4)
        for _ in range(6):
            run(scheduler)
        assert [s.seq_id for s in scheduler.running] == [(0, 0), (0, 1)]

    def test_a_batch_that_can_never_fit_together_is_not_waited_for(self) -> None:
        """Twice the pool is needed at the end: somebody is preempted, and everybody finishes."""
        scheduler = make(num_blocks=4)
        requests = [add(scheduler, i, distinct(i, 4)) for i in range(4)]
        for _ in range(80):
            for item in run(scheduler).scheduled:
                if item.sequence.num_output_tokens >= 12:
                    end(scheduler, item.sequence.request)
            if not scheduler.has_work:
                break
        assert all(request.is_finished for request in requests)
        assert scheduler.counters.num_preemptions_recompute > 0

    def test_who_was_just_preempted_does_not_take_its_blocks_back(self) -> None:
        scheduler = make(num_blocks=6, caching=False)
        add(scheduler, 0, distinct(0, 8))
        add(scheduler, 1, distinct(1, 12))
        output = run(scheduler)
        while not scheduler.counters.num_preemptions_recompute:
            output = run(scheduler)
        assert counts(output) == {(0, 0): 1}
        assert scheduler.manager.stats().num_free_blocks == 3


class TestSwapping:
    """Blocks go to the host and come back; where there is no room, tokens are computed again."""

    def pressed(self, **settings: Any) -> tuple[Any, Request, Request, SchedulerOutput]:
        """Two requests of 7 tokens in 5 blocks: at their ninth the newer gives way."""
        scheduler = make(num_blocks=5, caching=False, **settings)
        old, new = (add(scheduler, i, distinct(i, 7)) for i in range(2))
        for _ in range(2):
            run(scheduler)
        return scheduler, old, new, run(scheduler)

    def test_moves_the_newest_out_and_back_and_computes_nothing_twice(self) -> None:
        scheduler, old, new, output = self.pressed(host=5, preemption="swap")
        assert counts(output) == {(0, 0): 1}
        assert [tuple(swap) for swap in output.swaps_out] == [(2, 0), (3, 1)]
        assert kinds(new) == ["admitted", "preempted"]
        assert "swapped to the host" in new.events[-1].kind
        assert scheduler.counters.num_preemptions_swap == 1
        assert counts(run(scheduler)) == {(0, 0): 1}
        end(scheduler, old)
        output = run(scheduler)
        assert counts(output) == {(1, 0): 1}
        assert [swap.source for swap in output.swaps_in] == [0, 1]
        assert output.scheduled[0].start == 8
        assert kinds(new)[-2:] == ["deferred", "swapped in"]
        assert scheduler.counters.num_preemptions_recompute == 0

    def test_falls_back_to_recomputing_where_the_host_has_no_room(self) -> None:
        scheduler, old, new, output = self.pressed(host=1, preemption="swap")
        assert output.swaps_out == ()
        counters = scheduler.counters
        assert (counters.num_swap_fallbacks, counters.num_preemptions_recompute) == (1, 1)
        assert counters.num_preemptions_swap == 0
        end(scheduler, old)
        assert counts(run(scheduler)) == {(1, 0): 9}
        assert "to be recomputed" in new.events[1].kind

    def test_auto_computes_less_than_a_block_again(self) -> None:
        scheduler = make(num_blocks=4, budget=10, caching=False, host=9, preemption="auto")
        add(scheduler, 0, distinct(0, 8))
        small = add(scheduler, 1, distinct(1, 6))  # its first chunk has two tokens
        run(scheduler)
        assert small.sequences[0].num_computed_tokens == 2
        run(scheduler)
        assert scheduler.counters.num_preemptions_recompute == 1
        assert scheduler.counters.num_preemptions_swap == 0

    def test_auto_moves_what_has_computed_a_block(self) -> None:
        scheduler, *_ = self.pressed(host=5, preemption="auto")
        assert scheduler.counters.num_preemptions_swap == 1

    def test_who_is_swapped_keeps_its_place_and_waits_for_all_its_blocks(self) -> None:
        scheduler, old, new, _ = self.pressed(host=5, preemption="swap")
        later = add(scheduler, 2, distinct(2, 3))
        for _ in range(3):
            assert counts(run(scheduler)).keys() == {(0, 0)}
        assert [s.seq_id for s in scheduler.waiting] == [(1, 0), (2, 0)]
        assert "blocks needed: 3, available: 2" in new.events[-1].detail
        end(scheduler, old)
        assert counts(run(scheduler)) == {(1, 0): 1, (2, 0): 3}
        assert kinds(later)[-1] == "admitted"

    def test_samples_that_are_swapped_together_move_what_they_share_once(self) -> None:
        scheduler = make(num_blocks=7, caching=False, host=9, preemption="swap")
        add(scheduler, 0, distinct(0, 7))
        add(scheduler, 1, distinct(1, 9), n=2)
        for _ in range(2):
            run(scheduler)
        output = run(scheduler)
        while not output.swaps_out:
            output = run(scheduler)
        assert scheduler.counters.num_preemptions_swap == 2
        assert len(output.swaps_out) == 2 + 1 + 1

    def test_an_aborted_request_leaves_the_host_too(self) -> None:
        scheduler, _, new, _ = self.pressed(host=5, preemption="swap")
        scheduler.abort(new)
        stats = scheduler.manager.stats()
        assert stats.num_free_host_blocks == 5
        assert stats.num_swapped_sequences == 0

    def test_after_a_step_that_failed_nobody_finds_what_it_was_to_bring_back(self) -> None:
        scheduler = make(num_blocks=5, host=5, preemption="swap")
        old, new = (add(scheduler, i, distinct(i, 7)) for i in range(2))
        for _ in range(3):
            run(scheduler)
        end(scheduler, old)
        # What of it was still cached on the device is evicted, so that it must come from the host.
        for request_id in (2, 3):
            other = Request(
                request_id, "", list(distinct(request_id, 20)), SamplingParams(), seed=0
            )
            scheduler.manager.allocate(other.sequences[0].seq_id, other.prompt_token_ids)
            scheduler.manager.free(other.sequences[0].seq_id)
        output = scheduler.schedule()
        assert output.swaps_in
        assert scheduler.manager.match(new.sequences[0].token_ids).num_tokens == 8
        scheduler.fail()
        assert scheduler.manager.match(new.sequences[0].token_ids).num_tokens == 0


class TestEviction:
    """Cached blocks go before anybody is preempted or deferred, or after."""

    def cached(self, **policies: Any) -> Any:
        """Six blocks: four cached, one of a request that runs, one free."""
        scheduler = make(num_blocks=6, **policies)
        gone = add(scheduler, 0, distinct(0, 16))
        run(scheduler)
        end(scheduler, gone)
        add(scheduler, 1, distinct(1, 3))
        run(scheduler)
        assert scheduler.manager.stats().num_cached_blocks == 4
        return scheduler

    def test_before_the_next_request_is_deferred(self) -> None:
        scheduler = self.cached(eviction="before")
        add(scheduler, 2, distinct(2, 7))
        assert counts(run(scheduler)) == {(1, 0): 1, (2, 0): 7}
        assert scheduler.manager.stats().num_evicted_blocks == 1
        assert scheduler.counters.num_deferrals == 0

    def test_after_the_next_request_is_deferred(self) -> None:
        scheduler = self.cached(eviction="after")
        new = add(scheduler, 2, distinct(2, 7))
        assert counts(run(scheduler)) == {(1, 0): 1}
        assert scheduler.manager.stats().num_evicted_blocks == 0
        assert scheduler.counters.num_deferrals == 1
        assert "only by evicting cached blocks" in new.events[0].detail

    @pytest.mark.parametrize(("eviction", "counted"), [("before", (1, 0)), ("after", (0, 1))])
    def test_before_or_after_the_newest_is_preempted(
        self, eviction: str, counted: tuple[int, int]
    ) -> None:
        scheduler = self.cached(eviction=eviction)
        add(scheduler, 2, distinct(2, 2))
        run(scheduler)  # takes the last free block
        run(scheduler)  # the older needs a block for its fifth token
        num_preempted = scheduler.counters.num_preemptions_recompute
        assert (scheduler.manager.stats().num_evicted_blocks, num_preempted) == counted

    def test_the_request_that_came_first_evicts_when_nothing_else_is_left(self) -> None:
        scheduler = self.cached(eviction="after")
        for _ in range(14):
            run(scheduler)
        assert scheduler.manager.stats().num_evicted_blocks > 0
        assert scheduler.counters.num_preemptions_recompute == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "sjf"}, 'policy must be "fcfs" or "priority", got \'sjf\''),
        ({"admission": "chunk"}, 'admission must be "prompt" or "output", got \'chunk\''),
        ({"eviction": True}, 'eviction must be "before" or "after", got True'),
        ({"preemption": "none"}, 'preemption must be "recompute" or "swap" or "auto", got'),
        ({"skip_ahead": -1}, "skip_ahead must be an integer of at least 0, got -1"),
        ({"max_num_waiting": 0}, "max_num_waiting must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_name_no_policy_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SchedulerConfig(**settings)
