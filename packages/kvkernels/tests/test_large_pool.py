"""Offsets beyond 2**31 and 2**32 items: a sparse file, of which a few pages exist."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkernels import copy_blocks, paged_attention, write_kv

MakeBatch = Callable[..., dict[str, Any]]

BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS = 16, 64, 2
BLOCK_ITEMS = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
NUM_BLOCKS = 2**32 // BLOCK_ITEMS + 8
# Around both limits, and at both ends.
FAR_BLOCKS = [0, 2**31 // BLOCK_ITEMS + 1, 2**32 // BLOCK_ITEMS + 2, NUM_BLOCKS - 1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
def test_blocks_beyond_2_to_the_32_items_are_written_copied_and_read(
    make_batch: MakeBatch, tmp_path: Path
) -> None:
    batch = make_batch([4 * BLOCK_SIZE - 3], [5], head_dim=HEAD_DIM, unowned=0.0)
    expected = paged_attention(**batch)
    # 16 GiB of a file with holes: keys and values of a block side by side.
    shape = (NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = np.memmap(tmp_path / "pool", np.float32, "w+", shape=shape)
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    blocks = batch["block_table"][0, :4]
    k, v = (
        batch[name][blocks].transpose(0, 2, 1, 3).reshape(-1, NUM_KV_HEADS, HEAD_DIM)
        for name in ("k_cache", "v_cache")
    )
    # The last two blocks arrive by a copy.
    written = [*FAR_BLOCKS[:2], FAR_BLOCKS[2] - 1, FAR_BLOCKS[3] - 1]
    slots = np.concatenate([np.arange(BLOCK_SIZE) + block * BLOCK_SIZE for block in written])
    write_kv(k, v, k_cache, v_cache, slots)
    copies = [(written[i], FAR_BLOCKS[i], BLOCK_SIZE) for i in (2, 3)]
    copy_blocks([k_cache, v_cache], copies)
    table = np.array([FAR_BLOCKS], np.int32)
    far = batch | {"k_cache": k_cache, "v_cache": v_cache, "block_table": table}
    assert np.array_equal(paged_attention(**far), expected)
