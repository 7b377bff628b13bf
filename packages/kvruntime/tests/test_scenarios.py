"""Public problems of other engines, each with the outcome that is right here.

The scenarios that are tests of a room of their own are there; what needs the whole engine is here,
on a model whose keys are the tokens themselves.

| scenario | test |
|---|---|
| a prompt larger than the pool blocks everybody | `test_a_prompt_that_can_never_fit_...`, `test_engine.py::test_output_ends_where_the_pool_does` |
| admission looks at the first chunk only | `test_policies.py::TestDeferral::test_a_prompt_whose_first_chunk_alone_would_fit_waits` |
| a big request hides small ones behind it | `test_policies.py::TestSkippingAhead` |
| somebody is preempted who is in this step already | `test_policies.py::TestPriority::test_who_is_preempted_leaves_the_step_...` |
| a preempted request loses its turn | `test_policies.py::TestPriority::test_preempted_work_goes_before_...`, `test_preemptions_of_a_request_are_few` |
| recomputation forgets the output, or takes it for prompt | `test_a_request_preempted_after_5_of_12_tokens_...` |
| the swap space is exhausted | `test_a_victim_that_does_not_fit_on_the_host_...` |
| a prompt that is cached whole | `test_a_prompt_that_is_cached_whole_...` |
| logprobs of a prompt that is cached | `test_sampling.py::test_logprobs_of_the_prompt_equal_transformers_whatever_is_cached` |
| hashes collide | `test_a_digest_that_collides_reuses_nothing_wrong` |
| tenants see each other's prefixes | `test_sampling.py::test_salts_share_no_cached_blocks` |
| n samples with a seed are equal, or end together | `test_samples_of_one_seed_differ_...` |
| a neighbour changes a seeded sample | `test_a_seeded_sample_is_the_same_beside_anybody` |
| a character is split over tokens | `test_detokenizer.py::test_streamed_text_is_the_full_decoding_...` |
| a stop text is split over tokens | `test_detokenizer.py::test_a_stop_text_across_tokens_is_never_shown` |
| who leaves goes on holding blocks | `TestWhoLeavesHoldsNothing` |
| the queue has no end | `test_what_is_beyond_the_queue_is_refused_and_n_counts_n` |
| the same over HTTP: a character or a stop text in parts | `test_server_fields.py::test_a_character_of_several_tokens_...`, `test_a_stop_text_that_comes_in_parts_...` |
| the same over HTTP: who leaves, streamed or not | `test_server_faults.py::TestAClientThatLeaves` |
| the same over HTTP: the queue has no end | `test_server_faults.py::TestAFullQueue` |
| the same over HTTP: tenants | `test_server_errors.py::TestKeys::test_tenants_share_no_cached_blocks` |
| the same over HTTP: samples that end together | `test_server.py::test_the_chunks_of_a_chat_have_the_shape_of_openai` |
| chunks of a stream lack fields, end twice or not at all | `test_server.py::test_the_chunks_of_...` |
| beam search stops too early or late | `test_beam_search.py::test_equals_transformers` |
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvblocks import BlockManager
from kvruntime import (
    BeamSearchParams,
    Engine,
    EngineBusy,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    SamplingParams,
)
from kvruntime.request import Request

from .simulated_model import answers, simulated_engine

GREEDY = {"temperature": 0, "ignore_eos": True}


def make(num_blocks: int, block_size: int = 4, **settings: Any) -> Engine:
    """An engine with a simulated model."""
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, **settings)
    return simulated_engine(config)[0]


def ask(request_id: int, length: int, **params: Any) -> Request:
    """A request whose prompt shares no block with another's."""
    prompt = [3 + (7 * request_id + i * (request_id + 1)) % 29 for i in range(length)]
    return Request(
        request_id, "", prompt, SamplingParams(**{**GREEDY, **params}), seed=params.get("seed", 0)
    )


def ask_beams(request_id: int, length: int, **params: Any) -> Request:
    """Likewise, by beams."""
    prompt = ask(request_id, length).prompt_token_ids
    return Request(request_id, "", prompt, BeamSearchParams(**params), seed=0)


def finish(engine: Engine) -> None:
    """Run until nobody is left."""
    for _ in range(10_000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    engine.manager.check()
    assert engine.stats().num_leaked_blocks == 0


def tokens(request: Request) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in request.answers()]


