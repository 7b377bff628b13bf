"""The five checks of the article this project started from, on the real packages.

Each check names what the article's own teaching program asserts; here the block manager keeps the
tables and the kernels read the blocks.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from kvblocks import BlockManager, OutOfBlocks
from kvkernels import copy_blocks, paged_attention, write_kv


class ScalarCache:
    """One head of dimension 1, as in the article: a key and a value are one number each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=False)
        self.keys = np.zeros((num_blocks, 1, block_size, 1), np.float32)
        self.values = np.zeros((num_blocks, 1, block_size, 1), np.float32)

    def write(self, seq_id: str, pairs: list[tuple[float, float]], token: int = 0) -> None:
        """Append (key, value) pairs: copies first, then the writes."""
        plan = self.manager.append({seq_id: [token + i for i in range(len(pairs))]})
        copy_blocks([self.keys, self.values], plan.copies)
        k, v = (
            np.array(column, np.float32).reshape(-1, 1, 1) for column in zip(*pairs, strict=True)
        )
        write_kv(k, v, self.keys, self.values, np.array(plan.slot_mapping, np.int64))
        self.manager.commit(seq_id, self.manager.num_computed_tokens(seq_id))

    def read(self, seq_id: str) -> list[tuple[float, float]]:
        """Every (key, value) of a sequence, through its block table."""
        size = self.manager.block_size
        table = self.manager.block_table(seq_id)
        return [
            (
                float(self.keys[table[i // size], 0, i % size, 0]),
                float(self.values[table[i // size], 0, i % size, 0]),
            )
            for i in range(self.manager.num_computed_tokens(seq_id))
        ]

    def attend(self, query: float, seq_id: str, scale: float) -> NDArray[np.float32]:
        """Attention of one query over a sequence."""
        out: NDArray[np.float32] = paged_attention(
            np.full((1, 1, 1), query, np.float32),
            self.keys,
            self.values,
            np.array([self.manager.block_table(seq_id)], np.int32),
            np.array([self.manager.num_computed_tokens(seq_id)], np.int32),
            scale=scale,
        )
        return out


def test_1_four_unaligned_requests_fill_128_slots_with_15_of_waste() -> None:
    manager = BlockManager(num_blocks=16, block_size=8)
    for start, length in enumerate((17, 31, 32, 33)):
        manager.allocate(length, range(1000 * start, 1000 * start + length))
        manager.append({length: length})
    usage = manager.usage()
    assert (usage.num_blocks, usage.num_slots, usage.num_stored_tokens) == (16, 128, 113)
    assert usage.num_wasted_slots == 15
    assert round(100 * usage.num_wasted_slots / usage.num_slots, 2) == 11.72
    assert manager.stats().num_free_blocks == 0


def test_2_and_5_branches_are_isolated_and_give_every_block_back() -> None:
    cache = ScalarCache(num_blocks=6, block_size=4)
    prompt = [(float(i), float(i * 10)) for i in range(6)]
    cache.manager.allocate("A", range(6))
    cache.write("A", prompt)
    cache.manager.fork("A", "B")
    cache.write("A", [(99.0, 990.0)], token=99)
    cache.write("B", [(88.0, 880.0)], token=88)
    assert cache.manager.block_table("A")[1] != cache.manager.block_table("B")[1]
    assert cache.read("A") == [*prompt, (99.0, 990.0)]
    assert cache.read("B") == [*prompt, (88.0, 880.0)]

    cache.manager.free("A")
    cache.manager.free("B")
    assert cache.manager.stats().num_free_blocks == 6
    assert not any(cache.manager.ref_count(block) for block in range(6))


@pytest.mark.parametrize("junk", [(999.0, -999.0), (math.nan, math.inf)])
def test_3_paged_attention_equals_dense_over_physical_blocks_2_and_0(
    junk: tuple[float, float],
) -> None:
    cache = ScalarCache(num_blocks=4, block_size=4)
    manager = cache.manager
    for block in range(3):  # hold 0, 1 and 2, then give 0 and 2 back, so that 2 comes first
        manager.allocate(block, [block])
    manager.free(0)
    manager.free(2)
    pairs = [(0.5, 1.2), (1.1, -0.4), (-0.8, 2.0), (0.9, 0.5), (1.4, -1.1), (-0.2, 0.8)]
    manager.allocate("eval", range(6))
    assert manager.block_table("eval").tolist() == [2, 0]
    cache.keys[:], cache.values[:] = junk
    cache.write("eval", pairs)

    scores = [1.3 * key * 0.5 for key, _ in pairs]
    weights = [math.exp(score - max(scores)) for score in scores]
    dense = sum(w * value for w, (_, value) in zip(weights, pairs, strict=True)) / sum(weights)
    paged = float(cache.attend(1.3, "eval", scale=0.5).item())
    assert paged == pytest.approx(dense, abs=1e-6)
    assert paged == pytest.approx(0.0979744950, abs=1e-6)


def test_4_an_append_that_finds_no_block_changes_nothing() -> None:
    cache = ScalarCache(num_blocks=1, block_size=4)
    cache.manager.allocate("seq", range(4))
    cache.write("seq", [(1.0, 1.0)] * 4)
    before = cache.manager.state_digest()
    with pytest.raises(OutOfBlocks):
        cache.write("seq", [(2.0, 2.0)], token=4)
    assert cache.manager.state_digest() == before
    assert cache.read("seq") == [(1.0, 1.0)] * 4
