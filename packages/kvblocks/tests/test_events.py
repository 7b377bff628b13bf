"""Events: whoever replays them knows what can be found, after each of them and at any time."""

import pickle
import random
import struct
from collections.abc import Callable
from hashlib import sha256

import pytest

from kvblocks import Adapter, BlockManager, InvalidConfig, Media, OutOfBlocks, namespace_root
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

from .driver import Driver
from .helpers import filled, refused
from .naive_pins import PinningEngine
from .naive_swaps import SwappingEngine
from .subscriber import Subscriber


class FollowedEngine(PinningEngine):
    """The naive engine, and one who follows the events; the naive model knows what must be live."""

    def __init__(self, seed: int, num_blocks: int, block_size: int, *, partial: bool) -> None:
        super().__init__(seed, num_blocks, block_size, caching=True, partial=partial)
        self.manager = BlockManager(num_blocks, block_size, partial_reuse=partial, events=True)
        self.subscriber = Subscriber()
        self.num_stored = self.num_removed = 0

    def operate(self) -> None:
        super().operate()
        self.follow()
        live = {self.key_of(node) for key in self.present for node in key[1:] if self.is_found(key)}
        assert self.subscriber.live.keys() == live

    def refuse(self, call: Callable[[], object], *errors: type[BaseException]) -> BaseException:
        self.follow()
        error = super().refuse(call, *errors)
        assert self.manager.take_events() == [], "a refused call stored or removed something"
        return error

    def follow(self) -> None:
        events = self.manager.take_events()
        self.num_stored += sum(isinstance(event, BlockStored) for event in events)
        self.num_removed += sum(isinstance(event, BlockRemoved) for event in events)
        self.subscriber.replay(events)

    def key_of(self, node: int) -> bytes:
        """The documented formula, for the block that ends with a node."""
        nodes = self.tree.last(node, self.size)
        before = self.tree.parents[nodes[0]]
        namespace = self.tree.namespaces[node]
        is_first = before == self.tree.root(namespace)
        parent = namespace_root(*namespace) if is_first else self.key_of(before)
        data = b""
        pairs: list[tuple[int, str | None]] = [self.tree.tokens[each] for each in nodes]  # type: ignore[misc]  # behind the root
        for offset, (token, digest) in enumerate(pairs):
            parent += struct.pack("<I", token)
            if digest is not None:
                value = b"%d:%s" % (offset, digest.encode())
                data += b"%d:media=%d:%s" % (len(b"media"), len(value), value)
        return sha256(parent + data).digest()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("num_blocks", [3, 7, 20])
@pytest.mark.parametrize("block_size", [1, 4])
def test_replaying_the_events_gives_the_live_keys_after_random_operations(
    block_size: int, num_blocks: int, *, partial: bool
) -> None:
    engine = FollowedEngine(1, num_blocks, block_size, partial=partial)
    for number in range(1500):
        engine.operate()
        if number % 16 == 0:
            engine.manager.check()
    assert engine.num_stored > 10
    assert engine.num_removed > 10


class FollowedSwaps(FollowedEngine, SwappingEngine):
    """The same, with sequences that are swapped out and come back."""

    def __init__(self, seed: int, num_blocks: int, block_size: int, num_host: int) -> None:
        SwappingEngine.__init__(self, seed, num_blocks, block_size, num_host, caching=True)
        self.manager = BlockManager(num_blocks, block_size, num_host_blocks=num_host, events=True)
        self.subscriber = Subscriber()
        self.num_stored = self.num_removed = 0


@pytest.mark.parametrize("num_blocks", [3, 7, 20])
@pytest.mark.parametrize("block_size", [1, 4])
def test_replaying_the_events_gives_the_live_keys_while_sequences_are_swapped(
    block_size: int, num_blocks: int
) -> None:
    engine = FollowedSwaps(1, num_blocks, block_size, num_host=8)
    for _ in range(700):
        engine.operate()
    assert engine.num_swaps_in


@pytest.mark.parametrize("seed", range(4))
def test_decode_batches_store_what_single_calls_would(seed: int) -> None:
    driver = Driver(seed, BlockManager(30, 3, events=True))
    subscriber = Subscriber()
    for _ in range(600):
        driver.operate()
        subscriber.replay(driver.manager.take_events())
        driver.manager.check()
        held = {key for name in driver.names for key in driver.manager.block_hashes(name)}
        assert held <= subscriber.live.keys()
        stats = driver.manager.stats()
        assert len(subscriber.live) <= stats.num_blocks - stats.num_free_blocks


