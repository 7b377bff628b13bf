"""Batches for the tests: tokens drawn at random and laid out in a pool by plain loops."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

# torch makes the cases of the CUDA kernels.
collect_ignore = [] if find_spec("torch") else ["cuda"]

MakeBatch = Callable[..., dict[str, Any]]


def _make_batch(
    seq_lens: Sequence[int],
    num_queries: Sequence[int] | None = None,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    layout: str = "HND",
    unowned: float = np.nan,
    seed: int = 0,
) -> dict[str, Any]:
    """Make the arguments of one attention call; slots that no token owns hold `unowned`."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    order = iter(rng.permutation(num_blocks).tolist())
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    if layout == "NHD":
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [np.full(shape, unowned, np.float32) for _ in "kv"]
    if layout == "NHD":
        caches = [cache.transpose(0, 2, 1, 3) for cache in caches]
    table = np.full((len(seq_lens), max(counts, default=0) + 1), -1, np.int32)
    for s, num_tokens in enumerate(seq_lens):
        for i in range(counts[s]):
            table[s, i] = next(order)
        for position in range(num_tokens):
            block, offset = table[s, position // block_size], position % block_size
            for cache in caches:
                cache[block, :, offset] = rng.standard_normal((num_kv_heads, head_dim))
    num_rows = len(seq_lens) if num_queries is None else sum(num_queries)
    q = rng.standard_normal((num_rows, num_kv_heads * group, head_dim), dtype=np.float32)
    arguments = {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": table,
        "seq_lens": np.array(seq_lens, np.int32),
    }
    if num_queries is not None:
        arguments["cu_seqlens_q"] = np.cumsum([0, *num_queries], dtype=np.int32)
    return arguments


@pytest.fixture
def make_batch() -> MakeBatch:
    """The factory of batches; unowned slots hold NaN unless a test says otherwise."""
    return _make_batch
