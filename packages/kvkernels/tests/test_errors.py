"""What paged_attention refuses: the rule, then the values, before anything is written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkernels import (
    ArgumentError,
    ArrayError,
    DtypeError,
    KVKernelsError,
    PoolIndexError,
    ShapeError,
    paged_attention,
)

MakeBatch = Callable[..., dict[str, Any]]
Change = Callable[[dict[str, Any]], dict[str, Any]]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def with_item(array: Any, index: tuple[int, ...], value: int) -> Any:
    changed = array.copy()
    changed[index] = value
    return changed


# The batch: two sequences of 20 and 40 tokens with 3 and 1 rows, 2 KV heads, 4 heads, head dim
# 16, block size 16, a pool of 8 blocks, a table of 4 columns.
REFUSALS: dict[str, tuple[Change, type[KVKernelsError], str]] = {
    "q of float64": (
        lambda b: {"q": b["q"].astype(np.float64)},
        DtypeError,
        "q must have dtype float32, float16 or bfloat16, got float64",
    ),
    "caches of two dtypes": (
        lambda b: {"k_cache": b["k_cache"].astype(np.float16)},
        DtypeError,
        "k_cache and v_cache must have one dtype, got float16 and float32",
    ),
    "table of int64": (
        lambda b: {"block_table": b["block_table"].astype(np.int64)},
        DtypeError,
        "block_table must have dtype int32, the only one supported, got int64",
    ),
    "lengths of int64": (
        lambda b: {"seq_lens": b["seq_lens"].astype(np.int64)},
        DtypeError,
        "seq_lens must have dtype int32, the only one supported, got int64",
    ),
    "q of two axes": (
        lambda b: {"q": b["q"][0]},
        ShapeError,
        "q must have the shape [T, Hq, D], got [4, 16]",
    ),
    "cache of three axes": (
        lambda b: {"v_cache": b["v_cache"][0]},
        ShapeError,
        (
            "v_cache must have the shape [num_blocks, num_kv_heads, block_size, head_dim], "
            "got [2, 16, 16]"
        ),
    ),
    "caches of two shapes": (
        lambda b: {"v_cache": b["v_cache"][:3]},
        ShapeError,
        "k_cache and v_cache must have one shape, got [8, 2, 16, 16] and [3, 2, 16, 16]",
    ),
    "caches without heads": (
        lambda b: {"k_cache": b["k_cache"][:, :0], "v_cache": b["v_cache"][:, :0]},
        ShapeError,
        "[num_kv_heads, block_size, head_dim] must be positive, got [0, 16, 16]",
    ),
    "head dims of q and caches": (
        lambda b: {"q": b["q"][..., :8].copy()},
        ShapeError,
        "q and the caches must agree on head_dim, got 8 and 16",
    ),
    "heads no multiple": (
        lambda b: {"q": b["q"][:, :3].copy()},
        ShapeError,
        "num_heads must be a positive multiple of num_kv_heads, got 3 and 2",
    ),
    "no heads": (
        lambda b: {"q": b["q"][:, :0].copy()},
        ShapeError,
        "num_heads must be a positive multiple of num_kv_heads, got 0 and 2",
    ),
    "caches of float64": (
        lambda b: {"k_cache": b["k_cache"].astype(np.float64)},
        DtypeError,
        ("k_cache must have dtype float32, float16, bfloat16, float8_e4m3 or int8, got float64"),
    ),
    "bits of a cache without their name": (
        lambda b: {"k_cache": np.zeros(b["k_cache"].shape, np.uint8)},
        DtypeError,
        (
            "k_cache must have dtype float32, float16, bfloat16, float8_e4m3 or int8, "
            "got uint8 without kv_dtype"
        ),
    ),
    "kv_dtype of another name": (
        lambda _: {"kv_dtype": "int4"},
        ArgumentError,
        "kv_dtype must be float32, float16, bfloat16, float8_e4m3 or int8, got 'int4'",
    ),
    "negative softcap": (
        lambda _: {"softcap": -1.0},
        ArgumentError,
        "softcap must be a finite float32 and not negative, got -1.0",
    ),
    "negative splits": (
        lambda _: {"num_splits": -1},
        ArgumentError,
        "num_splits must not be negative, got -1",
    ),
    "deterministic splits of a length's own": (
        lambda _: {"num_splits": 2, "deterministic": True},
        ArgumentError,
        "deterministic results need num_splits=0, splits of a fixed size, got 2",
    ),
    "slopes for other heads": (
        lambda _: {"alibi_slopes": np.ones(3, np.float32)},
        ShapeError,
        "alibi_slopes must have the shape [Hq] of q, [4], got [3]",
    ),
    "sinks of float64": (
        lambda _: {"sinks": np.ones(4)},
        DtypeError,
        "sinks must have dtype float32, the only one supported, got float64",
    ),
    "infinite k_scale": (
        lambda _: {"k_scale": float("inf")},
        ArgumentError,
        "k_scale must be a finite float32, got inf",
    ),
    "v_scale of another shape": (
        lambda _: {"v_scale": np.ones((8, 2), np.float32)},
        ShapeError,
        (
            "v_scale must have the shape [num_blocks, num_kv_heads, block_size] of the caches, "
            "[8, 2, 16], got [8, 2]"
        ),
    ),
    "negative stride": (
        lambda b: {"k_cache": b["k_cache"][::-1]},
        ShapeError,
        (
            "strides of k_cache must be positive multiples of its 4-byte items, "
            "got -2048 bytes for axis 0"
        ),
    ),
    "zero stride": (
        lambda b: {"q": np.broadcast_to(b["q"][:1], b["q"].shape)},
        ShapeError,
        "strides of q must be positive multiples of its 4-byte items, got 0 bytes for axis 0",
    ),
    "table with another number of sequences": (
        lambda b: {"block_table": b["block_table"][:1]},
        ShapeError,
        "block_table and seq_lens must have one row for each sequence, got 1 and 2",
    ),
    "rows without offsets": (
        lambda _: {"cu_seqlens_q": None},
        ShapeError,
        (
            "q must have one row for each sequence unless cu_seqlens_q is given, "
            "got 4 rows and 2 sequences"
        ),
    ),
    "too few offsets": (
        lambda _: {"cu_seqlens_q": ints(0, 4)},
        ShapeError,
        "cu_seqlens_q must have one entry more than there are sequences, got 2 and 2 sequences",
    ),
    "offsets that start late": (
        lambda _: {"cu_seqlens_q": ints(1, 3, 4)},
        ArgumentError,
        (
            "cu_seqlens_q must start at 0, never decrease and end at the number of rows of q, "
            "got [1, 3, 4]"
        ),
    ),
    "offsets that end early": (
        lambda _: {"cu_seqlens_q": ints(0, 3, 3)},
        ArgumentError,
        (
            "cu_seqlens_q must start at 0, never decrease and end at the number of rows of q, "
            "got [0, 3, 3]"
        ),
    ),
    "offsets that decrease": (
        lambda _: {"cu_seqlens_q": ints(0, 5, 4)},
        ArgumentError,
        (
            "cu_seqlens_q must start at 0, never decrease and end at the number of rows of q, "
            "got [0, 5, 4]"
        ),
    ),
    "negative length": (
        lambda _: {"seq_lens": ints(20, -1)},
        ArgumentError,
        "seq_lens must not be negative, got -1 for sequence 1",
    ),
    "more rows than tokens": (
        lambda _: {"seq_lens": ints(2, 40)},
        ArgumentError,
        (
            "a sequence must not have more rows in q than tokens, unless it has length 0, "
            "got 3 rows and 2 tokens for sequence 0"
        ),
    ),
    "table too narrow": (
        lambda _: {"seq_lens": ints(20, 65)},
        ShapeError,
        (
            "block_table must have an entry for each block of a sequence, "
            "got 4 entries of block size 16 for 65 tokens of sequence 1"
        ),
    ),
    "block past the pool": (
        lambda b: {"block_table": with_item(b["block_table"], (1, 2), 8)},
        PoolIndexError,
        "block ids in use must be in [0, 8), the pool, got 8 for block 2 of sequence 1",
    ),
    "padding in the used part": (
        lambda b: {"block_table": with_item(b["block_table"], (0, 1), -1)},
        PoolIndexError,
        "block ids in use must be in [0, 8), the pool, got -1 for block 1 of sequence 0",
    ),
    "infinite scale": (
        lambda _: {"scale": float("inf")},
        ArgumentError,
        "scale must be a finite float32, got inf",
    ),
    "scale beyond float32": (
        lambda _: {"scale": 1e39},
        ArgumentError,
        "scale must be a finite float32, got 1e+39",
    ),
    "queries of the other byte order": (
        lambda b: {"q": b["q"].astype(">f4")},
        DtypeError,
        "q must have the byte order of this machine, got float32 in the other (>f4)",
    ),
    "lengths of the other byte order": (
        lambda b: {"seq_lens": b["seq_lens"].astype(">i4")},
        DtypeError,
        "seq_lens must have the byte order of this machine, got int32 in the other (>i4)",
    ),
    "window of -2": (
        lambda _: {"window_left": -2},
        ArgumentError,
        "window_left must be a number of keys, or -1 for all, got -2",
    ),
    "lse that is not returned": (
        lambda _: {"return_lse": False},
        ArgumentError,
        "lse needs return_lse=True, got return_lse=False",
    ),
    "out of another shape": (
        lambda b: {"out": b["out"][:3]},
        ShapeError,
        "out must have the shape [T, Hq, D] of q, [4, 4, 16], got [3, 4, 16]",
    ),
    "out of float64": (
        lambda b: {"out": b["out"].astype(np.float64)},
        DtypeError,
        "out must have dtype float32, got float64",
    ),
    "out not contiguous": (
        lambda b: {"out": np.repeat(b["out"], 2, axis=0)[::2]},
        ShapeError,
        "out must be C-contiguous, got the strides [128, 16, 1]",
    ),
    "lse of another shape": (
        lambda b: {"lse": b["lse"][:, :2]},
        ShapeError,
        "lse must have the shape [T, Hq] of q, [4, 4], got [4, 2]",
    ),
    "out read-only": (
        lambda b: {"out": np.frombuffer(b["out"].tobytes(), np.float32).reshape(4, 4, 16)},
        ArrayError,
        "out is written, so it must not be read-only",
    ),
    "unaligned q": (
        lambda b: {
            "q": np.frombuffer(b"x" + b["q"].tobytes(), np.float32, 256, 1).reshape(4, 4, 16)
        },
        ShapeError,
        "q must be aligned to its 4-byte items",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_states_the_rule_and_the_values_and_writes_nothing(
    make_batch: MakeBatch, change: Change, error: type[KVKernelsError], message: str
) -> None:
    batch = make_batch([20, 40], [3, 1])
    out = np.full_like(batch["q"], 7)
    lse = np.full(out.shape[:2], 7, np.float32)
    batch |= {"out": out, "lse": lse, "return_lse": True}
    with pytest.raises(KVKernelsError) as caught:
        paged_attention(**batch | change(batch))
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize("block", [8, -1])
def test_block_outside_the_pool_in_an_unused_row_is_no_error(
    make_batch: MakeBatch, block: int
) -> None:
    batch = make_batch([20, 40], [3, 0])
    batch["block_table"][1] = block
    assert np.isfinite(paged_attention(**batch)).all()


def test_empty_batch_gives_empty_results(make_batch: MakeBatch) -> None:
    batch = make_batch([])
    out, lse = paged_attention(**batch, return_lse=True)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
