"""Every sequence of calls in a small world, to closure: `check()` holds in every state there is.

A world bounds blocks, sequences, their length, open steps, prompts and token ids. In each state every
call that the world allows is made on a copy: allocate, append (one sequence or two), commit, truncate,
fork, free, swap out and in, begin and complete. What it leads to is a new state if it differs by more than names: of
blocks, of sequences, of steps, of times. The exploration ends when there are no new states, so that
every sequence of such calls, however long, has been seen. A refused call leaves the state as it was,
and no call hands out a slot of a block that is indexed or shared.

What differs only in counters (hits, evictions, the peak) is one state: under the policy "lru" no
decision depends on them. The bounds are small, so each is wide in another world: steps, two token ids
whose runs split and merge, three sequences, a fork's copies without a cache, swaps. A larger world adds
bystanders to the same transitions: the pool treats free blocks alike, a write looks at the blocks in
its way one by one, and a run at its parent and its children. The stress program samples those.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import permutations, product
from operator import methodcaller
from typing import NamedTuple

import pytest

from kvblocks import BlockManager, KVBlocksError, StepPlan
from kvblocks.host import Swapped
from kvblocks.ledger import Ledger
from kvblocks.runs import Run
from kvblocks.sequence import Sequence

from .test_slots import protected_blocks

Call = Callable[[BlockManager], object]


class World(NamedTuple):
    """What bounds an exploration."""

    num_blocks: int
    block_size: int
    num_sequences: int
    max_length: int
    num_steps: int
    prompts: tuple[bytes, ...]  # of the ids 0 and 1
    tokens: bytes = b"\0\1"  # that are committed
    caching: bool = True
    num_host_blocks: int = 0


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


def calls(world: World, manager: BlockManager) -> Iterator[Call]:
    """Every call that the world allows in a state."""
    ledger = manager._ledger
    names: list[int] = list(ledger.sequences)  # type: ignore[arg-type]  # ints are all we use
    out: list[int] = list(ledger.swapped)  # type: ignore[arg-type]  # ints are all we use
    free_names = [name for name in range(world.num_sequences) if name not in names + out]
    step, completed = ledger.pool.step, ledger.pool.completed_step
    if free_names:
        for prompt in world.prompts:
            yield methodcaller("allocate", free_names[0], prompt)
    for name in names:
        yield methodcaller("free", name)
        if free_names:
            yield methodcaller("fork", name, free_names[0])
        yield from calls_of_one(world, ledger.get(name), name)
    for pair in permutations(names, 2):
        if all(ledger.get(name).num_computed < world.max_length for name in pair):
            yield methodcaller("append", dict.fromkeys(pair, 1))
    if world.num_host_blocks:
        yield from calls_of_swaps(names, out)
    if step - completed < world.num_steps:
        yield methodcaller("begin_step")
    for open_step in range(completed + 1, step + 1):
        yield methodcaller("complete_step", open_step)


def calls_of_swaps(names: list[int], out: list[int]) -> Iterator[Call]:
    """Every swap of one or two sequences, and what ends those that are swapped out."""
    for call, where in (("swap_out", names), ("swap_in", out)):
        for number in (1, 2):
            yield from (methodcaller(call, several) for several in permutations(where, number))
    yield from (methodcaller("free", name) for name in out)


def calls_of_one(world: World, sequence: Sequence, name: int) -> Iterator[Call]:
    """Every append, commit and truncate of one sequence."""
    committed, computed = sequence.num_committed, sequence.num_computed
    for n in range(1, min(2, world.max_length - computed) + 1):
        yield methodcaller("append", {name: n})
    for n in range(committed + 1, computed + 1):
        for ids in product(world.tokens, repeat=max(0, n - sequence.num_known)):
            yield methodcaller("commit", name, n, ids)
    for n in range(committed, computed + 1):
        yield methodcaller("truncate", name, n)


# ── states ───────────────────────────────────────────────────────────────────────────────────────


class Names:
    """Names in the order of first appearance."""

    def __init__(self) -> None:
        self.known: dict[object, int] = {}

    def of(self, thing: object) -> int:
        return self.known.setdefault(thing, len(self.known))


def canonical(ledger: Ledger) -> tuple[object, ...]:
    """A state without names: equal if two states differ in names only."""
    pool, runs = ledger.pool, ledger.runs
    done = pool.completed_step
    resting = [run for run in runs if not run.holders]
    arriving = ledger.arriving if ledger.host.pool.num_blocks else set()  # who swaps asks for it
    times = sorted({r.last_used for r in resting} | {r.queued for r in runs if r.queued})

    def describe_run(run: Run) -> tuple[object, ...]:
        return (
            runs.path_tokens(run),
            len(run.blocks),
            run.fence and run.fence - done,
            max(0, run.last_step - done),
            run.holders or -times.index(run.last_used),
            times.index(run.queued) if run.queued else -1,
            places_in(run.blocks, arriving),
        )

    def describe(sequence: Sequence, names: Names) -> tuple[object, ...]:
        loose = tuple(
            (names.of(block), pool.shared.get(block, 1), max(0, pool.touched.get(block, 0) - done))
            for block in sequence.loose_blocks
            if block in pool.shared or block in pool.touched
        )
        run = sequence.run
        path = (runs.path_tokens(run),) if run.tokens else path_apart(run, names, done)
        return (
            path,
            sequence.num_committed,
            sequence.num_computed,
            len(sequence.block_table),
            sequence.token_ids.tobytes(),
            max(0, sequence.last_step - done),
            loose,
            places_in(sequence.block_table, arriving),
        )

    sequences = list(ledger.sequences.values())
    return (
        describe_host(ledger) if ledger.host.pool.num_blocks else (),
        min(
            tuple(describe(sequence, names) for sequence in order)
            for order in permutations(sequences)
            for names in [Names()]
        ),
        tuple(sorted(describe_run(run) for run in runs)),
        pool.num_free,
        tuple(sorted((step - done, len(blocks)) for step, blocks in pool.fenced.items())),
        pool.step - done,
    )


def places_in(table: array[int], blocks: set[int]) -> tuple[int, ...]:
    return tuple(index for index, block in enumerate(table) if block in blocks)


def describe_host(ledger: Ledger) -> tuple[object, ...]:
    """Who is swapped out, and what waits on the host."""
    pool, done = ledger.host.pool, ledger.pool.completed_step

    def describe(swapped: Swapped, names: Names) -> tuple[object, ...]:
        sequence = swapped.sequence
        return (
            sequence.token_ids.tobytes(),
            sequence.num_committed,
            max(0, sequence.last_step - done),
            tuple((names.of(b), max(0, pool.touched.get(b, 0) - done)) for b in swapped.host_table),
        )

    return (
        min(
            tuple(describe(swapped, names) for swapped in order)
            for order in permutations(ledger.swapped.values())
            for names in [Names()]
        ),
        tuple(sorted((step - done, len(blocks)) for step, blocks in pool.fenced.items())),
    )


def path_apart(run: Run, names: Names, done: int) -> tuple[object, ...]:
    """The runs of a path that cannot be found, by name."""
    found = []
    while run.parent is not None:
        found.append((names.of(run), len(run.blocks), run.holders, max(0, run.last_step - done)))
        run = run.parent
    return tuple(found)


def digest(manager: BlockManager) -> bytes:
    return sha256(repr(canonical(manager._ledger)).encode()).digest()


def explore(world: World) -> tuple[int, int]:
    """Make every call in every state; returns the numbers of states and of calls."""
    start = BlockManager(
        world.num_blocks,
        world.block_size,
        prefix_caching=world.caching,
        num_host_blocks=world.num_host_blocks,
    )
    seen = {digest(start)}
    frontier = [pickle.dumps(start)]
    num_calls = 0
    while frontier:
        state = frontier.pop()
        for call in calls(world, pickle.loads(state)):  # noqa: S301 -- written below
            manager: BlockManager = pickle.loads(state)  # noqa: S301 -- written below
            num_calls += 1
            try:
                answer = call(manager)
            except KVBlocksError:
                before: BlockManager = pickle.loads(state)  # noqa: S301 -- written below
                assert manager.state_digest() == before.state_digest()
                continue
            if isinstance(answer, StepPlan):
                written = {slot // world.block_size for slot in answer.slot_mapping}
                assert written.isdisjoint(protected_blocks(manager))
            manager.check()
            after = digest(manager)
            if after not in seen:
                seen.add(after)
                frontier.append(pickle.dumps(manager))
    return len(seen), num_calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "num_states"),
    [
        (World(3, 2, 2, 3, 2, (b"\0\0",), b"\0"), 17193),
        (World(3, 2, 2, 3, 0, (b"\0\0\0", b"\0\1")), 9886),
        (World(3, 1, 2, 2, 1, (b"\0", b"\0\1")), 12036),
        (World(4, 2, 3, 3, 0, (b"\0\0",), b"\0"), 3321),
        (World(4, 2, 2, 3, 2, (b"\0\0",), b"\0", caching=False), 7847),
        (World(2, 1, 2, 2, 1, (b"\0",), b"\0", num_host_blocks=2), 4599),
    ],
    ids=["steps", "two token ids", "runs split", "three sequences", "no cache", "swaps"],
)
def test_check_holds_in_every_state_of_a_small_world(world: World, num_states: int) -> None:
    found, num_calls = explore(world)
    print(f"{found:,} states, {num_calls:,} calls")
    assert found == num_states