def test_events_change_nothing_else() -> None:
    silent, told = (Driver(3, BlockManager(20, 2, events=events)) for events in (False, True))
    for _ in range(500):
        silent.operate()
        told.operate()
        assert silent.manager.state_digest() == told.manager.state_digest()


# ── one removal for each key ─────────────────────────────────────────────────────────────────────


def test_of_a_content_computed_twice_one_store_and_one_removal_are_told() -> None:
    manager = BlockManager(14, 2, events=True)
    for name in "ab":  # neither is cached when the other is allocated
        manager.allocate(name, range(14))
    manager.append({"a": 14, "b": 14})
    manager.commit("a", 14)
    manager.commit("b", 14)
    keys = manager.block_hashes("a")
    (stored,) = manager.take_events()
    assert stored == BlockStored(keys, None, stored_tokens(range(14)), 2)
    manager.free("a")
    manager.allocate("c", range(100, 114))
    assert manager.take_events() == [], "the other copy is there still"
    manager.free("b")
    manager.append({"c": 14})
    manager.commit("c", 14)
    manager.take_events()
    manager.allocate("d", range(200, 214))
    assert manager.take_events() == [BlockRemoved(keys[::-1])]


def test_a_removed_key_can_be_stored_again() -> None:
    manager = BlockManager(3, 2, events=True)
    for _ in range(2):
        filled(manager, "a", [1, 2, 3, 4])
        stored = manager.take_events()[-1]
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == manager.block_hashes("a")
        manager.free("a")
        filled(manager, "b", [9, 9, 9, 9, 9])
        manager.free("b")


def test_what_is_evicted_is_told_a_tail_before_its_head() -> None:
    manager = BlockManager(4, 2, events=True)
    filled(manager, "a", [1, 2, 3, 4, 5, 6])
    keys = manager.block_hashes("a")
    manager.free("a")
    manager.take_events()
    manager.allocate("b", [9, 9, 9, 9, 9])
    assert manager.take_events() == [BlockRemoved(keys[:0:-1])]


def test_only_the_blocks_that_are_new_are_stored_behind_their_parent() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2, 3, 4])
    filled(manager, "b", [1, 2, 7, 8, 9, 9])
    keys = manager.block_hashes("b")
    _, stored = manager.take_events()
    assert stored == BlockStored(keys[1:], keys[0], stored_tokens([7, 8, 9, 9]), 2)


def test_blocks_behind_a_part_computed_by_another_are_stored_behind_it() -> None:
    manager = BlockManager(8, 2, events=True)
    for name, last in (("a", 5), ("b", 6)):
        manager.allocate(name, [1, 2, 3, last])
    manager.append({"a": 4, "b": 4})
    manager.commit("a", 4)
    manager.take_events()
    manager.commit("b", 4)
    keys = manager.block_hashes("b")
    (stored,) = manager.take_events()
    assert stored == BlockStored(keys[1:], keys[0], stored_tokens([3, 6]), 2)


# ── out of the pool and back ─────────────────────────────────────────────────────────────────────


def test_what_comes_back_from_the_host_is_stored_again() -> None:
    manager = BlockManager(4, 2, num_host_blocks=8, events=True)
    for name, last in (("a", 5), ("b", 6)):
        filled(manager, name, [1, 2, 3, last])
    keys = manager.block_hashes("a")
    manager.swap_out("ab")
    filled(manager, "c", range(10, 18))
    manager.free("c")
    manager.take_events()
    manager.swap_in("ab")
    manager.check()
    *_, first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == (keys, None)
    assert second == BlockStored(manager.block_hashes("b")[1:], keys[0], stored_tokens([3, 6]), 2)


def test_what_the_pool_still_has_is_not_stored_when_a_sequence_comes_back() -> None:
    manager = BlockManager(8, 2, num_host_blocks=8, events=True)
    filled(manager, "a", [1, 2, 3, 4, 5])
    manager.take_events()
    manager.swap_out("a")
    manager.swap_in("a")
    manager.check()
    assert manager.take_events() == []


