"""The rules of the facade in vLLM's shape."""

from typing import Any

import pytest

from kvblocks import BlockManager, InvalidConfig, InvalidLength, InvalidTokens
from kvblocks.facades.vllm import KVCacheBlocks, PrefixCacheStats, VLLMFacade

from .facade_requests import LoRA, Picture, Place, Request, request
from .helpers import refused


def make(
    num_blocks: int = 8, *, prefix_caching: bool = True, max_model_len: int = 100
) -> VLLMFacade:
    manager = BlockManager(num_blocks, 4, prefix_caching=prefix_caching)
    return VLLMFacade(manager, max_model_len)


def admit(cache: VLLMFacade, one: Request) -> int:
    """Schedule and compute a whole prompt; how much of it was cached."""
    blocks, num_cached, boundary = cache.get_computed_blocks(one)
    assert boundary == 0
    assert cache.allocate_slots(one, one.num_tokens - num_cached, num_cached, blocks)
    one.num_computed_tokens = one.num_tokens
    return num_cached


def test_a_look_up_changes_nothing() -> None:
    cache = make()
    one = request("a", range(9))
    admit(cache, one)
    cache.free(one)
    before = cache.manager.state_digest()
    assert cache.get_computed_blocks(request("b", range(9))) == (KVCacheBlocks(((0, 1),)), 8, 0)
    assert cache.manager.state_digest() == before


def test_a_hit_leaves_the_last_token() -> None:
    cache = make()
    one = request("a", range(8))
    admit(cache, one)
    cache.free(one)
    assert cache.get_computed_blocks(request("b", range(8)))[1] == 4


