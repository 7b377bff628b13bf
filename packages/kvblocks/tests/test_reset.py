"""Resets: what is forgotten, for whom, and that nobody who runs notices."""

import pytest

from kvblocks import ALL_SALTS, AllSalts, BlockManager, Forgotten, OutOfBlocks

from .helpers import filled, refused


@pytest.fixture
def manager() -> BlockManager:
    """A runs with 2 full blocks and a tail; 2 full blocks that nobody holds are cached."""
    manager = BlockManager(16, 4)
    filled(manager, "gone", 8, first_token=100)
    manager.free("gone")
    filled(manager, "A", 10)
    return manager


def test_a_reset_says_what_became_of_the_blocks(manager: BlockManager) -> None:
    assert manager.reset_prefix_cache() == Forgotten(
        num_free_blocks=2, num_fenced_blocks=0, num_held_blocks=2
    )
    assert manager.reset_prefix_cache() == Forgotten(0, 0, 0)
    manager.check()


def test_what_was_cached_is_free_at_once(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (13, 0)
    assert manager.match(range(100, 109)).num_tokens == 0
    manager.allocate("B", range(200, 200 + 13 * 4))
    assert manager.stats().num_evicted_blocks == 0
    manager.check()


def test_who_runs_keeps_blocks_that_nobody_finds(manager: BlockManager) -> None:
    table, hashes = manager.block_table("A"), manager.block_hashes("A")
    manager.reset_prefix_cache()
    assert (manager.block_table("A"), manager.block_hashes("A")) == (table, hashes)
    assert manager.match(range(10)).num_tokens == 0
    assert manager.allocate("B", range(10)).num_cached_tokens == 0
    assert set(manager.block_table("B")).isdisjoint(table)


def test_who_runs_goes_on_and_what_it_computes_is_not_found_either(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    manager.append({"A": [10, 11, 12, 13]})
    manager.commit("A", 14)
    manager.check()
    assert len(manager.block_hashes("A")) == 3
    assert manager.match(range(20)).num_tokens == 0
    manager.free("A")
    manager.check()
    assert manager.stats().num_free_blocks == 16


@pytest.mark.parametrize("salt", [ALL_SALTS, None])
def test_who_has_no_full_block_yet_publishes_nothing_after_a_reset(
    salt: str | AllSalts | None,
) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 3)
    manager.allocate("waits", range(6))
    manager.reset_prefix_cache(salt=salt)
    manager.append({"A": [3], "waits": 6})
    manager.commit("A", 4)
    manager.commit("waits", 6)
    manager.check()
    assert manager.match(range(6)).num_tokens == 0
    for name in ("A", "waits"):
        manager.free(name)
        manager.check()
    assert manager.stats().num_free_blocks == 8


def test_a_decode_batch_goes_on_after_a_reset(manager: BlockManager) -> None:
    batch = manager.decode_batch(["A"])
    manager.reset_prefix_cache()
    for token in range(10, 16):
        batch.append()
        batch.commit([token])
        manager.check()
    assert manager.match(range(17)).num_tokens == 0
    assert len(manager.block_hashes("A")) == 4


def test_forks_share_what_was_forgotten_until_the_last_is_freed(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    manager.fork("A", "B")
    manager.append({"A": [10, 11], "B": [10, 11]})
    manager.commit("A", 12)
    manager.commit("B", 12)  # the content of A, which B finds: they are of one time
    assert manager.block_table("A") == manager.block_table("B")
    manager.free("A")
    manager.check()
    assert manager.stats().num_held_blocks == 3
    manager.free("B")
    manager.check()
    assert manager.stats().num_free_blocks == 16


def test_what_is_computed_after_a_reset_is_found(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    filled(manager, "B", 10)
    assert manager.match(range(10)).block_ids == tuple(manager.block_table("B")[:2])
    manager.free("A")
    manager.free("B")
    manager.check()
    assert manager.match(range(10)).num_tokens == 8
    assert manager.stats().num_cached_blocks == 2


def test_old_and_new_content_of_the_same_tokens_stay_apart(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    filled(manager, "B", 10)
    manager.reset_prefix_cache()
    filled(manager, "C", 10)
    for name in "ABC":
        manager.append({name: [10, 11]})
        manager.commit(name, 12)
        manager.check()
    tables = [set(manager.block_table(name)) for name in "ABC"]
    assert len(set.union(*tables)) == 9
    assert manager.match(range(13)).block_ids == tuple(manager.block_table("C"))


@pytest.mark.parametrize("salt", [None, "", "a"])
def test_a_reset_of_one_salt_leaves_the_others(salt: str | None) -> None:
    manager = BlockManager(32, 4)
    salts = (None, "", "a", "ab")
    for number, each in enumerate(salts):
        filled(manager, number, 9, salt=each)
        filled(manager, (number, "young"), 3, first_token=50, salt=each)
        if number % 2:
            manager.free(number)
    freed = salts.index(salt) % 2
    assert manager.reset_prefix_cache(salt=salt) == Forgotten(2 * freed, 0, 2 - 2 * freed)
    for number, each in enumerate(salts):
        assert manager.match(range(9), salt=each).num_tokens == (0 if each == salt else 8)
        manager.append({(number, "young"): [53]})
        manager.commit((number, "young"), 4)
        found = manager.match(range(50, 55), salt=each).num_tokens
        assert found == (0 if each == salt else 4)
    manager.check()


def test_blocks_that_an_open_step_uses_are_free_when_it_completes(manager: BlockManager) -> None:
    step = manager.begin_step()
    manager.append({"A": [10]})
    manager.free("A")
    assert manager.reset_prefix_cache() == Forgotten(2, 2, 0)
    manager.check()
    assert manager.match(range(10)).num_tokens == 0
    with refused(manager, OutOfBlocks, "enough once step 1 completes"):
        manager.allocate("B", range(16 * 4))
    manager.complete_step(step)
    manager.check()
    assert manager.stats().num_free_blocks == 16


def test_who_is_freed_after_a_reset_waits_for_the_open_step(manager: BlockManager) -> None:
    step = manager.begin_step()
    manager.append({"A": [10]})
    assert manager.reset_prefix_cache() == Forgotten(2, 0, 2)
    manager.free("A")
    manager.check()
    assert manager.stats().num_fenced_blocks == 3
    manager.complete_step(step)
    assert manager.stats().num_free_blocks == 16


def test_a_fork_that_left_in_an_open_step_keeps_forgotten_blocks_fenced(
    manager: BlockManager,
) -> None:
    manager.reset_prefix_cache()
    manager.fork("A", "B")
    step = manager.begin_step()
    manager.append({"B": [10]})
    before = manager.state_digest()
    manager.free("B")
    assert manager.state_digest() != before
    manager.free("A")
    manager.check()
    assert manager.stats().num_fenced_blocks >= 2
    manager.complete_step(step)
    assert manager.stats().num_free_blocks == 16


def test_who_is_left_keeps_its_place_in_the_order_of_eviction() -> None:
    manager = BlockManager(8, 4, policy="priority")
    for priority in (1, 10, 2, 11, 12, 3, 4):  # a heap that is none without its third
        salt = "x" if priority == 2 else None
        manager.allocate("A", [priority] * 4, salt=salt, priority=priority)
        manager.append({"A": 4})
        manager.commit("A", 4)
        manager.free("A")
    manager.reset_prefix_cache(salt="x")
    manager.check()
    manager.allocate("B", range(900, 900 + 4 * 5))
    left = [n for n in (1, 3, 4, 10, 11, 12) if manager.match([n] * 5).num_tokens]
    assert left == [10, 11, 12]


def test_the_cache_goes_on_after_a_reset_of_a_salt() -> None:
    manager = BlockManager(6, 4)
    for number, salt in enumerate((None, "x", None, "x", None)):
        filled(manager, "A", 4, first_token=100 * number, salt=salt)
        manager.free("A")
    manager.reset_prefix_cache()
    for number in range(3):
        filled(manager, "A", 4, first_token=100 * number, salt="y")
        manager.free("A")
    manager.reset_prefix_cache(salt="x")
    manager.allocate("B", range(900, 900 + 4 * 4))
    assert [manager.match(range(n, n + 5), salt="y").num_tokens for n in (0, 100, 200)] == [0, 4, 4]
    manager.check()


def test_the_digest_knows_what_cannot_be_found() -> None:
    digests = set()
    for reset in (False, True):
        manager = BlockManager(8, 4)
        filled(manager, "A", 3)
        if reset:
            manager.reset_prefix_cache()
        digests.add(manager.state_digest())
    assert len(digests) == 2


def test_the_digest_knows_forgotten_tokens_and_the_steps_that_use_them() -> None:
    digests = set()
    for first_token in (0, 100):
        manager = BlockManager(8, 4)
        filled(manager, "A", 8, first_token)
        manager.reset_prefix_cache()
        digests.add(manager.state_digest())
    manager.begin_step()
    digests.add(manager.state_digest())
    manager._ledger.sequences["A"].run.last_step = 1
    digests.add(manager.state_digest())
    assert len(digests) == 4


def test_without_a_prefix_cache_a_reset_has_nothing_to_forget() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    filled(manager, "A", 9)
    manager.fork("A", "B")
    assert manager.reset_prefix_cache() == Forgotten(0, 0, 0)
    manager.check()
    manager.append({"A": [1], "B": [1]})
    manager.free("A")
    manager.free("B")
    manager.check()
    assert manager.stats().num_free_blocks == 8
