"""`check()` finds what is broken, each invariant by itself."""

from array import array
from collections.abc import Callable

import pytest

from kvblocks import BlockManager, InvariantViolation
from kvblocks.runs import Run

from .helpers import filled


def run_of(manager: BlockManager) -> Run:
    """The run of blocks 0 and 1, which A holds."""
    return manager._ledger.sequences["A"].run


def leak(manager: BlockManager) -> None:
    manager._ledger.pool.take(1)


def hand_out_twice(manager: BlockManager) -> None:
    manager._ledger.pool._put(array("i", (0,)))


def miscount_cached(manager: BlockManager) -> None:
    manager._ledger.runs.num_cached += 1


def miscount_holders(manager: BlockManager) -> None:
    run_of(manager).holders += 1


def miscount_tables(manager: BlockManager) -> None:
    manager._ledger.pool.shared[2] = 2


def cut_tokens(manager: BlockManager) -> None:
    del run_of(manager).tokens[-1:]


def move_a_key(manager: BlockManager) -> None:
    children = manager._ledger.runs.root.children
    children[b"other"] = children.pop(run_of(manager).key)


def change_a_key(manager: BlockManager) -> None:
    run_of(manager).tokens[0] += 1


def evict_a_parent_first(manager: BlockManager) -> None:
    manager.allocate("C", [0, 1, 2, 3, 9])  # splits the run
    manager.free("C")
    manager.free("A")
    next(iter(manager._ledger.runs)).last_used = -1


