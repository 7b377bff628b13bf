"""Paged attention: what is checked, and the choice of the kernel. It knows no arithmetic.

Numba is imported, and its kernels are compiled or loaded from Numba's cache, at the first call.
"""

import math
import operator
from typing import Any, NoReturn

import numpy as np

from kvkernels.arrays import FLOAT32, INT32, Array, require, require_writable
from kvkernels.cuda.arrays import is_on_device
from kvkernels.dtypes import FLOAT32 as FLOAT32_DTYPE
from kvkernels.dtypes import Dtype, from_float32, to_float32
from kvkernels.errors import ArgumentError, PoolIndexError, ShapeError
from kvkernels.layouts import require_caches, require_dtype, require_rows, require_scale


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """Attend query rows to the keys and values of their sequences in a paged cache.

    Decode, prefill, chunked prefill and batches that mix them are one call. A row's result is
    the same to the last bit alone and in any batch, in one chunk and in many, wherever its blocks
    lie, and whatever the slots hold that are not its own, NaN and infinity included.

    Args:
        q: Float32, float16 or bfloat16 [T, Hq, D], the query rows of all sequences one after
            another. Hq is a multiple of Hkv: query head h reads KV head h // (Hq // Hkv).
        k_cache: Float32, float16, bfloat16, float8_e4m3 or int8 [num_blocks, Hkv, block_size, D],
            of any strides: a pool [num_blocks, block_size, Hkv, D] is passed as its transposed
            view. Fastest where block_size and D are dense. Or [num_blocks, Hkv, D // x, block_size,
            x], packed by x.
        v_cache: [num_blocks, Hkv, block_size, D] of the same dtype; its strides may differ.
        block_table: Int32 [B, max_blocks]; entry [s, i] is the block of the tokens
            [i * block_size, (i + 1) * block_size) of sequence s. Entries past the last token and
            entries wholly before the window of every row are not read and may hold anything.
        seq_lens: Int32 [B], the tokens of each sequence in the cache, those of this step included.
            A sequence of length 0 is padding: its rows have no keys and its table is not read.
        cu_seqlens_q: Int32 [B + 1], from 0 to T: the rows of sequence s are
            [cu_seqlens_q[s], cu_seqlens_q[s + 1]), and its last row is its last token. None means
            one row for each sequence.
        scale: Factor of the scores; None means D ** -0.5.
        causal: Whether a row sees only the keys up to its own position.
        window_left: How many keys before its own a row sees: keys j >= position - window_left.
            -1 means all. A model's "sliding window" of W keys is window_left = W - 1.
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them.
        alibi_slopes: Float32 [Hq]; slope * (key position - row position) is added to a score.
        sinks: Float32 [Hq], a score of each head that takes weight and has no value. `lse` stays
            that of the keys.
        k_scale: What a key's items are multiplied with: a number, or float32 [num_blocks, Hkv,
            block_size], one for each token and head.
        v_scale: Likewise for values.
        kv_dtype: What the bits of caches mean that come as unsigned integers: "bfloat16" or
            "float8_e4m3". 16 bits of q and out are bfloat16.
        num_splits: On a CPU; into how many pieces a context is cut, at most; they are computed apart and
            folded in order. 0 cuts every 1024 keys.
        deterministic: Whether a row's bits may not depend on its batch or chunking. On a CPU they
            never depend on the batch, nor on chunking with num_splits=0, which this asks for.
        out: [T, Hq, D] of the dtype of q, C-contiguous, written and returned; it overlaps no input.
        lse: Float32 [T, Hq], C-contiguous, written; it needs return_lse=True.
        return_lse: Whether to return (out, lse).
        workspace: On a GPU; uint8, aligned to 16 bytes. None allocates.
        stream: On a GPU; where to launch. None means the current one of the framework of q.

    Returns:
        out, or (out, lse) with return_lse: the objects that were passed, else new NumPy arrays,
        whatever the type of q (uint16 bits for bfloat16). lse is the natural logarithm of the sum of exp(score). A row
        without keys is exactly 0 with an lse of -inf; so is one whose scores are all -inf.

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError: before anything is
            written. Every table entry that would be read is checked against the pool.

    Cost: 4 * D operations for each visible (row, head, key), and for one row a read of the cache;
        on the threads of `set_num_threads`, without the GIL.

    >>> import numpy as np
    >>> keys = values = np.ones((3, 1, 4, 8), np.float32)  # 3 blocks of 4 tokens, one head
    >>> q = np.ones((1, 2, 8), np.float32)  # one row of two heads
    >>> table, lengths = np.array([[2, 0]], np.int32), np.array([6], np.int32)
    >>> paged_attention(q, keys, values, table, lengths).sum(axis=-1)
    array([[8., 8.]], dtype=float32)
    """
    if is_on_device(q):
        from kvkernels.cuda import calls as cuda  # noqa: PLC0415  # most callers have no GPU

        if num_splits:
            raise ArgumentError(f"num_splits must be 0 on a GPU, got {num_splits}")
        return cuda.paged_attention(
            *(q, k_cache, v_cache, block_table, seq_lens),
            cu_seqlens_q=cu_seqlens_q,
            scale=scale,
            causal=causal,
            window_left=window_left,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=kv_dtype,
            deterministic=deterministic,
            out=out,
            lse=lse,
            return_lse=return_lse,
            workspace=workspace,
            stream=stream,
        )
    if workspace is not None or stream is not None:
        rule = "workspace and stream need arrays in GPU memory"
        raise ArgumentError(f"{rule}, got {type(q).__qualname__}")
    queries, q_dtype = require_rows("q", q, "T, Hq, D")
    keys, values = require_caches(k_cache, v_cache, kv_dtype)
    num_rows, num_heads, head_dim = queries.shape
    num_blocks, _, block_size, _ = keys.shape
    _check_heads(queries.shape, keys.shape)
    scale, window_left = _check_options(scale, window_left, head_dim)
    softcap, num_splits = _check_more(softcap, num_splits, deterministic=deterministic)
    k_number, k_scales = require_scale("k_scale", k_scale, keys)
    v_number, v_scales = require_scale("v_scale", v_scale, values)
    slopes = _require_heads("alibi_slopes", alibi_slopes, num_heads)
    sink_scores = _require_heads("sinks", sinks, num_heads)

    tables = require("block_table", block_table, INT32, "B, max_blocks")
    lengths = require("seq_lens", seq_lens, INT32, "B")
    offsets = _require_offsets(cu_seqlens_q, lengths, num_rows)
    if tables.shape[0] != lengths.shape[0]:
        rule = "block_table and seq_lens must have one row for each sequence"
        raise ShapeError(f"{rule}, got {tables.shape[0]} and {lengths.shape[0]}")

    results = _require_out(out, queries.shape, q_dtype)
    if lse is not None and not return_lse:
        raise ArgumentError("lse needs return_lse=True, got return_lse=False")
    log_sums = _require_result("lse", lse, FLOAT32, (num_rows, num_heads), "T, Hq")

    from kvkernels.cpu import calls, work  # noqa: PLC0415  # importing Numba is slow

    found = work.check(tables, lengths, offsets, num_rows, block_size, num_blocks, window_left)
    if found[0] != work.OK:
        _refuse(found, tables, lengths, offsets, keys.shape)
    options = calls.Options(
        *(scale, bool(causal), window_left, softcap, k_number, v_number, num_splits),
        *(slopes, sink_scores, k_scales, v_scales),
    )
    floats = results if q_dtype is FLOAT32_DTYPE else np.empty(results.shape, np.float32)
    calls.attend(
        *(to_float32(queries, q_dtype), keys, values, tables, lengths, offsets),
        *(options, floats, log_sums),
    )
    if floats is not results:
        results[...] = from_float32(floats, q_dtype)
    result = results if out is None else out
    if return_lse:
        return result, log_sums if lse is None else lse
    return result


