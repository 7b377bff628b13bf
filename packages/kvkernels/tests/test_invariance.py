"""A row's result is the same to the last bit whatever shares its call, its pool or its table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkernels import paged_attention

MakeBatch = Callable[..., dict[str, Any]]

BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 8, 16])
WINDOWS = pytest.mark.parametrize("window_left", [-1, 0, 5, 16])
LAYOUTS = pytest.mark.parametrize("layout", ["HND", "NHD"])
GARBAGE = 2**31 - 1


def attend(batch: dict[str, Any], **options: Any) -> tuple[bytes, bytes]:
    """Attend, and return what equality of bits needs: NaN and the sign of zero included."""
    out, lse = paged_attention(**batch, **options, return_lse=True)
    return out.tobytes(), lse.tobytes()


def rows(batch: dict[str, Any], **options: Any) -> list[tuple[bytes, bytes]]:
    out, lse = paged_attention(**batch, **options, return_lse=True)
    return [(o.tobytes(), log.tobytes()) for o, log in zip(out, lse, strict=True)]


def sub_batch(
    batch: dict[str, Any], s: int, start: int, end: int, num_tokens: int
) -> dict[str, Any]:
    """Rows [start, end) of q as the last rows of sequence s, which has `num_tokens` tokens."""
    return batch | {
        "q": batch["q"][start:end],
        "block_table": batch["block_table"][s : s + 1],
        "seq_lens": np.array([num_tokens], np.int32),
        "cu_seqlens_q": np.array([0, end - start], np.int32),
    }


@WINDOWS
@BLOCK_SIZES
def test_row_is_the_same_alone_and_in_a_batch(
    make_batch: MakeBatch, block_size: int, window_left: int
) -> None:
    seq_lens, num_queries = [50, 1, 33, 0, 17, 40], [50, 1, 7, 0, 17, 1]
    batch = make_batch(seq_lens, num_queries, block_size=block_size, group=3, head_dim=64)
    together = rows(batch, window_left=window_left)
    offsets = batch["cu_seqlens_q"].tolist()
    for s, num_tokens in enumerate(seq_lens):
        alone = sub_batch(batch, s, offsets[s], offsets[s + 1], num_tokens)
        assert rows(alone, window_left=window_left) == together[offsets[s] : offsets[s + 1]]


@WINDOWS
@BLOCK_SIZES
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 32])
def test_row_is_the_same_in_any_chunking(
    make_batch: MakeBatch, chunk: int, block_size: int, window_left: int
) -> None:
    batch = make_batch([75], [75], block_size=block_size, group=3, head_dim=64)
    chunked = []
    for start in range(0, 75, chunk):
        end = min(75, start + chunk)
        part = sub_batch(batch, 0, start, end, end)
        if chunk == 1:
            # Decode: without cu_seqlens_q.
            del part["cu_seqlens_q"]
        chunked += rows(part, window_left=window_left)
    assert chunked == rows(batch, window_left=window_left)


@pytest.mark.parametrize("num_seqs", [2, 5, 16, 64])
def test_decode_row_is_the_same_in_a_shuffled_batch(make_batch: MakeBatch, num_seqs: int) -> None:
    seq_lens = np.random.default_rng(num_seqs).integers(0, 60, num_seqs)
    batch = make_batch(seq_lens.tolist(), head_dim=64)
    order = np.random.default_rng(1).permutation(num_seqs)
    shuffled = batch | {name: batch[name][order] for name in ("q", "block_table", "seq_lens")}
    straight = rows(batch)
    assert rows(shuffled) == [straight[s] for s in order]


@LAYOUTS
def test_row_is_the_same_in_any_physical_order_of_blocks(
    make_batch: MakeBatch, layout: str
) -> None:
    batch = make_batch([50, 33], [3, 33], layout=layout)
    num_blocks = len(batch["k_cache"])
    new_id = np.random.default_rng(2).permutation(num_blocks).astype(np.int32)
    old_id = np.argsort(new_id)
    table = batch["block_table"]
    moved = batch | {
        "k_cache": batch["k_cache"][old_id],
        "v_cache": batch["v_cache"][old_id],
        "block_table": np.where(table < 0, table, new_id[table]),
    }
    assert attend(moved) == attend(batch)


def test_row_is_the_same_in_every_layout(make_batch: MakeBatch) -> None:
    batches = [make_batch([50, 33], [3, 33], layout=layout) for layout in ("HND", "NHD")]
    assert attend(batches[0]) == attend(batches[1])


def test_row_is_the_same_for_keys_and_values_in_one_array(make_batch: MakeBatch) -> None:
    batch = make_batch([50, 33])
    both = np.stack([batch["k_cache"], batch["v_cache"]], axis=1)
    assert attend(batch | {"k_cache": both[:, 0], "v_cache": both[:, 1]}) == attend(batch)


@LAYOUTS
@BLOCK_SIZES
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_junk_in_unowned_slots_never_reaches_a_result(
    make_batch: MakeBatch, poison: float, block_size: int, layout: str
) -> None:
    seq_lens = [1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 1]
    poisoned, clean = (
        make_batch(seq_lens, block_size=block_size, layout=layout, unowned=junk)
        for junk in (poison, 0.0)
    )
    assert attend(poisoned) == attend(clean)


def test_junk_after_the_last_token_never_reaches_a_prefill(make_batch: MakeBatch) -> None:
    poisoned, clean = (make_batch([50, 33], [50, 5], unowned=junk) for junk in (np.nan, 0.0))
    assert attend(poisoned) == attend(clean)


@pytest.mark.parametrize("garbage", [-1, -(2**31), GARBAGE])
def test_table_entries_past_the_last_block_are_never_read(
    make_batch: MakeBatch, garbage: int
) -> None:
    batch = make_batch([17, 0, 32, 1])
    expected = attend(batch)
    for s, used in enumerate([2, 0, 2, 1]):
        batch["block_table"][s, used:] = garbage
    assert attend(batch) == expected


@pytest.mark.parametrize("garbage", [-1, GARBAGE])
@pytest.mark.parametrize(("num_queries", "num_unread"), [(1, 4), (4, 3), (20, 2)])
def test_table_entries_wholly_before_the_window_are_never_read(
    make_batch: MakeBatch, num_queries: int, num_unread: int, garbage: int
) -> None:
    # The first row is at position 80 - num_queries: 79, 76 and 60; it sees from 15 before it.
    batch = make_batch([80], [num_queries])
    expected = attend(batch, window_left=15)
    batch["block_table"][0, :num_unread] = garbage
    assert attend(batch, window_left=15) == expected


@pytest.mark.parametrize("garbage", [-1, GARBAGE])
def test_padding_rows_of_length_0_are_0_and_leave_the_others_alone(
    make_batch: MakeBatch, garbage: int
) -> None:
    batch = make_batch([17, 0, 40, 0, 0])
    batch["block_table"][[1, 3, 4]] = garbage
    out = np.full_like(batch["q"], np.nan)
    lse = np.full(out.shape[:2], np.nan, np.float32)
    paged_attention(**batch, out=out, lse=lse, return_lse=True)
    assert (out[[1, 3, 4]] == 0).all()
    assert (lse[[1, 3, 4]] == -np.inf).all()
    short = batch | {name: batch[name][[0, 2]] for name in ("q", "block_table", "seq_lens")}
    assert attend(short) == (out[[0, 2]].tobytes(), lse[[0, 2]].tobytes())


def test_padding_sequence_of_length_0_may_have_many_rows(make_batch: MakeBatch) -> None:
    out, lse = paged_attention(**make_batch([17, 0, 5], [2, 3, 5]), return_lse=True)
    assert (out[2:5] == 0).all()
    assert (lse[2:5] == -np.inf).all()
    assert np.isfinite(lse[[0, 1, 5, 6, 7, 8, 9]]).all()


def test_same_call_twice_gives_the_same_bits(make_batch: MakeBatch) -> None:
    batch = make_batch([50, 33], [3, 33])
    assert attend(batch) == attend(batch)