def right(engine: Engine, request: Request) -> list[list[int]]:
    return answers(request, engine.max_model_len)


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    engine = make(num_blocks=8)
    small = ask(1, 8, max_tokens=5)
    with pytest.raises(InvalidRequest, match="the prompt has 40 tokens, but the pool holds 32"):
        engine.add(ask(0, 40))
    engine.add(small)
    finish(engine)
    assert tokens(small) == right(engine, small)
    assert engine.stats().num_rejections == 1
    assert engine.stats().num_steps == 5


def test_preemptions_of_a_request_are_few() -> None:
    """Whoever comes later cannot take what it was given back."""
    engine = make(num_blocks=8)
    requests = [ask(i, 6, max_tokens=24) for i in range(8)]
    for request in requests:
        engine.add(request)
    finish(engine)
    assert [tokens(r) for r in requests] == [right(engine, r) for r in requests]
    assert engine.stats().num_preemptions_recompute > 0
    assert max(request.num_preemptions for request in requests) <= len(requests)


def test_a_request_preempted_after_5_of_12_tokens_is_answered_as_if_undisturbed() -> None:
    """Tokens, logprobs, penalties and counts; no token is chosen twice."""
    asked: dict[str, Any] = {
        "max_tokens": 12,
        "logprobs": 2,
        "temperature": 0.9,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "seed": 4,
    }
    undisturbed = ask(1, 8, **asked)
    roomy = make(num_blocks=64)
    roomy.add(undisturbed)
    finish(roomy)

    engine = make(num_blocks=6, prefix_caching=False)
    old, new = ask(0, 6, max_tokens=12), ask(1, 8, **asked)
    engine.add(old)
    engine.add(new)
    [victim] = new.sequences
    chosen_when_preempted = 0
    while engine.has_work:
        engine.step()
        if new.num_preemptions and not chosen_when_preempted:
            chosen_when_preempted = victim.num_output_tokens
    assert chosen_when_preempted == 5
    assert victim.output_token_ids == undisturbed.sequences[0].output_token_ids
    assert victim.logprobs == undisturbed.sequences[0].logprobs
    assert victim.cumulative_logprob == undisturbed.sequences[0].cumulative_logprob
    assert len(victim.logprobs) == len(victim.output_token_ids) == 12
    assert engine.stats().num_generated_tokens == 24
    assert engine.stats().num_preemptions_recompute == 1


def test_a_victim_that_does_not_fit_on_the_host_is_recomputed_and_the_engine_goes_on() -> None:
    engine = make(num_blocks=10, num_host_blocks=2, preemption="swap", prefix_caching=False)
    old, new = ask(0, 15, max_tokens=12), ask(1, 19, max_tokens=12)
    engine.add(old)
    engine.add(new)
    finish(engine)
    assert [tokens(old), tokens(new)] == [right(engine, old), right(engine, new)]
    stats = engine.stats()
    assert (stats.num_swap_fallbacks, stats.num_preemptions_recompute) == (1, 1)
    assert (stats.num_preemptions_swap, stats.num_swapped_out_blocks) == (0, 0)


def test_a_prompt_that_is_cached_whole_computes_its_last_block_and_stays_findable() -> None:
    engine = make(num_blocks=16)
    prompt = ask(0, 8).prompt_token_ids
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    same = [Request(number, "", prompt, params, seed=0) for number in range(3)]
    computed = []
    for request in same:
        before = engine.stats().num_prefill_tokens
        engine.add(request)
        finish(engine)
        assert tokens(request) == right(engine, request)
        computed.append(engine.stats().num_prefill_tokens - before)
    assert [request.num_cached_tokens for request in same] == [0, 4, 4]
    assert computed == [8, 4, 4]


def test_a_digest_that_collides_reuses_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many hashes as a broken digest can give: one.
    broken = partial(BlockManager, digest=lambda _: bytes(32))
    monkeypatch.setattr("kvruntime.engine.BlockManager", broken)
    engine = make(num_blocks=16)
    requests = [ask(i, 12, max_tokens=4) for i in range(3)]
    for request in requests:
        engine.add(request)
        finish(engine)
    assert [tokens(r) for r in requests] == [right(engine, r) for r in requests]
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]