def test_a_digest_that_raises_leaves_who_is_swapped_out_as_it_was() -> None:
    digest = FailingDigest(10**9, 1)
    manager = BlockManager(4, 2, num_host_blocks=8, digest=digest, events=True)
    filled(manager, "a", [1, 2, 3, 4])
    manager.swap_out("a")
    manager.take_events()
    digest.left = 1
    with refused_by_digest(manager):
        manager.swap_in("a")
    manager.swap_in("a")
    manager.check()


# ── a reset ──────────────────────────────────────────────────────────────────────────────────────


def test_a_reset_of_everything_clears_all_blocks() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2, 3])
    manager.take_events()
    manager.reset_prefix_cache()
    manager.check()
    assert manager.take_events() == [AllBlocksCleared()]


def test_a_reset_of_one_salt_removes_its_keys_alone() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2, 3, 4], salt="x")
    filled(manager, "b", [1, 2, 3, 4])
    keys = manager.block_hashes("a")
    manager.take_events()
    manager.reset_prefix_cache(salt="x")
    assert manager.take_events() == [BlockRemoved(keys[::-1])]
    manager.reset_prefix_cache(salt="x")
    assert manager.take_events() == [], "nothing was there"


def test_what_a_sequence_computes_behind_a_reset_is_not_told() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2, 3, 4])
    manager.reset_prefix_cache()
    manager.take_events()
    manager.append({"a": [5, 6]})
    manager.commit("a", 6)
    manager.free("a")
    assert manager.take_events() == []


# ── what an event says ───────────────────────────────────────────────────────────────────────────


def test_events_have_the_fields_that_subscribers_of_vllm_read() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2, 3])
    manager.reset_prefix_cache(salt=None)
    manager.reset_prefix_cache()
    (key,) = manager.block_hashes("a")
    assert [event.as_dict() for event in manager.take_events()] == [
        {
            "type": "BlockStored",
            "block_hashes": [key],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": None,
            "group_idx": 0,
        },
        {"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


def test_extra_keys_say_what_stands_before_the_tokens_of_each_block() -> None:
    manager = BlockManager(8, 2, events=True)
    prompt = {"tokens": [1, 2, 3, 4, 5, 6], "salt": "s", "adapter": "tuned"}
    media = [Media(1, "cat"), Media(5, b"dog")]
    manager.allocate("a", **prompt, media=media)  # type: ignore[arg-type]  # by name
    manager.append({"a": 6})
    manager.commit("a", 4)
    manager.commit("a", 6)
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys == (("tuned", ("cat", 1), "s"), ("tuned",))
    assert second.extra_keys == (("tuned", (b"dog", 1)),)
    assert (first.lora_name, first.lora_id) == ("tuned", None)
    assert first.as_dict()["extra_keys"] == [("tuned", ("cat", 1), "s"), ("tuned",)]


@pytest.mark.parametrize(
    ("adapter", "extra", "lora_id", "lora_name"),
    [
        (7, (7,), 7, None),
        (Adapter("a", generation=2), ("a", 2), None, "a"),
    ],
)
def test_an_adapter_is_named_by_its_kind_and_with_its_generation(
    adapter: Adapter | int, extra: tuple[object, ...], lora_id: int | None, lora_name: str | None
) -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2], adapter=adapter)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == (extra,)
    assert (stored.lora_id, stored.lora_name) == (lora_id, lora_name)


def test_media_that_begin_in_other_blocks_leave_no_extra_keys_to_say() -> None:
    manager = BlockManager(8, 2, events=True)
    manager.allocate("a", [1, 2, 3, 4], media=[Media(2, "cat")])
    manager.append({"a": 4})
    manager.commit("a", 2)
    manager.commit("a", 4)
    first, second = (event for event in manager.take_events() if isinstance(event, BlockStored))
    assert (first.extra_keys, second.extra_keys) == (None, ((("cat", 0),),))


# ── who fails, and who does not listen ───────────────────────────────────────────────────────────


class FailingDigest:
    """A digest that raises from its n-th call on, `times` times."""

    def __init__(self, number: int, times: int) -> None:
        self.left, self.times = number, times

    def __call__(self, data: bytes) -> bytes:
        self.left -= 1
        if self.left < 0 and self.times:
            self.times -= 1
            raise MemoryError("of the digest")
        return sha256(data).digest()


