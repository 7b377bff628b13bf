"""Replays of the prefix index: against naive caches, an exhaustive optimum, and known answers."""

import os
import random
from functools import cache
from pathlib import Path

import pytest

from kvblocks.errors import InvalidConfig, InvalidTrace
from kvblocks.policies import make_policy
from kvblocks.simulate import Outcome, Simulation
from kvblocks.simulate.leaves import LeafCache
from kvblocks.simulate.prefixes import build_tree
from kvblocks.traces import Request, Trace, read_trace

from .naive_cache import Rank, block_fifo_hits, leaf_first_hits, most_hits, trace_of

MOONCAKE = Path(os.environ.get("KVBLOCKS_TRACES", "traces")).joinpath(
    "mooncake", "conversation_trace.jsonl"
)
needs_mooncake = pytest.mark.skipif(not MOONCAKE.is_file(), reason=f"{MOONCAKE} is not there")

RANKS: dict[str, Rank] = {
    "lru": lambda leaf, used, *_: used[leaf],
    "lfu": lambda leaf, used, num_hits, _: (num_hits[leaf], used[leaf]),
    "slru": lambda leaf, used, num_hits, _: (num_hits[leaf] > 0, used[leaf]),
    "span": lambda leaf, used, _, created: (7 * used[leaf] - 3 * created[leaf], used[leaf]),
}
CAPACITIES = (1, 2, 3, 5, 8, 13, 40)


def random_prompts(seed: int, number: int = 60, longest: int = 6) -> list[str]:
    """Prompts over a small alphabet, so that most share something."""
    rng = random.Random(seed)  # noqa: S311 -- repeatable, not secret
    return ["".join(rng.choices("abc", k=rng.randint(0, longest))) for _ in range(number)]


@cache
def mooncake(measure_last: float) -> Simulation:
    return Simulation(read_trace(MOONCAKE), measure_last=measure_last)


@pytest.mark.parametrize("policy", RANKS)
@pytest.mark.parametrize("seed", range(20))
def test_leaf_first_policies_find_what_a_naive_cache_finds(policy: str, seed: int) -> None:
    prompts = random_prompts(seed)
    simulation = Simulation(trace_of(prompts))
    for capacity in CAPACITIES:
        expected = sum(leaf_first_hits(prompts, capacity, RANKS[policy]))
        assert simulation.index(policy, capacity).hit_blocks == expected


@pytest.mark.parametrize("seed", range(20))
def test_fifo_evicts_any_block_in_the_order_in_which_it_came(seed: int) -> None:
    prompts = random_prompts(seed)
    simulation = Simulation(trace_of(prompts))
    for capacity in CAPACITIES:
        expected = sum(block_fifo_hits(prompts, capacity))
        assert simulation.index("fifo", capacity).hit_blocks == expected


@pytest.mark.parametrize("seed", range(12))
def test_belady_finds_as_much_as_any_cache_could(seed: int) -> None:
    prompts = random_prompts(seed, number=7, longest=3)
    simulation = Simulation(trace_of(prompts))
    for capacity in (1, 2, 3, 4):
        assert simulation.index("belady", capacity).hit_blocks == most_hits(prompts, capacity)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("measure_last", [1.0, 0.5, 0.3])
def test_the_curve_answers_as_a_replay_at_each_capacity_does(
    seed: int, measure_last: float
) -> None:
    rng = random.Random(seed)  # noqa: S311 -- repeatable, not secret
    requests = tuple(
        Request(None, max(1, 4 * len(prompt) - rng.randint(0, 3)), 0, prompt)
        for prompt in random_prompts(seed)
    )
    trace = Trace("mooncake", 4, requests)
    simulation = Simulation(trace, measure_last=measure_last)
    # The same policy under another name, so that it is replayed block by block.
    policies = pytest.MonkeyPatch()
    with policies.context() as patch:
        patch.setattr("kvblocks.simulate.make_policy", lambda _: _LeafFirstLRU())
        for capacity in CAPACITIES:
            replayed = simulation.index("replayed", capacity)
            assert _named(simulation.curve().outcome(capacity), "replayed") == replayed


class _LeafFirstLRU:
    def rank(self, run: object) -> int:
        return run.last_used  # type: ignore[attr-defined, no-any-return]  # what a policy sees


def _named(outcome: Outcome, policy: str) -> Outcome:
    figures = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return Outcome(**{**figures, "policy": policy})


def test_a_block_is_found_only_after_the_same_blocks() -> None:
    simulation = Simulation(trace_of(["ab", "cb"]))
    assert simulation.index("lru", 10).hit_blocks == 0


def test_scopes_share_nothing() -> None:
    requests = tuple(Request(None, 2, 0, "ab", scope) for scope in ("x", "y", "x"))
    assert Simulation(Trace("mooncake", 1, requests)).index("lru", 10).hit_blocks == 2


def test_hit_tokens_never_exceed_the_prompt() -> None:
    requests = tuple(Request(None, 5, 0, "ab") for _ in range(2))
    found = Simulation(Trace("mooncake", 4, requests)).index("lru", 10)
    assert (found.hit_blocks, found.hit_tokens, found.total_tokens) == (2, 5, 10)


