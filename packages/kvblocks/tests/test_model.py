"""Random operations against the naive model: every sequence always reads its own history."""

import pytest

from .naive_engine import Engine


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 3, 7, 20])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", [1])
def test_every_sequence_reads_its_own_history(
    seed: int, block_size: int, num_blocks: int, *, caching: bool
) -> None:
    num_operations = 5000 if caching else 1200
    engine = Engine(seed, num_blocks, block_size, caching=caching)
    for number in range(num_operations):
        try:
            engine.operate()
            engine.verify()
            if number % 16 == 0:
                engine.verify_rarely()
        except BaseException:
            print(f"{seed=} {block_size=} {num_blocks=} {caching=}: operation {number}")
            raise