def _check_heads(queries: tuple[int, ...], pool: tuple[int, ...]) -> None:
    """Check that the heads of q fit those of the caches, by their shapes."""
    _, num_heads, head_dim = queries
    _, num_kv_heads, _, cache_dim = pool
    if head_dim != cache_dim:
        raise ShapeError(f"q and the caches must agree on head_dim, got {head_dim} and {cache_dim}")
    if num_heads == 0 or num_heads % num_kv_heads:
        rule = "num_heads must be a positive multiple of num_kv_heads"
        raise ShapeError(f"{rule}, got {num_heads} and {num_kv_heads}")


def _check_options(scale: float | None, window_left: int, head_dim: int) -> tuple[float, int]:
    """Check scale and window_left; returns them as the kernel takes them."""
    if scale is None:
        scale = head_dim**-0.5
    if not math.isfinite(scale):
        raise ArgumentError(f"scale must be finite, got {scale}")
    window_left = operator.index(window_left)
    if window_left < -1:
        rule = "window_left must be a number of keys, or -1 for all"
        raise ArgumentError(f"{rule}, got {window_left}")
    return scale, window_left


def _require_offsets(cu_seqlens_q: Any, lengths: Array, num_rows: int) -> Array:
    """Check the length of cu_seqlens_q, or make the one of decode: one row a sequence."""
    num_seqs = lengths.shape[0]
    if cu_seqlens_q is None:
        if num_rows != num_seqs:
            rule = "q must have one row for each sequence unless cu_seqlens_q is given"
            raise ShapeError(f"{rule}, got {num_rows} rows and {num_seqs} sequences")
        return np.arange(num_seqs + 1, dtype=np.int32)
    offsets = require("cu_seqlens_q", cu_seqlens_q, INT32, "B + 1")
    if offsets.shape[0] != num_seqs + 1:
        rule = "cu_seqlens_q must have one entry more than there are sequences"
        raise ShapeError(f"{rule}, got {offsets.shape[0]} and {num_seqs} sequences")
    return offsets


