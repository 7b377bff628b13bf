"""The rules of the facade in SGLang's shape."""

import pytest

from kvblocks import BlockManager, InvalidConfig, InvalidLength, InvalidPin, UnknownSequence
from kvblocks.facades.sglang import MatchPrefixParams, RadixKey, SGLangFacade, TreeNode

from .facade_requests import Request, look_up, request
from .helpers import refused


def make(num_blocks: int = 8) -> SGLangFacade:
    return SGLangFacade(BlockManager(num_blocks, 4, pin_limit=1.0))


def admit(cache: SGLangFacade, one: Request) -> None:
    slots = cache.alloc(one.num_tokens - look_up(cache, one), req=one)
    assert slots is not None


def cached(cache: SGLangFacade, num_tokens: int, *, salt: str | None = None) -> TreeNode:
    """Cache a prompt of distinct tokens; the end of what can be found of it."""
    one = request("cached", range(num_tokens), salt=salt)
    admit(cache, one)
    cache.checkpoint(one, up_to=num_tokens)
    cache.release_kv_cache(one)
    key = RadixKey(range(num_tokens), cache_salt=salt)
    return cache.match_prefix(MatchPrefixParams(key)).last_device_node


@pytest.mark.parametrize(("num_tokens", "num_found"), [(3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_match_has_all_whole_pages_of_its_key(num_tokens: int, num_found: int) -> None:
    cache = make()
    cached(cache, 8)
    found = cache.match_prefix(MatchPrefixParams(RadixKey(range(num_tokens))))
    assert found.device_prefix_len == num_found


def test_a_match_of_nothing_finds_nothing() -> None:
    found = make().match_prefix(MatchPrefixParams(RadixKey([])))
    assert found.device_prefix_len == 0


def test_a_match_can_be_limited() -> None:
    cache = make()
    cached(cache, 8)
    found = cache.match_prefix(MatchPrefixParams(RadixKey(range(8), limit=7)))
    assert found.device_prefix_len == 4


def test_a_match_has_one_node() -> None:
    found = make().match_prefix(MatchPrefixParams(RadixKey(range(8))))
    assert found.last_device_node is found.last_host_node is found.best_match_node


def test_a_match_changes_nothing() -> None:
    cache = make()
    cached(cache, 9)
    before = cache.manager.state_digest()
    cache.match_prefix(MatchPrefixParams(RadixKey(range(6))))
    assert cache.manager.state_digest() == before


@pytest.mark.parametrize(
    ("extra_key", "cache_salt"), [("x", None), (None, "x"), ("", None), (None, "('x', None)")]
)
def test_namespaces_are_apart(extra_key: str | None, cache_salt: str | None) -> None:
    cache = make(32)
    names: list[tuple[str | None, str | None]] = [
        (None, None),
        ("x", None),
        (None, "x"),
        ("x", "x"),
        ("", None),
        (None, "('x', None)"),
    ]
    one = Request("a", list(range(8)), cache_salt, extra_key)
    admit(cache, one)
    cache.checkpoint(one, up_to=8)
    found = [
        cache.match_prefix(MatchPrefixParams(RadixKey(range(8), name, cache_salt=salt)))
        for name, salt in names
    ]
    expected = [8 if name == (extra_key, cache_salt) else 0 for name in names]
    assert [each.device_prefix_len for each in found] == expected


def test_an_empty_salt_is_no_salt() -> None:
    cache = make()
    cached(cache, 8, salt="")
    found = cache.match_prefix(MatchPrefixParams(RadixKey(range(8))))
    assert found.device_prefix_len == 8


def test_slots_are_those_of_the_pages() -> None:
    cache = make()
    node = cached(cache, 8)
    one = request("a", [*range(8), 90, 91])
    assert look_up(cache, one) == 8
    assert cache.path_device_indices(node).tolist() == list(range(8))
    slots = cache.alloc(2, req=one)
    assert slots is not None
    assert slots.tolist() == [8, 9]
    assert cache.kv_indices(one).tolist() == list(range(12))


def test_slots_go_on_where_the_last_ones_ended() -> None:
    cache = make()
    one = request("a", range(3))
    admit(cache, one)
    slots = cache.alloc(3, req=one)
    assert slots is not None
    assert slots.tolist() == [3, 4, 5]


def test_a_shortage_takes_nothing() -> None:
    cache = make(num_blocks=3)
    admit(cache, request("a", range(8)))
    two = request("b", range(10, 15))
    look_up(cache, two)
    before = cache.manager.state_digest()
    assert cache.alloc(5, req=two) is None
    assert cache.manager.state_digest() == before


def test_cached_pages_are_evicted_for_others() -> None:
    cache = make(num_blocks=2)
    cached(cache, 8)
    admit(cache, request("a", range(10, 18)))
    assert cache.evictable_size() == 0


def test_a_locked_prefix_is_not_evicted() -> None:
    cache = make(num_blocks=2)
    node = cached(cache, 4)
    assert cache.inc_lock_ref(node).delta == -4
    one = request("a", range(10, 18))
    look_up(cache, one)
    assert cache.alloc(8, req=one) is None
    assert cache.dec_lock_ref(node).delta == 4
    assert cache.alloc(8, req=one) is not None


def test_a_prefix_is_locked_until_the_last_lock_is_given_back() -> None:
    cache = make()
    node = cached(cache, 8)
    deltas = [cache.inc_lock_ref(node), cache.inc_lock_ref(node)]
    deltas += [cache.dec_lock_ref(node), cache.dec_lock_ref(node)]
    assert [each.delta for each in deltas] == [-8, 0, 0, 8]


def test_locks_of_two_look_ups_are_apart() -> None:
    cache = make()
    one, two = cached(cache, 8), cached(cache, 8)
    cache.inc_lock_ref(one)
    cache.inc_lock_ref(two)
    assert cache.dec_lock_ref(one).delta == 0
    assert cache.dec_lock_ref(two).delta == 8


def test_nothing_can_be_locked() -> None:
    cache = make()
    node = cached(cache, 3)
    assert cache.inc_lock_ref(node).delta == 0
    assert cache.dec_lock_ref(node, None).delta == 0


def test_a_lock_is_given_back_once() -> None:
    cache = make()
    node = cached(cache, 8)
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    with refused(cache.manager, InvalidPin, "a node must be locked"):
        cache.dec_lock_ref(node)


def test_a_prefix_that_is_gone_cannot_be_locked() -> None:
    cache = make()
    node = cached(cache, 8)
    cache.reset()
    with refused(cache.manager, InvalidPin):
        cache.inc_lock_ref(node)
    with refused(cache.manager, InvalidPin, "a node must be locked"):
        cache.dec_lock_ref(node)


def test_a_reset_gives_locks_back() -> None:
    cache = make()
    node = cached(cache, 8)
    cache.inc_lock_ref(node)
    cache.reset()
    assert cache.available_size() == 32
    with refused(cache.manager, InvalidPin, "a node must be locked"):
        cache.dec_lock_ref(node)


def test_sizes_add_up_to_the_pool() -> None:
    cache = make()
    cached(cache, 8)
    admit(cache, request("a", range(20, 25)))
    cache.manager.begin_step()
    two = request("b", range(40, 44))
    admit(cache, two)
    cache.release_kv_cache(two)  # which the open step still uses
    assert cache.available_size() == 12
    assert cache.evictable_size() == 8
    assert cache.protected_size() == 12
    assert cache.total_size() == 20


def test_a_checkpoint_exchanges_pages_of_equal_content() -> None:
    cache = make()
    one, two = request("a", range(5)), request("b", range(5))
    for each in (one, two):
        admit(cache, each)
    for each in (one, two):
        cache.checkpoint(each, up_to=5)
    assert cache.kv_indices(two).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_a_checkpoint_can_be_repeated() -> None:
    cache = make()
    one = request("a", range(8))
    admit(cache, one)
    cache.checkpoint(one, up_to=8)
    cache.checkpoint(one, up_to=4)
    assert cache.manager.num_committed_tokens("a") == 8


def test_rejected_drafts_are_given_back() -> None:
    cache = make()
    one = request("a", range(6))
    admit(cache, one)
    cache.alloc(6, req=one)
    cache.free_segment(req=one, start_pos=5)
    one.all_token_ids[5:] = [50, 60, 70]
    slots = cache.alloc(3, req=one)
    assert slots is not None
    assert slots.tolist() == [5, 6, 7]
    cache.checkpoint(one, up_to=8)
    key = RadixKey([*range(5), 50, 60, 70])
    assert cache.match_prefix(MatchPrefixParams(key)).device_prefix_len == 8


def test_ids_that_were_given_back_are_forgotten() -> None:
    cache = make()
    one = request("a", range(4))
    admit(cache, one)
    cache.free_segment(req=one, start_pos=0)
    one.all_token_ids[:] = [50, 60, 70, 80]
    assert cache.alloc(4, req=one) is not None
    cache.checkpoint(one, up_to=4)
    key = RadixKey([50, 60, 70, 80])
    assert cache.match_prefix(MatchPrefixParams(key)).device_prefix_len == 4


def test_names_of_a_namespace_do_not_run_into_each_other() -> None:
    cache = make()
    one = Request("a", list(range(8)), "bc", "a")
    admit(cache, one)
    cache.checkpoint(one, up_to=8)
    key = RadixKey(range(8), "ab", cache_salt="c")
    assert cache.match_prefix(MatchPrefixParams(key)).device_prefix_len == 0


def test_nothing_new_is_refused() -> None:
    cache = make()
    one = request("a", range(5))
    admit(cache, one)
    with refused(cache.manager, InvalidLength, r"at least 1 position must be new, got 5\.\.5"):
        cache.alloc(0, req=one)


@pytest.mark.parametrize("number", [1.5, float("nan")])
def test_the_size_of_a_need_is_a_whole_number(number: float) -> None:
    cache = make()
    one = request("a", range(5))
    look_up(cache, one)
    with refused(cache.manager, TypeError, "cannot be interpreted as an integer"):
        cache.alloc(number, req=one)  # type: ignore[arg-type]
    assert "a" not in cache.manager


def test_a_look_up_that_is_out_of_date_is_refused() -> None:
    cache = make()
    cached(cache, 8)
    one = request("a", range(9))
    look_up(cache, one)
    cache.reset()
    with refused(cache.manager, InvalidLength, "cached 0: look it up again"):
        cache.alloc(1, req=one)


def test_a_prompt_is_never_cached_whole() -> None:
    cache = make()
    node = cached(cache, 8)
    one = request("a", range(8))
    one.node = node
    with refused(cache.manager, InvalidLength, "got 8 of 8 tokens"):
        cache.alloc(1, req=one)


def test_an_unknown_request_is_refused() -> None:
    cache = make()
    with refused(cache.manager, UnknownSequence):
        cache.release_kv_cache(request("a", range(4)))


def test_windows_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"without windows, got \(4,\)"):
        SGLangFacade(BlockManager(8, 4, windows=[4]))


def test_what_was_allocated_beside_is_left_alone() -> None:
    cache = make()
    beside = request("beside", range(6))
    cache.manager.allocate("beside", range(6))
    cache.manager.append({"beside": 6})
    with refused(cache.manager, UnknownSequence, "no sequence 'beside' of this facade"):
        cache.alloc(1, req=beside)
    with refused(cache.manager, UnknownSequence):
        cache.checkpoint(beside, up_to=6)
    with refused(cache.manager, UnknownSequence):
        cache.free_segment(req=beside, start_pos=3)
    with refused(cache.manager, UnknownSequence):
        cache.release_kv_cache(beside)
