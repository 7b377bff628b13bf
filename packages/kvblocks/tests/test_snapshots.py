"""A manager restored from a snapshot goes on as the one that it was taken of."""

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from hashlib import md5, sha256
from pathlib import PurePath

import pytest

import kvblocks
from kvblocks import Adapter, BlockManager, InvalidConfig, InvalidSnapshot, Media

from .driver import Driver


def twins(driver: Driver) -> Iterator[Driver]:
    """A driver that goes on, and one that does the same with a restored manager."""
    for name in driver.batch.seq_ids:
        driver.batch.leave(name)
    restored = BlockManager.restore(driver.manager.snapshot())
    for manager in (driver.manager, restored):
        twin = copy.copy(driver)
        twin.rng, twin.names = copy.deepcopy(driver.rng), driver.names[:]
        twin.swapped = driver.swapped[:]
        twin.manager, twin.batch = manager, manager.decode_batch()
        yield twin


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_restored_manager_goes_on_as_the_other_does(seed: int, *, caching: bool) -> None:
    num_host_blocks = 9 * (seed % 2)
    driver = Driver(
        seed, BlockManager(24, 2, prefix_caching=caching, num_host_blocks=num_host_blocks)
    )
    for _ in range(12):
        for _ in range(60):
            driver.operate()
        driver, restored = twins(driver)
        restored.manager.check()
        for _ in range(40):
            driver.operate()
            restored.operate()
            assert driver.manager.state_digest() == restored.manager.state_digest()
        restored.manager.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority"])
def test_what_is_evicted_next_is_restored(policy: str) -> None:
    manager = BlockManager(12, 2, policy=policy, partial_reuse=True)
    for number in range(9):
        prompt = [number % 3, number % 2, number, 7, 8]
        manager.allocate(number, prompt, priority=number % 4, adapter=Adapter("a", number % 2))
        manager.append({number: 5 - manager.num_computed_tokens(number)})
        manager.commit(number, 5)
        manager.free(number)
    restored = BlockManager.restore(manager.snapshot())
    for each in (manager, restored):
        each.allocate("long", range(100, 100 + 9 * 2))
    assert restored.state_digest() == manager.state_digest()
    assert restored.block_table("long") == manager.block_table("long")


def test_pins_media_and_open_steps_are_restored() -> None:
    manager = BlockManager(16, 2)
    media = [Media(1, b"cat")]
    manager.allocate("a", [1, 2, 3, 4, 5], media=media)
    step = manager.begin_step()
    manager.append({"a": 5})
    manager.commit("a", 5)
    manager.pin("system", [1, 2], media=media)
    manager.free("a")
    restored = BlockManager.restore(manager.snapshot())
    assert restored.stats() == manager.stats()
    assert restored.stats().num_fenced_blocks == 2
    restored.complete_step(step)
    assert restored.match([1, 2, 3, 4, 5], media=media).num_tokens == 4
    restored.unpin("system")
    restored.check()


def test_a_snapshot_changes_nothing_and_sequences_in_a_batch_go_on_by_themselves() -> None:
    manager = BlockManager(8, 2)
    manager.allocate("a", [1, 2, 3])
    manager.append({"a": 3})
    manager.commit("a", 3)
    batch = manager.decode_batch(["a"])
    batch.append()
    before = manager.state_digest()
    restored = BlockManager.restore(manager.snapshot())
    assert manager.state_digest() == before
    assert batch.seq_ids == ("a",)
    restored.commit("a", 4, [9])
    batch.commit([9])
    assert restored.state_digest() == manager.state_digest()


def test_a_restored_manager_is_another() -> None:
    manager = BlockManager(8, 2)
    manager.allocate("a", [1, 2, 3])
    restored = BlockManager.restore(manager.snapshot())
    restored.free("a")
    assert "a" in manager
    manager.check()
    restored.check()


def test_runs_may_hang_together_deeper_than_python_recurses() -> None:
    manager = BlockManager(2_000, 1)
    for turn in range(2_000):
        manager.allocate(turn, range(turn + 1))
        manager.append({turn: 1})
        manager.commit(turn, turn + 1)
    restored = BlockManager.restore(manager.snapshot())
    assert restored.state_digest() == manager.state_digest()
    restored.check()


def test_another_digest_is_brought_by_who_restores() -> None:
    def digest(data: bytes) -> bytes:
        return md5(data, usedforsecurity=False).digest()

    manager = BlockManager(8, 2, digest=digest)
    manager.allocate("a", [1, 2, 3])
    manager.append({"a": 3})
    manager.commit("a", 3)
    snapshot = manager.snapshot()
    assert BlockManager.restore(snapshot, digest=digest).block_hashes("a") == manager.block_hashes(
        "a"
    )
    assert BlockManager.restore(snapshot).block_hashes("a") != manager.block_hashes("a")


@pytest.mark.parametrize("seq_id", [PurePath("a"), ("a", PurePath("b")), len])
def test_an_id_that_is_not_plain_is_refused_when_a_snapshot_is_taken(seq_id: object) -> None:
    manager = BlockManager(8, 2)
    manager.allocate(seq_id, [1, 2, 3])
    before = manager.state_digest()
    with pytest.raises(InvalidSnapshot, match="plain values"):
        manager.snapshot()
    assert manager.state_digest() == before


def sealed(body: bytes, **header: object) -> bytes:
    line = {"kvblocks": kvblocks.__version__, "policy": "lru", "sha256": sha256(body).hexdigest()}
    return json.dumps(line | header).encode() + b"\n" + body


def test_bytes_that_are_no_snapshot_are_refused() -> None:
    snapshot = BlockManager(8, 2).snapshot()
    for data, reason in [
        (b"", "other bytes"),
        (b"{}\n", "other bytes"),
        (b"[1]\n", "other bytes"),
        (b"[" * 100_000 + b"\n", "other bytes"),
        (snapshot[:-1], "checksum"),
        (snapshot[:-9] + b"x" + snapshot[-8:], "checksum"),
        (sealed(b"", kvblocks="0.0.0"), "this version"),
        (sealed(b"junk"), "cannot be read"),
        (sealed(pickle.dumps((1, 2))), "cannot be read"),
        (sealed(pickle.dumps(([], [], 5))), "cannot be read"),
        (sealed(b"\x80\x04\x8c\x04this\x8c\x01s\x93."), "this.s"),
        (sealed(b"\x80\x04\x8c\x12kvblocks.snapshots\x8c\x0aload_state\x93."), "load_state"),
        (sealed(pickle.dumps(PurePath("a"))), "pathlib"),
        (sealed(pickle.dumps(eval)), "builtins.eval"),
        (sealed(b"\x80\x04\x8c\x12kvblocks.snapshots\x8c\x0cpickle.loads\x93."), "pickle.loads"),
    ]:
        with pytest.raises(InvalidSnapshot, match=reason):
            BlockManager.restore(data)
    assert "this" not in sys.modules  # nothing was imported to find out
    with pytest.raises(InvalidConfig, match="policy"):
        BlockManager.restore(sealed(b"", policy="mine"))
