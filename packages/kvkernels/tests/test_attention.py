"""Attention agrees with oracles: float64 NumPy everywhere, torch, and numbers worked by hand.

Every pool holds NaN in the slots that no token owns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvkernels import paged_attention, paged_attention_reference

MakeBatch = Callable[..., dict[str, Any]]


def agrees_with_reference(batch: dict[str, Any], **options: Any) -> None:
    out, lse = paged_attention(**batch, **options, return_lse=True)
    expected, expected_lse = paged_attention_reference(**batch, **options)
    scale = np.maximum(1e-3, np.linalg.norm(expected, axis=-1, keepdims=True))
    np.testing.assert_allclose(out / scale, expected / scale, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


def edge_lengths(block_size: int) -> list[int]:
    return [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_decode_at_block_edges(make_batch: MakeBatch, block_size: int, layout: str) -> None:
    agrees_with_reference(
        make_batch(edge_lengths(block_size), block_size=block_size, layout=layout)
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
def test_prefill_at_block_edges(make_batch: MakeBatch, block_size: int, layout: str) -> None:
    lengths = edge_lengths(block_size)
    agrees_with_reference(make_batch(lengths, lengths, block_size=block_size, layout=layout))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32])
@pytest.mark.parametrize("num_queries", [None, [5, 1]], ids=["decode", "mixed"])
def test_every_group_size(
    make_batch: MakeBatch, group: int, num_queries: Sequence[int] | None
) -> None:
    agrees_with_reference(make_batch([21, 34], num_queries, group=group, num_kv_heads=3))


def test_one_kv_head_for_71_query_heads(make_batch: MakeBatch) -> None:
    agrees_with_reference(make_batch([21, 34], [3, 1], group=71, num_kv_heads=1))


@pytest.mark.parametrize("head_dim", [1, 3, 16, 33, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_queries", [None, [5, 1]], ids=["decode", "mixed"])
def test_every_head_dim(
    make_batch: MakeBatch, head_dim: int, num_queries: Sequence[int] | None
) -> None:
    agrees_with_reference(make_batch([21, 34], num_queries, head_dim=head_dim))