def _check_more(softcap: float, num_splits: int, *, deterministic: bool) -> tuple[float, int]:
    """Check softcap and num_splits."""
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ArgumentError(f"softcap must be finite and not negative, got {softcap}")
    num_splits = operator.index(num_splits)
    if num_splits < 0:
        raise ArgumentError(f"num_splits must not be negative, got {num_splits}")
    if deterministic and num_splits:
        rule = "deterministic results need num_splits=0, splits of a fixed size"
        raise ArgumentError(f"{rule}, got {num_splits}")
    return float(softcap), num_splits


def _require_heads(name: str, given: Any, num_heads: int) -> Array | None:
    """Check an array with a number for each query head."""
    if given is None:
        return None
    found = require(name, given, FLOAT32, "Hq")
    if found.shape != (num_heads,):
        raise ShapeError(
            f"{name} must have the shape [Hq] of q, [{num_heads}], got {list(found.shape)}"
        )
    return np.ascontiguousarray(found)


def _require_out(given: Any, shape: tuple[int, ...], dtype: Dtype) -> Array:
    """Check the caller's out, or make a new one."""
    if given is None:
        return np.empty(shape, dtype.bits)
    found, _ = require_dtype("out", given, (dtype,))
    return _require_result("out", found, dtype.bits, shape, "T, Hq, D")


def _require_result(
    name: str, given: Any, dtype: "np.dtype[Any]", shape: tuple[int, ...], axes: str
) -> Array:
    """Check a caller's output array, or make a new one."""
    if given is None:
        return np.empty(shape, dtype)
    found = require(name, given, dtype, axes)
    require_writable(name, found)
    if found.shape != shape:
        raise ShapeError(
            f"{name} must have the shape [{axes}] of q, {list(shape)}, got {list(found.shape)}"
        )
    if not found.flags.c_contiguous:
        strides = [step // found.itemsize for step in found.strides]
        raise ShapeError(f"{name} must be C-contiguous, got the strides {strides}")
    return found


def _refuse(
    found: tuple[int, int, int],
    tables: Array,
    lengths: Array,
    offsets: Array,
    pool: tuple[int, ...],
) -> NoReturn:
    """Raise the error for what the kernel's check found: (what, sequence, table column)."""
    from kvkernels.cpu import work  # noqa: PLC0415  # importing Numba is slow

    what, s, i = found
    if what == work.BAD_CU_SEQLENS:
        rule = "cu_seqlens_q must start at 0, never decrease and end at the number of rows of q"
        raise ArgumentError(f"{rule}, got {_shorten(offsets)}")
    length = int(lengths[s])
    if what == work.NEGATIVE_LENGTH:
        raise ArgumentError(f"seq_lens must not be negative, got {length} for sequence {s}")
    if what == work.TOO_MANY_ROWS:
        num_queries = int(offsets[s + 1]) - int(offsets[s])
        rule = "a sequence must not have more rows in q than tokens, unless it has length 0"
        raise ArgumentError(f"{rule}, got {num_queries} rows and {length} tokens for sequence {s}")
    num_blocks, _, block_size, _ = pool
    if what == work.TABLE_TOO_NARROW:
        rule = "block_table must have an entry for each block of a sequence"
        values = f"got {tables.shape[1]} entries of block size {block_size} for {length} tokens"
        raise ShapeError(f"{rule}, {values} of sequence {s}")
    rule = f"block ids in use must be in [0, {num_blocks}), the pool"
    raise PoolIndexError(f"{rule}, got {int(tables[s, i])} for block {i} of sequence {s}")


def _shorten(offsets: Array) -> str:
    return np.array2string(offsets, threshold=16, separator=", ")
