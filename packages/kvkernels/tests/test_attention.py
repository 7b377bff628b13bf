"""Attention agrees with oracles: float64 NumPy everywhere, torch, and numbers worked by hand.

Every pool holds NaN in the slots that no token owns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvkernels import paged_attention, paged_attention_reference

MakeBatch = Callable[..., dict[str, Any]]

KV = ("k_cache", "v_cache")
HALF = np.array([16], np.int32)


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 7, 8, 20, 1000])
@pytest.mark.parametrize(
    "num_queries", [None, [9, 1, 0, 30, 8]], ids=["decode", "mixed and chunked"]
)
def test_windows_and_causality(
    make_batch: MakeBatch, num_queries: Sequence[int] | None, window_left: int, *, causal: bool
) -> None:
    batch = make_batch([9, 26, 5, 41, 16], num_queries, block_size=8)
    agrees_with_reference(batch, window_left=window_left, causal=causal)


@pytest.mark.parametrize("scale", [0.01, 1.0, -0.5, 0.0])
def test_scale(make_batch: MakeBatch, scale: float) -> None:
    agrees_with_reference(make_batch([9, 26], [4, 1]), scale=scale)


def test_default_scale_is_the_inverse_root_of_head_dim(make_batch: MakeBatch) -> None:
    batch = make_batch([9, 26], head_dim=64)
    assert np.array_equal(paged_attention(**batch), paged_attention(**batch, scale=0.125))


@pytest.mark.parametrize("magnitude", [1e-20, 30.0, 1e4])
def test_scores_of_any_magnitude_neither_overflow_nor_vanish(
    make_batch: MakeBatch, magnitude: float
) -> None:
    batch = make_batch([70, 3], head_dim=32)
    # A power of two keeps the products exact, so that only the softmax is tested.
    batch["q"] = np.sign(batch["q"]) * np.float32(2.0 ** np.round(np.log2(magnitude)))
    batch["k_cache"] = np.round(batch["k_cache"] * 4) / 4
    agrees_with_reference(batch)


@pytest.mark.parametrize("magnitude", [1e2, 1e6, 1e30])
def test_rows_of_hugely_negative_scores(make_batch: MakeBatch, magnitude: float) -> None:
    batch = make_batch([20, 3])
    batch["q"] = np.full_like(batch["q"], 2.0 ** np.round(np.log2(magnitude)))
    batch["k_cache"] = -np.ceil(np.abs(batch["k_cache"]))
    agrees_with_reference(batch)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(make_batch: MakeBatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq_lens = rng.integers(0, 90, rng.integers(1, 7))
    num_queries = None
    if rng.random() < 0.7:
        num_queries = [int(rng.integers(0, n + 1)) for n in seq_lens]
    batch = make_batch(
        seq_lens.tolist(),
        num_queries,
        num_kv_heads=int(rng.integers(1, 4)),
        group=int(rng.integers(1, 6)),
        head_dim=int(rng.choice([8, 20, 64, 128])),
        block_size=int(rng.choice([1, 2, 5, 16, 32])),
        layout=str(rng.choice(["HND", "NHD"])),
        seed=seed,
    )
    window_left = int(rng.choice([-1, -1, 0, 3, 17]))
    agrees_with_reference(batch, window_left=window_left, causal=bool(rng.random() < 0.8))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_long_sequence(make_batch: MakeBatch, layout: str) -> None:
    agrees_with_reference(make_batch([3000], [2], head_dim=64, group=3, layout=layout))


def test_agrees_with_torch_sdpa_on_the_gathered_cache(make_batch: MakeBatch) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    seq_lens = [37, 16, 90]
    batch = make_batch(seq_lens, seq_lens, num_kv_heads=3, group=3, head_dim=64)
    out = paged_attention(**batch)
    row = 0
    for s, num_tokens in enumerate(seq_lens):
        positions = np.arange(num_tokens)
        blocks, offsets = batch["block_table"][s, positions // 16], positions % 16
        q = batch["q"][row : row + num_tokens].transpose(1, 0, 2)
        k, v = (batch[name][blocks, :, offsets].transpose(1, 0, 2) for name in KV)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(torch.from_numpy(x[None].copy()) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        np.testing.assert_allclose(
            out[row : row + num_tokens], expected[0].permute(1, 0, 2).numpy(), atol=2e-6, rtol=0
        )
        row += num_tokens


def test_worked_example_of_physical_order_2_0_with_junk_in_the_tail() -> None:
    pairs = [(0.5, 1.2), (1.1, -0.4), (-0.8, 2.0), (0.9, 0.5), (1.4, -1.1), (-0.2, 0.8)]
    pool = np.full((4, 4, 2), np.nan, np.float32)
    pool[2], pool[0, :2] = pairs[:4], pairs[4:]
    pool[0, 2], pool[0, 3] = (999.0, -999.0), (np.inf, np.nan)
    out = paged_attention(
        np.array([[[1.3]]], np.float32),
        pool[:, None, :, :1].copy(),
        pool[:, None, :, 1:].copy(),
        np.array([[2, 0]], np.int32),
        np.array([6], np.int32),
        scale=0.5,
    )
    assert out.item() == pytest.approx(0.0979744950, abs=1e-6)


def test_lse_merges_two_halves_into_the_whole(make_batch: MakeBatch) -> None:
    batch = make_batch([32])
    whole, _ = paged_attention(**batch, return_lse=True)
    parts, logs = [], []
    for i in range(2):
        half = batch | {"block_table": batch["block_table"][:, i:], "seq_lens": HALF}
        out, lse = paged_attention(**half, return_lse=True)
        parts.append(out)
        logs.append(lse[..., None])
    weights = np.exp(np.stack(logs) - np.logaddexp(*logs))
    np.testing.assert_allclose((np.stack(parts) * weights).sum(0), whole, atol=1e-6)


def test_rows_whose_scores_are_all_minus_infinity_count_as_rows_without_keys(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch([20], unowned=0.0)
    batch["q"][:] = 1
    batch["k_cache"][:] = -np.inf
    out, lse = paged_attention(**batch, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_in_an_owned_slot_reaches_exactly_the_rows_that_see_it(
    make_batch: MakeBatch, name: str
) -> None:
    batch = make_batch([20], [20], group=1, num_kv_heads=1)
    batch[name][batch["block_table"][0, 0], :, 7] = np.nan
    out = paged_attention(**batch)
    assert np.isfinite(out[:7]).all()
    assert np.isnan(out[7:]).all()