def test_only_the_last_share_is_measured_and_the_rest_fills_the_cache() -> None:
    trace = trace_of(["ab", "ab", "ab", "cd"])
    found = Simulation(trace, measure_last=0.5).index("lru", 10)
    assert (found.hit_blocks, found.total_blocks) == (2, 4)


def test_the_capacity_for_the_ceiling_is_the_least_that_reaches_it() -> None:
    curve = Simulation(trace_of(random_prompts(1))).curve()
    capacity = curve.capacity_for(1.0)
    assert curve.outcome(capacity).hit_tokens == curve.ceiling_tokens
    assert curve.outcome(capacity - 1).hit_tokens < curve.ceiling_tokens


def test_requests_found_whole_are_counted() -> None:
    assert Simulation(trace_of(["ab", "abc", "ab", "abc"])).curve().num_whole_requests == 2


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady"])
def test_a_capacity_of_nothing_is_refused(policy: str) -> None:
    with pytest.raises(InvalidTrace, match="capacity must be at least 1, got 0"):
        Simulation(trace_of(["a"])).index(policy, 0)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_the_measured_share_has_a_range(share: float) -> None:
    with pytest.raises(InvalidTrace, match="measure_last must be above 0 and at most 1, got"):
        Simulation(trace_of(["a"]), measure_last=share)


def test_an_unknown_policy_is_refused_with_those_known() -> None:
    with pytest.raises(InvalidConfig, match="policy must be one of fifo, lfu, lru, "):
        Simulation(trace_of(["a"])).index("best", 1)


def test_hits_of_lengths_only_are_refused() -> None:
    trace = Trace("azure", None, (Request(0.0, 10, 2),))
    with pytest.raises(InvalidTrace, match="the format azure has lengths only"):
        Simulation(trace).index("lru", 10)


def test_progress_counts_requests() -> None:
    for policy in ("lru", "fifo", "belady"):
        seen: list[int] = []
        Simulation(trace_of(["a", "b", "c"])).index(policy, 2, seen.append)
        assert seen == [1, 2, 3]


@needs_mooncake
def test_a_cache_that_never_evicts_finds_the_known_blocks_of_the_mooncake_trace() -> None:
    curve = mooncake(1.0).curve()
    assert (curve.ceiling_blocks, curve.total_blocks) == (105_710, 288_500)
    assert (curve.ceiling_tokens, curve.total_tokens) == (54_098_411, 144_793_823)
    assert curve.num_whole_requests == 118


@needs_mooncake
@pytest.mark.parametrize(
    ("capacity", "hit_blocks", "hit_tokens", "evictions"),
    [
        (1_000, 12_847, 6_575_459, 274_653),
        (5_000, 32_260, 16_505_817, 251_240),
        (10_000, 61_046, 31_238_981, 217_454),
        (30_000, 93_978, 48_093_740, 164_522),
        (100_000, 104_924, 53_695_979, 83_576),
    ],
)
def test_lru_finds_the_known_blocks_of_the_mooncake_trace(
    capacity: int, hit_blocks: int, hit_tokens: int, evictions: int
) -> None:
    found = mooncake(1.0).index("lru", capacity)
    assert (found.hit_blocks, found.hit_tokens, found.evictions) == (
        hit_blocks,
        hit_tokens,
        evictions,
    )


@needs_mooncake
@pytest.mark.parametrize(
    ("policy", "hit_tokens"),
    [("fifo", 12_302_919), ("lru", 14_633_669), ("belady", 27_038_068)],
)
def test_policies_find_the_tokens_that_another_simulator_finds(
    policy: str, hit_tokens: int
) -> None:
    # As kvcache-simulator 0.1.3 counts the last half of the Mooncake conversation trace.
    found = mooncake(0.5).index(policy, 9_776)
    assert (found.hit_tokens, found.total_tokens) == (hit_tokens, 67_915_607)


def test_a_block_that_is_not_full_is_no_going_on() -> None:
    """Blocks of 4: a prompt of 6 tokens ends in a block that the next turn does not find."""
    turns = (Request(None, 6, 0, "ab"), Request(None, 10, 0, "acd"), Request(None, 4, 0, "x"))
    cache = LeafCache(build_tree(Trace("mooncake", 4, turns)), 9, make_policy("span"))
    for request, path in enumerate(build_tree(Trace("mooncake", 4, turns)).paths):
        cache.replay(request, path, None)
    # a; b, not full; c, which goes on from a; d, not full; x
    assert [block.created for block in cache.blocks] == [0, 0, 0, 1, 2]


@needs_mooncake
@pytest.mark.parametrize("capacity", [3_000, 9_776, 20_000])
@pytest.mark.parametrize("semantics", ["index", "engine"])
def test_span_finds_more_than_lru_in_the_second_half_of_the_mooncake_trace(
    semantics: str, capacity: int
) -> None:
    # Its one constant, three quarters, was chosen on the first half.
    replay = getattr(mooncake(0.5), semantics)
    assert replay("span", capacity).hit_tokens > replay("lru", capacity).hit_tokens