@pytest.mark.parametrize(("limit", "num_cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_hit_can_be_limited(limit: int, num_cached: int) -> None:
    cache = make()
    one, two = request("a", range(9)), request("b", range(9))
    admit(cache, one)
    cache.free(one)
    blocks, num_found, _ = cache.get_computed_blocks(two, limit)
    assert num_found == num_cached
    assert cache.allocate_slots(two, 9 - num_cached, num_cached, blocks) is not None
    assert cache.manager.num_committed_tokens("b") == num_cached


def test_a_hit_limit_is_not_negative() -> None:
    with pytest.raises(InvalidLength, match="max_cache_hit_length must be at least 0, got -1"):
        make().get_computed_blocks(request("a", range(9)), -1)


def test_a_request_can_skip_the_prefix_cache() -> None:
    cache = make()
    one, two = request("a", range(9)), request("b", range(9))
    admit(cache, one)
    cache.free(one)
    two.skip_reading_prefix_cache = True
    assert admit(cache, two) == 0
    assert cache.manager.num_committed_tokens("b") == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache = make(prefix_caching=False)
    one = request("a", range(9))
    admit(cache, one)
    cache.free(one)
    assert cache.get_computed_blocks(request("b", range(9))) == (KVCacheBlocks(((),)), 0, 0)
    cache.record_prefix_cache_stats(one, 0)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()


def test_salts_are_apart() -> None:
    cache = make()
    one = request("a", range(9), salt="x")
    admit(cache, one)
    cache.free(one)
    assert cache.get_computed_blocks(request("b", range(9)))[1] == 0
    assert cache.get_computed_blocks(request("b", range(9), salt="x"))[1] == 8


def test_adapters_are_apart_by_name_and_path() -> None:
    cache = make(num_blocks=20)
    adapters = [None, LoRA("a", "/1"), LoRA("a", "/2"), LoRA("b", "/1")]
    for i, adapter in enumerate(adapters):
        one = request(f"{i}", range(9))
        one.lora_request = adapter
        assert admit(cache, one) == 0
        cache.free(one)
    for i, adapter in enumerate(adapters):
        one = request(f"again {i}", range(9))
        one.lora_request = adapter
        assert cache.get_computed_blocks(one)[1] == 8


def test_prompts_are_apart_from_where_their_pictures_differ() -> None:
    cache = make(num_blocks=20)
    one, two = request("a", range(13)), request("b", range(13))
    one.mm_features = [Picture("cat", Place(5))]
    admit(cache, one)
    one.all_token_ids.append(0)
    cache.allocate_slots(one, 1)
    two.mm_features = [Picture("dog", Place(5))]
    assert cache.get_computed_blocks(two)[1] == 4
    two.mm_features = [Picture("cat", Place(5))]
    assert cache.get_computed_blocks(two)[1] == 12


def test_a_picture_in_a_later_chunk_counts() -> None:
    cache = make(num_blocks=20)
    one, two = request("a", range(13)), request("b", range(13))
    one.mm_features = [Picture("cat", Place(9))]
    cache.allocate_slots(one, 4)
    one.num_computed_tokens = 4
    cache.allocate_slots(one, 9)
    one.num_computed_tokens = 13
    cache.free(one)
    assert cache.get_computed_blocks(two)[1] == 8


def test_embeddings_are_refused() -> None:
    cache = make()
    one = request("a", range(9))
    one.prompt_embeds = object()
    with pytest.raises(InvalidTokens, match="got embeddings with request 'a'"):
        cache.get_computed_blocks(one)
    with refused(cache.manager, InvalidTokens):
        cache.allocate_slots(one, 9)


def test_blocks_are_taken_chunk_by_chunk() -> None:
    cache = make()
    one = request("a", range(10))
    assert cache.allocate_slots(one, 3) == KVCacheBlocks(((0,),))
    one.num_computed_tokens = 3
    assert cache.allocate_slots(one, 1) == KVCacheBlocks(((),))
    one.num_computed_tokens = 4
    assert cache.allocate_slots(one, 6) == KVCacheBlocks(((1, 2),))
    assert cache.get_block_ids("a") == ([0, 1, 2],)


def test_new_blocks_leave_out_cached_ones() -> None:
    cache = make()
    one, two = request("a", range(9)), request("b", range(9))
    admit(cache, one)
    one.all_token_ids.append(9)
    cache.allocate_slots(one, 1)
    blocks, num_cached, _ = cache.get_computed_blocks(two)
    assert cache.allocate_slots(two, 1, num_cached, blocks) == KVCacheBlocks(((3,),))
    assert cache.get_block_ids("b") == ([0, 1, 3],)


def test_a_shortage_takes_nothing() -> None:
    cache = make(num_blocks=3)
    admit(cache, request("a", range(8)))
    before = cache.manager.state_digest()
    assert cache.allocate_slots(request("b", range(10, 15)), 5) is None
    assert cache.manager.state_digest() == before
    assert "b" not in cache.manager


def test_a_running_request_is_told_of_a_shortage() -> None:
    cache = make(num_blocks=2)
    one = request("a", range(8))
    admit(cache, one)
    one.all_token_ids.append(8)
    assert cache.allocate_slots(one, 1) is None
    assert cache.get_block_ids("a") == ([0, 1],)


@pytest.mark.parametrize(("reserved", "is_served"), [(1, True), (2, False)])
def test_reserved_blocks_stay_available(reserved: int, *, is_served: bool) -> None:
    cache = make(num_blocks=3)
    one = request("a", range(8))
    assert (cache.allocate_slots(one, 8, reserved_blocks=reserved) is not None) is is_served


@pytest.mark.parametrize(("reserved", "is_served"), [(1, True), (2, False)])
def test_reserved_blocks_stay_available_as_a_request_grows(
    reserved: int, *, is_served: bool
) -> None:
    cache = make(num_blocks=3)
    one = request("a", range(8))
    cache.allocate_slots(one, 4)
    one.num_computed_tokens = 4
    assert (cache.allocate_slots(one, 4, reserved_blocks=reserved) is not None) is is_served


@pytest.mark.parametrize(("num_tokens", "is_served"), [(12, True), (13, False)])
def test_a_whole_sequence_can_be_made_to_fit(num_tokens: int, *, is_served: bool) -> None:
    cache = make(num_blocks=3)
    one = request("a", range(num_tokens))
    taken = cache.allocate_slots(one, 4, full_sequence_must_fit=True)
    assert (taken == KVCacheBlocks(((0,),))) is is_served


def test_lookahead_takes_blocks_once() -> None:
    cache = make()
    one = request("a", range(4))
    assert cache.allocate_slots(one, 4, num_lookahead_tokens=3) == KVCacheBlocks(((0, 1),))
    one.num_computed_tokens = 4
    one.all_token_ids.append(4)
    assert cache.allocate_slots(one, 1, num_lookahead_tokens=3) == KVCacheBlocks(((),))


def test_lookahead_ends_with_the_model() -> None:
    cache = make(max_model_len=8)
    one = request("a", range(7))
    assert cache.allocate_slots(one, 7, num_lookahead_tokens=5) == KVCacheBlocks(((0, 1),))


def test_rejected_drafts_keep_their_blocks_and_are_not_found() -> None:
    cache = make()
    one = request("a", range(6))
    admit(cache, one)
    one.all_token_ids.append(6)
    assert cache.allocate_slots(one, 6) == KVCacheBlocks(((2,),))  # 1 token and 5 drafts
    one.num_computed_tokens = 7  # which were all rejected
    one.all_token_ids += [70, 80]
    assert cache.allocate_slots(one, 2) == KVCacheBlocks(((),))
    one.num_computed_tokens = 9
    cache.free(one)
    assert cache.get_computed_blocks(request("b", [*range(7), 70, 80]))[1] == 8


def test_external_tokens_count_as_new() -> None:
    cache = make()
    one = request("a", range(9))
    blocks = cache.allocate_slots(one, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert blocks == KVCacheBlocks(((0, 1),))
    one.num_computed_tokens = 8
    cache.cache_blocks(one, 8)
    assert cache.get_computed_blocks(request("b", range(9)))[1] == 8


def test_caching_can_be_delayed() -> None:
    cache = make()
    one = request("a", range(9))
    admit(cache, one)
    one.all_token_ids.append(9)
    cache.allocate_slots(one, 1, delay_cache_blocks=True)
    assert cache.manager.num_committed_tokens("a") == 0


def test_positions_in_flight_are_not_found() -> None:
    cache = make()
    one = request("a", range(9))
    admit(cache, one)
    one.num_in_flight_tokens = 5
    cache.cache_blocks(one, 9)
    assert cache.get_computed_blocks(request("b", range(9)))[1] == 4


def test_positions_whose_tokens_are_unknown_are_not_found() -> None:
    cache = make()
    one = request("a", range(6))
    cache.allocate_slots(one, 6, num_lookahead_tokens=3)
    one.num_computed_tokens = 9
    cache.cache_blocks(one, 9)
    assert cache.manager.num_committed_tokens("a") == 6


def test_exchanged_blocks_are_told_once() -> None:
    cache = make()
    one, two = request("a", range(5)), request("b", range(5))
    admit(cache, one)
    admit(cache, two)
    for each in (one, two):
        each.all_token_ids.append(5)
        cache.allocate_slots(each, 1)
    assert cache.take_changed_block_ids() == {"b": ([0, 3],)}
    assert cache.take_changed_block_ids() == {}


def test_the_tables_of_requests_that_are_gone_are_not_told() -> None:
    cache = make()
    one, two = request("a", range(5)), request("b", range(5))
    for each in (one, two):
        admit(cache, each)
    for each in (one, two):
        cache.cache_blocks(each, 5)
    cache.free(two)
    assert cache.take_changed_block_ids() == {}


def test_an_unknown_request_holds_nothing_and_is_freed_by_nobody() -> None:
    cache = make()
    cache.free(request("a", range(5)))
    assert cache.get_block_ids("a") == ([],)


def test_usage_leaves_out_what_is_cached() -> None:
    cache = make()
    one = request("a", range(9))
    admit(cache, one)
    assert cache.usage == 3 / 8
    cache.free(one)
    assert cache.usage == 0


def test_usage_counts_what_a_step_still_uses() -> None:
    cache = make()
    cache.manager.begin_step()
    one = request("a", range(8))
    admit(cache, one)
    cache.free(one)
    assert cache.usage == 2 / 8


def test_a_reset_forgets_what_is_cached() -> None:
    cache = make()
    admit(cache, one := request("a", range(9)))
    cache.free(one)
    assert cache.reset_prefix_cache()
    assert cache.get_computed_blocks(request("b", range(9)))[1] == 0


def test_statistics_are_taken_once_and_preempted_requests_stand_apart() -> None:
    cache = make()
    one, two = request("a", range(9)), request("b", range(7))
    two.num_preemptions = 1
    cache.record_prefix_cache_stats(one, 4)
    cache.record_prefix_cache_stats(two, 0)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats(1, 9, 4, 1, 7, 0)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()


def test_block_ids_can_be_asked_for_by_group() -> None:
    blocks = KVCacheBlocks(((3, 4),))
    assert blocks.get_block_ids(group_ids=[0]) == ([3, 4],)
    assert blocks.get_block_ids(allow_none=True) == ([3, 4],)


def test_no_block_ids_can_be_none() -> None:
    blocks = KVCacheBlocks(((3, 4),)).new_empty()
    assert blocks.get_block_ids() == ([],)
    assert blocks.get_block_ids(allow_none=True) is None


def test_a_look_up_that_is_out_of_date_is_refused() -> None:
    cache = make()
    one, two = request("a", range(9)), request("b", range(9))
    admit(cache, one)
    cache.free(one)
    blocks, num_cached, _ = cache.get_computed_blocks(two)
    cache.reset_prefix_cache()
    message = "begin where its cached prefix ends, got 8 of 9 tokens, cached 0: look it up again"
    with refused(cache.manager, InvalidLength, message):
        cache.allocate_slots(two, 1, num_cached, blocks)


def test_nothing_new_is_refused() -> None:
    cache = make()
    with refused(cache.manager, InvalidLength, "at least 1 token must be new, got 0"):
        cache.allocate_slots(request("a", range(4)), 0)


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "num_new_tokens",
        "num_new_computed_tokens",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "reserved_blocks",
    ],
)
def test_numbers_are_whole_and_not_negative(name: str, *, is_running: bool) -> None:
    cache = make()
    one = request("a", range(8))
    if is_running:
        cache.allocate_slots(one, 4)
        one.num_computed_tokens = 4
    numbers: dict[str, Any] = {"num_new_tokens": 4}
    for number in (1.5, float("nan")):
        with refused(cache.manager, TypeError, "cannot be interpreted as an integer"):
            cache.allocate_slots(one, **{**numbers, name: number})
    with refused(cache.manager, InvalidLength, f"{name} must be at least 0, got -100"):
        cache.allocate_slots(one, **{**numbers, name: -100})
    assert ("a" in cache.manager) is is_running


def test_the_longest_sequence_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        make(max_model_len=8.5)  # type: ignore[arg-type]


def test_a_request_at_the_end_of_the_model_is_refused_before_anything_is_committed() -> None:
    cache = make(max_model_len=8)
    one = request("a", range(8))
    admit(cache, one)
    message = "a position must be left of max_model_len 8, got 8 computed"
    with refused(cache.manager, InvalidLength, message):
        cache.allocate_slots(one, 1)
    assert cache.manager.num_committed_tokens("a") == 0


def test_encoder_tokens_are_refused() -> None:
    cache = make()
    with refused(cache.manager, InvalidLength, "there is no encoder cache, got 3 tokens"):
        cache.allocate_slots(request("a", range(4)), 4, num_encoder_tokens=3)


def test_a_running_request_brings_no_prefix() -> None:
    cache = make()
    one = request("a", range(4))
    admit(cache, one)
    with refused(cache.manager, InvalidLength, "brings no cached prefix, got 4 tokens"):
        cache.allocate_slots(one, 1, 4)


def test_a_request_does_not_go_back_behind_what_is_committed() -> None:
    cache = make()
    one = request("a", range(4))
    admit(cache, one)
    cache.cache_blocks(one, 4)
    one.num_computed_tokens = 0
    with refused(cache.manager, InvalidLength, "got 0 < 4: free it first"):
        cache.allocate_slots(one, 4)


def test_windows_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"without windows, got \(4,\)"):
        VLLMFacade(BlockManager(8, 4, windows=[4]), 32)
