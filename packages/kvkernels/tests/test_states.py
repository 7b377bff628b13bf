"""Results over disjoint keys are merged, and a shared prefix is read once without changing a bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkernels import (
    ArgumentError,
    DtypeError,
    ShapeError,
    cascade_attention,
    get_num_threads,
    merge_states,
    paged_attention,
    paged_attention_reference,
    set_num_threads,
    write_kv,
)
from kvkernels.arrays import Array
from kvkernels.dtypes import BY_NAME, from_float32, to_float32

MakeBatch = Callable[..., dict[str, Any]]

TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}


def parts_of(batch: dict[str, Any], lengths: list[int], dtype: str) -> tuple[list[Array], ...]:
    """Attend every row to stretches of `lengths` tokens in turn, whole blocks each; no causality."""
    outs, lses, start = [], [], 0
    for length in lengths:
        columns = slice(start, start + length // 16)
        part = batch | {
            "block_table": np.ascontiguousarray(batch["block_table"][:, columns]),
            "seq_lens": np.full(len(batch["seq_lens"]), length, np.int32),
            "q": from_float32(batch["q"], BY_NAME[dtype]),
        }
        out, lse = paged_attention(**part, return_lse=True)
        outs.append(out)
        lses.append(lse)
        start += length // 16
    return outs, lses


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_merged_parts_are_the_whole(make_batch: MakeBatch, dtype: str, *, has_sinks: bool) -> None:
    batch = make_batch([96, 96], head_dim=32)
    sinks = np.array([0.5, -1, 2, 0], np.float32) if has_sinks else None
    outs, lses = parts_of(batch, [16, 48, 32], dtype)
    out, lse = merge_states(outs, lses, sinks=sinks)
    q = to_float32(from_float32(batch["q"], BY_NAME[dtype]), BY_NAME[dtype])
    expected, expected_lse = paged_attention_reference(**batch | {"q": q}, sinks=sinks)
    error = np.linalg.norm(to_float32(out, BY_NAME[dtype]) - expected)
    assert error <= TOLERANCES[dtype] * np.linalg.norm(expected)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


def test_merge_writes_where_it_is_told(make_batch: MakeBatch) -> None:
    outs, lses = parts_of(make_batch([32], head_dim=32), [16, 16], "float32")
    out, lse = np.full_like(outs[0], np.nan), np.full_like(lses[0], np.nan)
    found = merge_states(outs, lses, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    assert all(map(np.array_equal, merge_states(outs, lses), found))


def test_merged_row_is_the_same_alone_and_in_a_batch(make_batch: MakeBatch) -> None:
    outs, lses = parts_of(make_batch([48] * 7, head_dim=24), [16, 32], "float32")
    together, _ = merge_states(outs, lses)
    for row in range(7):
        own, _ = merge_states(
            [out[row : row + 1] for out in outs], [lse[row : row + 1] for lse in lses]
        )
        assert own.tobytes() == together[row : row + 1].tobytes()


def test_parts_without_keys_count_nothing_and_are_not_read() -> None:
    outs = [np.full((2, 1, 8), value, np.float32) for value in (np.nan, 3.0)]
    lses = [np.full((2, 1), value, np.float32) for value in (-np.inf, 1.0)]
    lses[1][1] = -np.inf
    out, lse = merge_states(outs, lses, sinks=None)
    assert (out[0] == 3).all()
    assert (out[1] == 0).all()
    assert lse.ravel().tolist() == [1.0, -np.inf]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outs": []}, ArgumentError, "outs and lses must be as many, and at least one of each, got 0 and 2"),
        ({"lses": [1]}, ArgumentError, "outs and lses must be as many, and at least one of each, got 2 and 1"),
        ({"sinks": np.zeros(3, np.float32)}, ShapeError, "sinks must have the shape [Hq] of q, [2], got [3]"),
        ({"out": np.zeros((1, 2, 8), np.float16)}, DtypeError, "out must have dtype float32, got float16"),
        (
            {"lses": [np.zeros((1, 2), np.float32), np.zeros((2, 2), np.float32)]},
            ShapeError,
            "lses[1] must have the shape [T, Hq] of outs[0], [1, 2], got [2, 2]",
        ),
        (
            {"outs": [np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 4), np.float32)]},
            ShapeError,
            "outs[1] must have the shape [T, Hq, D] of outs[0], [1, 2, 8], got [1, 2, 4]",
        ),
    ],
)  # fmt: skip
def test_merge_refuses_what_does_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "outs": [np.zeros((1, 2, 8), np.float32)] * 2,
        "lses": [np.zeros((1, 2), np.float32)] * 2,
    }
    with pytest.raises(error) as caught:
        merge_states(**given | change)
    assert str(caught.value) == message


def shared_batch(make_batch: MakeBatch, num_shared: int, **options: Any) -> dict[str, Any]:
    """Sequences that share their first tokens, with rows after these: decode and chunks."""
    seq_lens = [num_shared + n for n in (1, 40, 17, 200)]
    batch = make_batch(seq_lens, [1, 5, 17, 30], head_dim=32, **options)
    columns = num_shared // batch["k_cache"].shape[2]
    batch["block_table"][:, :columns] = batch["block_table"][0, :columns]
    return batch


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_shared", [0, 16, 1024, 1040, 3072])
def test_cascade_has_the_bits_of_attention(
    make_batch: MakeBatch, num_shared: int, num_threads: int
) -> None:
    before = get_num_threads()
    set_num_threads(num_threads)
    try:
        batch = shared_batch(make_batch, num_shared)
        expected = paged_attention(**batch, return_lse=True)
        found = cascade_attention(**batch, num_shared_tokens=num_shared, return_lse=True)
    finally:
        set_num_threads(before)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": np.array([0.5, -1, 2, 0], np.float32)},
        {"causal": False},
        {"k_scale": 0.5, "v_scale": 2.0},
    ],
    ids=["softcap", "sinks", "full", "scales"],
)
@pytest.mark.parametrize("block_size", [5, 24])
def test_cascade_with_every_option_has_the_bits_of_attention(
    make_batch: MakeBatch, block_size: int, options: dict[str, Any]
) -> None:
    batch = shared_batch(make_batch, 2160, block_size=block_size)
    expected = paged_attention(**batch, **options)
    found = cascade_attention(**batch, num_shared_tokens=2160, **options)
    assert found.tobytes() == expected.tobytes()


def test_cascade_agrees_with_float64(make_batch: MakeBatch) -> None:
    batch = shared_batch(make_batch, 1024)
    expected, _ = paged_attention_reference(**batch)
    found = cascade_attention(**batch, num_shared_tokens=1024)
    assert np.linalg.norm(found - expected) <= 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_shared_tokens": 17}, "num_shared_tokens must be a multiple of the block size, 16, got 17"),
        ({"num_shared_tokens": -16}, "num_shared_tokens must be a multiple of the block size, 16, got -16"),
        ({"num_shared_tokens": 48}, "every row of a cascade must come after the shared tokens, 48, got a first position of 32 for sequence 0"),
        ({"swap": True}, "the first 2 blocks of all sequences of a cascade must be the same, got others for sequence 2"),
    ],
)  # fmt: skip
def test_cascade_refuses_what_is_not_shared(
    make_batch: MakeBatch, change: dict[str, Any], message: str
) -> None:
    batch = shared_batch(make_batch, 32)
    if change.pop("swap", False):
        batch["block_table"][2, 1] = batch["block_table"][1, 2]
    with pytest.raises(ArgumentError) as caught:
        cascade_attention(**batch, **{"num_shared_tokens": 32} | change)
    assert str(caught.value) == message


def test_slots_written_after_a_cascade_are_read_by_the_next(make_batch: MakeBatch) -> None:
    batch = shared_batch(make_batch, 1024)
    new = np.ones((1, 2, 32), np.float32)
    last = int(batch["seq_lens"][3]) - 1
    slot = int(batch["block_table"][3, last // 16]) * 16 + last % 16
    before = cascade_attention(**batch, num_shared_tokens=1024)
    write_kv(new, new, batch["k_cache"], batch["v_cache"], np.array([slot]))
    after = cascade_attention(**batch, num_shared_tokens=1024)
    assert np.flatnonzero((before != after).any(axis=(1, 2))).tolist() == [52]