@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("number", range(5))
def test_a_digest_that_raises_leaves_no_trace(number: int, times: int) -> None:
    digest = FailingDigest(10**9, 0)
    manager = BlockManager(20, 2, digest=digest, events=True)
    filled(manager, "a", [1, 2])
    filled(manager, "b", [3])
    batch = manager.decode_batch("ab")
    batch.append()
    batch.commit([4, 5])
    batch.append()
    manager.allocate("c", range(10))
    manager.append({"c": 10})
    events = manager.take_events()
    assert len(events) == 2
    digest.left, digest.times = number, times
    with refused_by_digest(manager):
        manager.commit("c", 10)
    if number == 0:
        digest.left, digest.times = number, times
        with refused_by_digest(manager):
            batch.commit([6, 7])
    digest.times = 0
    batch.commit([6, 7])
    manager.commit("c", 10)
    manager.check()
    assert len(manager.take_events()) == 2


class refused_by_digest:  # noqa: N801 -- used as a function
    """Expect the error, the state as it was, and no events."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def __enter__(self) -> None:
        self.before = self.manager.state_digest()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        assert kind is MemoryError
        assert self.manager.state_digest() == self.before
        assert self.manager.take_events() == []
        return True


def test_a_refused_call_tells_nothing() -> None:
    manager = BlockManager(3, 2, events=True)
    filled(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    manager.take_events()
    with refused(manager, OutOfBlocks):
        manager.allocate("b", range(8))
    assert manager.take_events() == []


def test_events_wait_for_who_asks_and_are_his_then() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2])
    events = manager.take_events()
    assert len(events) == 1
    events.append(AllBlocksCleared())  # whatever a subscriber does with them
    assert manager.take_events() == []


def test_events_travel_with_a_manager_and_by_themselves() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2])
    other: BlockManager = pickle.loads(pickle.dumps(manager))  # noqa: S301 -- written here
    events: list[Event] = other.take_events()
    assert events == manager.take_events()
    assert pickle.loads(pickle.dumps(events)) == events  # noqa: S301 -- written here


def test_a_snapshot_keeps_the_events_that_wait() -> None:
    manager = BlockManager(8, 2, events=True)
    filled(manager, "a", [1, 2])
    other = BlockManager.restore(manager.snapshot())
    other.check()
    assert other.take_events() == manager.take_events()


def test_events_do_not_go_with_windows() -> None:
    with pytest.raises(InvalidConfig, match=r"events needs no windows, got \(4,\)"):
        BlockManager(8, windows=[4], events=True)


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(InvalidConfig, match="events needs prefix_caching"):
        BlockManager(8, prefix_caching=False, events=True)


def test_a_manager_without_events_says_so() -> None:
    with pytest.raises(InvalidConfig, match="take_events needs a manager"):
        BlockManager(8).take_events()


def test_without_events_no_key_is_computed_or_kept() -> None:
    digest = FailingDigest(0, 10**9)
    manager = BlockManager(8, 2, digest=digest)
    filled(manager, "a", range(8))
    assert all(not run.hashes for run in manager._ledger.runs)
    with pytest.raises(MemoryError):
        manager.block_hashes("a")


@pytest.mark.parametrize("seed", range(3))
def test_a_weak_digest_confuses_who_listens_and_not_the_manager(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 -- replayable, not secret
    strong, weak = (
        BlockManager(12, 2, digest=digest, events=True)
        for digest in (lambda data: sha256(data).digest(), lambda _: b"")
    )
    for number in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
        for manager in (strong, weak):
            filled(manager, number, prompt)
            manager.free(number)
            manager.check()
        assert weak.state_digest() == strong.state_digest()
    assert len(weak.take_events()) == len(strong.take_events())


def stored_tokens(tokens: object) -> bytes:
    return struct.pack(f"={len(list(tokens))}I", *tokens)  # type: ignore[call-overload, misc]  # any sequence


def test_extra_keys_belong_to_the_blocks_that_are_new() -> None:
    manager = BlockManager(8, 2, events=True)
    for name, media in (("a", []), ("b", [Media(3, "cat")])):
        manager.allocate(name, [1, 2, 3, 4], salt="s", media=media)
    manager.append({"a": 4, "b": 4})
    manager.commit("a", 4)
    manager.take_events()
    manager.commit("b", 4)  # its first block is that of the other
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == ((("cat", 1),),)