def lose_from_the_queue(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.queued = 0
    manager._ledger.runs.queue.entries.clear()


def queue_twice(manager: BlockManager) -> None:
    manager.free("A")
    manager._ledger.runs.queue.entries *= 2


def queue_unknowingly(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.queued = 0


def queue_behind_its_turn(manager: BlockManager) -> None:
    run = run_of(manager)
    manager.free("A")
    run.last_used -= 1


def shuffle_the_queue(manager: BlockManager) -> None:
    filled(manager, "C", 4, first_token=100)
    manager.free("A")
    manager.free("C")
    manager._ledger.runs.queue.entries.reverse()


def miscount_pins(manager: BlockManager) -> None:
    manager.pin("system", range(4))
    manager._ledger.pins.num_blocks = 2


def pin_too_much(manager: BlockManager) -> None:
    manager.pin("system", range(4))
    manager._ledger.pins.max_blocks = 0


def keep_what_is_forgotten(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    run_of(manager).is_kept = True


def forget_what_is_kept(manager: BlockManager) -> None:
    run_of(manager).is_kept = False


def leave_what_nobody_finds(manager: BlockManager) -> None:
    manager.reset_prefix_cache()
    run = run_of(manager)
    run.children[b""] = Run(b"", bytearray(), run.blocks[:0], run, 0)


def find_a_child_more_often(manager: BlockManager) -> None:
    manager.allocate("C", [0, 1, 2, 3, 9])  # splits the run
    run_of(manager).num_hits = 2


def rest_nowhere(manager: BlockManager) -> None:
    run = run_of(manager)
    step = manager.begin_step()
    manager.append({"A": 1})
    manager.free("A")
    del manager._ledger.runs.fenced[step][run]
    manager._ledger.runs.fenced[step][Run(b"", bytearray(), run.blocks, None, 0)] = None


def put_a_block_into_two_runs(manager: BlockManager) -> None:
    run = run_of(manager)
    twin = Run(b"", run.tokens[:16], run.blocks[:1], manager._ledger.runs.root, 0)
    twin.key, twin.holders = bytes(twin.tokens), 0
    manager._ledger.runs.root.children[bytes(16)] = twin


def loosen_a_block_of_a_run(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_run_blocks = 1


def fence_by_no_step(manager: BlockManager) -> None:
    manager._ledger.pool.fenced[3] = manager._ledger.pool.take(1)
    manager._ledger.pool.num_fenced += 1


def use_in_no_step(manager: BlockManager) -> None:
    manager._ledger.pool.touched[0] = 3


def commit_what_is_not_computed(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_committed = 13


def forget_ids(manager: BlockManager) -> None:
    del manager._ledger.sequences["B"].token_ids[:]


def hold_a_block_twice(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].block_table.append(2)
    manager._ledger.pool.shared[2] = 2


def publish_nothing(manager: BlockManager) -> None:
    manager._ledger.sequences["A"].num_committed = 8
    manager._ledger.sequences["A"].num_computed = 12
    manager._ledger.sequences["A"].token_ids.extend((1, 1, 1))
    manager._ledger.sequences["A"].num_committed = 12


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (leak, "must be the pool of 8, each once"),
        (hand_out_twice, "must be the pool of 8, each once"),
        (miscount_cached, r"\(1, 0, 0\) counted, \(0, 0, 0\) found"),
        (miscount_holders, "2 holders counted, 1 found"),
        (miscount_tables, r"loose blocks are shared {}, counted {2: 2}"),
        (cut_tokens, "a run of 2 blocks has 31 bytes of tokens"),
        (move_a_key, "must be found under its first block's tokens"),
        (change_a_key, "must be found under its first block's tokens"),
        (evict_a_parent_first, "a run must not be evicted before its children"),
        (lose_from_the_queue, "a cached leaf must be in the queue of eviction"),
        (queue_twice, "no run is in the queue of eviction twice"),
        (queue_unknowingly, "a run must know whether it is queued"),
        (queue_behind_its_turn, "a run is queued at 2, and ranks 1 now"),
        (shuffle_the_queue, "the queue of eviction must be a heap"),
        (miscount_pins, "1 blocks are pinned, 2 counted, of at most 4"),
        (pin_too_much, "1 blocks are pinned, 1 counted, of at most 0"),
        (keep_what_is_forgotten, "a run is kept exactly if it can be found"),
        (forget_what_is_kept, "a run is kept exactly if it can be found"),
        (leave_what_nobody_finds, "what cannot be found must be held"),
        (find_a_child_more_often, "who used a run must have used its parent"),
        (rest_nowhere, "a run waits for step 1 without resting there"),
        (put_a_block_into_two_runs, "must be the pool of 8, each once"),
        (loosen_a_block_of_a_run, r"the path holds \[0, 1\], the table \[0\]"),
        (fence_by_no_step, r"blocks wait for the steps \[3\], open are 1..0"),
        (use_in_no_step, r"blocks wait for the steps \[3\], open are 1..0"),
        (commit_what_is_not_computed, "'A': committed 13 <= computed 9 <= capacity 12"),
        (forget_ids, "'B': 1 committed, 0 ids known"),
        (hold_a_block_twice, r"'A' holds a block twice: \[0, 1, 2, 2\]"),
        (publish_nothing, "'A': 3 full blocks, 2 published"),
    ],
)
def test_check_finds_what_is_broken(break_it: Callable[[BlockManager], None], message: str) -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", 9)
    filled(manager, "B", 1)
    manager.check()
    break_it(manager)
    with pytest.raises(InvariantViolation, match=message) as caught:
        manager.check()
    assert isinstance(caught.value, AssertionError)


def lose_a_host_block(manager: BlockManager) -> None:
    manager._ledger.swapped["A"].host_table.pop()


def leak_a_host_block(manager: BlockManager) -> None:
    manager._ledger.host.pool.take(1)


def miscount_host_tables(manager: BlockManager) -> None:
    del manager._ledger.host.pool.shared[0]


def hold_the_device_too(manager: BlockManager) -> None:
    manager._ledger.swapped["A"].sequence.block_table.append(0)


def forget_what_a_host_block_holds(manager: BlockManager) -> None:
    del manager._ledger.host.name_of[0]


def find_another_host_block(manager: BlockManager) -> None:
    host = manager._ledger.host
    host.block_of[host.name_of[0]] = 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lose_a_host_block, "'A': 9 committed, 9 computed, in 2 host blocks"),
        (leak_a_host_block, r"3 free \+ 4 held \+ 0 fenced host blocks must be the 8 there are"),
        (miscount_host_tables, r"host blocks are shared {0: 2, 1: 2}, counted {1: 2}"),
        (hold_the_device_too, "'A' is swapped out and holds"),
        (forget_what_a_host_block_holds, "each full host block must be known by its content"),
        (find_another_host_block, "equal content must be in one host block"),
    ],
)
def test_check_finds_what_is_broken_on_the_host(
    break_it: Callable[[BlockManager], None], message: str
) -> None:
    manager = BlockManager(8, 4, num_host_blocks=8)
    filled(manager, "A", 9)
    filled(manager, "B", [*range(8), 99])
    manager.swap_out("AB")
    manager.check()
    break_it(manager)
    with pytest.raises(InvariantViolation, match=message):
        manager.check()
