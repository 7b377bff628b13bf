"""Replays through the real manager: known answers, what is held, and requests that overlap."""

import os
from pathlib import Path

import pytest

from kvblocks import BlockManager
from kvblocks.errors import InvalidTrace
from kvblocks.simulate import Service, Simulation
from kvblocks.traces import Request, Trace, read_trace

from .naive_cache import trace_of
from .test_simulate import random_prompts

MOONCAKE = Path(os.environ.get("KVBLOCKS_TRACES", "traces")).joinpath(
    "mooncake", "conversation_trace.jsonl"
)


@pytest.fixture(scope="module")
def mooncake() -> Simulation:
    if not MOONCAKE.is_file():
        pytest.skip(f"{MOONCAKE} is not there")
    return Simulation(read_trace(MOONCAKE))


@pytest.mark.parametrize(
    ("capacity", "ignored", "held"),
    [
        (1_000, 12_988, 12_988),
        (5_000, 34_185, 34_179),
        (10_000, 62_001, 61_999),
        (50_000, 102_723, 102_722),
        (300_000, 105_592, 105_592),
    ],
)
def test_the_engine_finds_the_known_blocks_of_the_mooncake_trace(
    mooncake: Simulation, capacity: int, ignored: int, held: int
) -> None:
    assert mooncake.engine("lru", capacity).hit_blocks == ignored
    assert mooncake.engine("lru", capacity, holds_outputs=True).hit_blocks == held


@pytest.mark.parametrize("seed", range(10))
def test_two_tokens_a_block_find_what_all_tokens_find(seed: int) -> None:
    size = 5
    # Every prompt ends in the middle of a block, at its end, or holds one token alone.
    prompts = [
        [token for name in prompt for token in [ord(name)] * size] + [0] * (seed % size)
        for prompt in random_prompts(seed)
    ]
    prompts = [prompt or [1] for prompt in prompts]
    requests = tuple(
        Request(None, len(tokens), 3, [tokens[at] for at in range(0, len(tokens) - size + 1, size)])
        for tokens in prompts
    )
    simulation = Simulation(Trace("mooncake", size, requests))
    for capacity in (8, 12, 40):
        manager = BlockManager(capacity, size)
        for number, tokens in enumerate(prompts):
            found = manager.allocate(number, tokens).num_cached_tokens
            manager.append({number: len(tokens) - found})
            manager.commit(number, len(tokens))
            manager.append({number: 3})
            manager.free(number)
        outcome = simulation.engine("lru", capacity, holds_outputs=True)
        assert outcome.hit_tokens == manager.stats().num_cached_tokens
        assert outcome.evictions == manager.stats().num_evicted_blocks


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    assert Simulation(trace_of(["ab", "ab"])).engine("lru", 10).hit_blocks == 1


def test_a_last_block_that_is_not_full_is_not_found() -> None:
    requests = tuple(Request(None, 7, 0, "ab") for _ in range(2))
    found = Simulation(Trace("mooncake", 4, requests)).engine("lru", 10)
    assert (found.hit_blocks, found.total_blocks, found.hit_tokens) == (1, 4, 4)


def test_tokens_without_a_name_take_blocks_and_are_not_found() -> None:
    requests = tuple(Request(None, 13, 0, "a") for _ in range(2))
    simulation = Simulation(Trace("sessions", 4, requests))
    assert simulation.engine("lru", 4).hit_blocks == 1
    assert simulation.engine("lru", 3).refused_requests == 2


def test_a_request_that_does_not_fit_is_refused_and_counted() -> None:
    trace = trace_of(["abc", "a", "a"])
    found = Simulation(trace).engine("lru", 2)
    assert (found.refused_requests, found.total_blocks) == (1, 5)


def test_outputs_take_blocks_only_when_held() -> None:
    requests = (Request(None, 2, 100, "ab"),)
    simulation = Simulation(Trace("mooncake", 1, requests))
    assert simulation.engine("lru", 2).refused_requests == 0
    assert simulation.engine("lru", 101, holds_outputs=True).refused_requests == 1


def test_evictions_before_the_measured_requests_do_not_count() -> None:
    trace = trace_of(["abc", "def", "d", "d"])
    assert Simulation(trace).engine("lru", 3).evictions == 4
    assert Simulation(trace, measure_last=0.5).engine("lru", 3).evictions == 1


def test_belady_needs_the_index_semantics() -> None:
    with pytest.raises(InvalidTrace, match="belady knows the future"):
        Simulation(trace_of(["a"])).engine("belady", 1)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="capacity must be at least 1, got 0"):
        Simulation(trace_of(["a"])).engine("lru", 0)


SLOW = Service(prefill_rate=1.0, decode_rate=1.0)


def arrivals(*requests: tuple[float, int, int, str]) -> Simulation:
    """Each: when it comes, tokens of its prompt, generated tokens, names of blocks of one token."""
    return Simulation(Trace("mooncake", 1, tuple(Request(*request) for request in requests)))


def test_a_prompt_is_found_by_others_once_it_is_computed() -> None:
    computed, early = (0.0, 2, 9, "ab"), (1.0, 3, 0, "abc")
    assert arrivals(computed, early).engine("lru", 20, service=SLOW).hit_blocks == 0
    late = (2.0, 3, 0, "abc")
    assert arrivals(computed, late).engine("lru", 20, service=SLOW).hit_blocks == 2


def test_a_request_waits_until_there_is_room() -> None:
    load = arrivals((0.0, 2, 3, "ab"), (1.0, 2, 0, "cd")).engine("lru", 3, service=SLOW).load
    assert load is not None
    # The first one holds two of three blocks for 2 seconds of its prompt and 3 of its answer.
    assert (load.num_waited, load.longest_wait_seconds, load.mean_wait_seconds) == (1, 4.0, 2.0)
    assert (load.peak_running_requests, load.peak_held_blocks) == (1, 2)


def test_held_outputs_are_reserved_when_a_request_is_admitted() -> None:
    requests = ((0.0, 1, 2, "a"), (0.0, 1, 2, "b"))
    simulation = arrivals(*requests)
    held = simulation.engine("lru", 5, holds_outputs=True, service=SLOW).load
    ignored = simulation.engine("lru", 5, service=SLOW).load
    assert held is not None
    assert ignored is not None
    assert (held.peak_running_requests, ignored.peak_running_requests) == (1, 2)
    assert held.longest_wait_seconds == 3.0


def test_nobody_overtakes_who_waits() -> None:
    requests = ((0.0, 3, 0, "abc"), (1.0, 3, 0, "def"), (2.0, 1, 0, "g"))
    load = arrivals(*requests).engine("lru", 4, service=SLOW).load
    assert load is not None
    assert load.num_waited == 2


def test_requests_overlap_in_the_order_in_which_they_came() -> None:
    late_first = arrivals((5.0, 2, 0, "ab"), (0.0, 2, 0, "ab"))
    assert late_first.engine("lru", 20, service=SLOW).hit_blocks == 1


def test_lengths_alone_can_be_replayed_for_their_load() -> None:
    trace = Trace("azure", None, (Request(0.0, 30, 10), Request(1.0, 20, 5)))
    found = Simulation(trace, block_size=16).engine("lru", 10, service=SLOW, holds_outputs=True)
    assert (found.hit_blocks, found.total_blocks) == (0, 4)
    assert found.load is not None
    assert found.load.peak_held_blocks == 5


def test_requests_without_a_time_cannot_overlap() -> None:
    with pytest.raises(InvalidTrace, match="some do not say"):
        Simulation(trace_of(["a"])).engine("lru", 1, service=SLOW)
