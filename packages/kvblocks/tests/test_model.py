"""Random operations against the naive model: every sequence always reads its own history."""

import pytest

from .naive_engine import Engine
from .naive_pins import PinningEngine
from .naive_swaps import SwappingEngine
from .naive_windows import WindowEngine


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 3, 7, 20])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", [1])
def test_every_sequence_reads_its_own_history(
    seed: int, block_size: int, num_blocks: int, *, caching: bool
) -> None:
    num_operations = 5000 if caching else 1200
    engine = Engine(seed, num_blocks, block_size, caching=caching)
    operate(engine, num_operations, f"{seed=} {block_size=} {num_blocks=} {caching=}")


@pytest.mark.parametrize("policy", ["lfu", "fifo", "slru", "priority"])
@pytest.mark.parametrize("num_blocks", [7, 20])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("seed", [1])
def test_every_policy_evicts_what_it_should(
    seed: int, block_size: int, num_blocks: int, policy: str
) -> None:
    engine = Engine(seed, num_blocks, block_size, caching=True, policy=policy)
    operate(engine, 3000, f"{seed=} {block_size=} {num_blocks=} {policy=}")


@pytest.mark.parametrize("num_blocks", [3, 7, 20])
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("seed", [1])
def test_what_is_copied_of_a_block_is_what_the_prompt_begins_with(
    seed: int, block_size: int, num_blocks: int
) -> None:
    engine = Engine(seed, num_blocks, block_size, caching=True, partial=True)
    operate(engine, 3000, f"{seed=} {block_size=} {num_blocks=} partial")
    assert engine.num_partial_hits


@pytest.mark.parametrize("num_blocks", [3, 7, 20])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("seed", [1])
def test_what_is_pinned_stays(seed: int, block_size: int, num_blocks: int) -> None:
    engine = PinningEngine(seed, num_blocks, block_size, caching=True)
    operate(engine, 3000, f"{seed=} {block_size=} {num_blocks=} pins")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(3, 8), (7, 2), (7, 30), (20, 8)])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("seed", [1])
def test_what_is_swapped_comes_back_as_it_was(
    seed: int, block_size: int, num_blocks: int, num_host_blocks: int, *, caching: bool
) -> None:
    engine = SwappingEngine(seed, num_blocks, block_size, num_host_blocks, caching=caching)
    operate(engine, 1500, f"{seed=} {block_size=} {num_blocks=} {num_host_blocks=} {caching=}")
    assert engine.num_swaps_out
    assert engine.num_swaps_in


@pytest.mark.parametrize("windows", [(1,), (3,), (6,), (2, 9)])
@pytest.mark.parametrize("num_blocks", [6, 16, 40])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("seed", [1])
def test_every_group_reads_what_its_window_holds(
    seed: int, block_size: int, num_blocks: int, windows: tuple[int, ...]
) -> None:
    engine = WindowEngine(seed, num_blocks, block_size, windows, caching=True)
    operate(engine, 1200, f"{seed=} {block_size=} {num_blocks=} {windows=}")
    assert engine.num_evicted


@pytest.mark.parametrize("windows", [(3,), (2, 9)])
@pytest.mark.parametrize("num_blocks", [6, 16])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("seed", [1])
def test_every_group_reads_what_its_window_holds_without_a_prefix_cache(
    seed: int, block_size: int, num_blocks: int, windows: tuple[int, ...]
) -> None:
    engine = WindowEngine(seed, num_blocks, block_size, windows, caching=False)
    operate(engine, 1000, f"{seed=} {block_size=} {num_blocks=} {windows=} without a cache")


def operate(engine: Engine | WindowEngine, num_operations: int, name: str) -> None:
    for number in range(num_operations):
        try:
            engine.operate()
            engine.verify()
            if number % 16 == 0:
                engine.verify_rarely()
        except BaseException:
            print(f"{name}: operation {number}")
            raise
