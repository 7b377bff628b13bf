"""Paged attention, and attention that shares a prefix: what they take and give.

It knows what the arguments mean. A backend checks them and computes: the one in whose memory the arrays
lie. Numba is imported, and its kernels are compiled or loaded, at the first call on a CPU.
"""

import operator
from typing import Any

from kvkernels.arguments import AttentionCall
from kvkernels.backends import backend_of


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
    debug: bool | None = None,
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
        workspace: Uint8, of at least `workspace_size` bytes, on a GPU aligned to 16, in which the call
            computes; None allocates. What is in it before and after means nothing.
        stream: On a GPU; where to launch. None means the current one of the framework of q.
            What the call allocates belongs to it.
        debug: Whether to check what costs time; None asks KVKERNELS_DEBUG. On a GPU the call then waits
            for lengths and tables and checks them as on a CPU, where they are always checked. On a CPU
            it checks that outputs do not overlap inputs.

    Returns:
        out, or (out, lse) with return_lse: the objects that were passed, else new NumPy arrays,
        whatever the type of q (uint16 bits for bfloat16). lse is the natural logarithm of the sum of exp(score). A row
        without keys is exactly 0 with an lse of -inf; so is one whose scores are all -inf.

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError: before anything is
            written. On a CPU every table entry that would be read is checked against the pool.

    Cost: 4 * D operations for each visible (row, head, key), and for one row a read of the cache;
        on the threads of `set_num_threads`, without the GIL.

    >>> import numpy as np
    >>> keys = values = np.ones((3, 1, 4, 8), np.float32)  # 3 blocks of 4 tokens, one head
    >>> q = np.ones((1, 2, 8), np.float32)  # one row of two heads
    >>> table, lengths = np.array([[2, 0]], np.int32), np.array([6], np.int32)
    >>> paged_attention(q, keys, values, table, lengths).sum(axis=-1)
    array([[8., 8.]], dtype=float32)
    """
    call = AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
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
        num_splits=num_splits,
        deterministic=deterministic,
        out=out,
        lse=lse,
        return_lse=return_lse,
        workspace=workspace,
        stream=stream,
        debug=debug,
    )
    return backend_of(q).paged_attention(call)


def cascade_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    num_shared_tokens: int,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    deterministic: bool = False,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    stream: Any = None,
    debug: bool | None = None,
) -> Any:
    """Do what `paged_attention` does for sequences that share their first tokens, reading these once.

    The result has the bits of `paged_attention`: what is shared goes through the same additions. Keys
    are shared in whole pieces of 1024 (of the next multiple of the block size, for blocks that do not
    divide it); what is left over is read for each sequence, as everything is below one piece.

    Args:
        q: As all that is not named here, as in `paged_attention`.
        k_cache: See there.
        v_cache: See there.
        block_table: Its first num_shared_tokens / block_size entries are the same for all sequences.
        seq_lens: With the shared tokens, which come before every row.
        num_shared_tokens: A multiple of the block size.
        cu_seqlens_q: See there, as the rest. There is no window and no ALiBi: with these, rows see
            other parts of what is shared, or weigh them otherwise.
        scale: See there.
        causal: See there.
        softcap: See there.
        sinks: See there.
        k_scale: See there.
        v_scale: See there.
        kv_dtype: See there.
        deterministic: See there.
        out: See there.
        lse: See there.
        return_lse: See there.
        workspace: See there; its size is `workspace_size` for as many shared tokens.
        stream: See there. Caches in GPU memory are refused: attend to the shared tokens as one
            sequence without causality, to the others as usual, and `merge_states`.
        debug: See there.

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError: before anything is written.

    Cost: shared keys and values are read once for each 32 (row, head) pairs of a KV head.

    >>> import numpy as np
    >>> keys = values = np.ones((3, 1, 4, 8), np.float32)
    >>> table, lengths = np.array([[2, 0], [2, 1]], np.int32), np.array([6, 5], np.int32)
    >>> arguments = np.ones((2, 1, 8), np.float32), keys, values, table, lengths
    >>> cascade_attention(*arguments, num_shared_tokens=4).shape
    (2, 1, 8)
    """
    call = AttentionCall(
        num_shared_tokens=operator.index(num_shared_tokens),
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        scale=scale,
        causal=causal,
        softcap=softcap,
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
        debug=debug,
    )
    return backend_of(q).paged_attention(call)