def test_samples_of_one_seed_differ_and_each_goes_on_to_its_own_end() -> None:
    engine = make(num_blocks=64)
    request = ask(0, 6, n=4, max_tokens=24, temperature=1.0, ignore_eos=False, seed=3)
    engine.add(request)
    finish(engine)
    assert tokens(request) == right(engine, request)
    assert len({tuple(one) for one in tokens(request)}) == 4
    assert len({len(one) for one in tokens(request)}) > 1
    reasons = {sequence.finish_reason for sequence in request.sequences}
    assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}
    assert engine.stats().num_prefill_tokens == 6
    assert engine.stats().num_copies == 3


@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_a_seeded_sample_is_the_same_beside_anybody(budget: int, num_blocks: int) -> None:
    def sampled(others: list[Request]) -> list[list[int]]:
        engine = make(num_blocks=num_blocks, max_num_batched_tokens=budget)
        seeded = ask(9, 7, max_tokens=16, temperature=1.0, seed=5)
        for request in [*others[:1], seeded, *others[1:]]:
            engine.add(request)
        finish(engine)
        return tokens(seeded)

    unseeded = [ask(i, 5, max_tokens=16, temperature=1.0, seed=100 + i) for i in range(3)]
    assert sampled(unseeded) == sampled([]) == sampled([ask(4, 9, n=3, max_tokens=9)])


def test_what_is_beyond_the_queue_is_refused_and_n_counts_n() -> None:
    engine = make(num_blocks=64, max_num_seqs=3, max_num_waiting=4)
    running = ask(100, 4, max_tokens=6, n=3)
    engine.add(running)
    engine.step()
    accepted, refused = [], 0
    for number in range(10):
        request = ask(number, 4, max_tokens=6, n=3 if number == 2 else 1)
        try:
            engine.add(request)
            accepted.append(request)
        except EngineBusy as error:
            refused += 1
            message = str(error)
    assert [request.request_id for request in accepted] == [0, 1, 3, 4]
    assert refused == engine.stats().num_rejections == 6
    assert message == "at most 4 answers may wait, got 1 more than the 4 that wait already"
    finish(engine)
    for request in [running, *accepted]:
        assert tokens(request) == right(engine, request)


class TestWhoLeavesHoldsNothing:
    """An abort gives all blocks back at once, whatever the state, and changes nobody else."""

    def reach(self, engine: Engine, there: Callable[[], bool]) -> None:
        for _ in range(100):
            if there():
                return
            engine.step()
        raise AssertionError("the state was not reached")

    @pytest.mark.parametrize("kind", ["one", "samples", "beams"])
    @pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "swapped"])
    def test_in_every_state(self, state: str, kind: str) -> None:
        engine = make(
            num_blocks=14,
            max_num_batched_tokens=8,
            max_num_seqs=8,
            preemption="swap" if state == "swapped" else "recompute",
            prefix_caching=False,
        )
        old = ask(0, 16, max_tokens=36)
        if kind == "beams":
            leaving = ask_beams(1, 17, num_beams=3, max_tokens=30, ignore_eos=True)
        else:
            leaving = ask(1, 17, n=3 if kind == "samples" else 1, max_tokens=30)
        later = ask(2, 5, max_tokens=9)
        engine.add(old)
        engine.add(leaving)
        reached = {
            "waiting": lambda: True,
            "prefilling": lambda: leaving.sequences[0].num_computed_tokens == 8,
            "decoding": lambda: leaving.sequences[0].num_output_tokens == 2,
            "preempted": lambda: leaving.num_preemptions > 0,
            "swapped": lambda: leaving.sequences[-1].is_swapped,
        }
        self.reach(engine, reached[state])
        engine.add(later)
        gone = list(leaving.sequences)
        engine.abort(leaving)

        assert all(sequence.seq_id not in engine.manager for sequence in gone)
        engine.manager.check()
        pool = engine.manager.stats()
        assert pool.num_free_host_blocks == pool.num_host_blocks
        held = {
            block
            for s in engine.scheduler.running
            for block in engine.manager.block_table(s.seq_id)
        }
        assert pool.num_held_blocks == len(held)
        assert pool.num_free_blocks == 14 - len(held)
        finish(engine)
        for request in (old, later):
            assert tokens(request) == right(engine, request)
        if state in {"preempted", "swapped"}:
            stats = engine.stats()
            assert stats.num_preemptions_recompute + stats.num_preemptions_swap > 0
