"""A paged cache's tokens and blocks on the move: written, read out, copied, and swapped to another pool.

It knows what the arguments mean: slots and blocks, and not which sequence owns them. A backend checks
them and does the work.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from kvkernels.arguments import WriteCall
from kvkernels.backends import backend_of


def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    cos: Any = None,
    sin: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    stream: Any = None,
    debug: bool | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a layer's cache.

    Args:
        k: Float32, float16 or bfloat16 [T, Hkv, D], the keys of T tokens.
        v: Like k, the values.
        k_cache: A cache of any dtype and layout that `paged_attention` takes, written: numbers are
            rounded to nearest, ties to even, and 8-bit ones saturate. It overlaps neither k nor v.
        v_cache: Like k_cache; its strides may differ.
        slot_mapping: Int64 [T]; slot = block_id * block_size + offset. -1 writes nothing. When a
            slot comes twice, the later token stays; on a GPU, either.
        cos: Float32 [T, rotary_dim / 2]: keys are rotated by these angles, the first half of their
            rotated dimensions with the second.
        sin: Like cos.
        k_scale: What keys are divided by before they are rounded, or for 8-bit caches float32
            [num_blocks, Hkv, block_size], where each vector's own scale is written.
        v_scale: Like k_scale, for values.
        kv_dtype: As in `paged_attention`.
        stream: On a GPU; where to launch. None means the current one of the caches' framework.
        debug: Whether to check what costs time; None asks KVKERNELS_DEBUG. On a GPU the call then waits
            for the slots and checks them as on a CPU, where they are always checked; on both, that no
            slot comes twice.

    Raises:
        ArrayError, DtypeError, ShapeError, PoolIndexError: before anything is written.

    Cost: one copy of k and v; on one thread, without the GIL.

    >>> import numpy as np
    >>> keys, values = np.zeros((2, 3, 1, 4, 8), np.float32)  # 3 blocks of 4 tokens, one head
    >>> k = v = np.ones((2, 1, 8), np.float32)
    >>> write_kv(k, v, keys, values, np.array([9, -1]))  # block 2, offset 1; and nowhere
    >>> keys[2, 0, :, 0]
    array([0., 1., 0., 0.], dtype=float32)
    """
    call = WriteCall(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        cos=cos,
        sin=sin,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        stream=stream,
        debug=debug,
    )
    backend_of(k_cache).write_kv(call)


def gather_kv(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    kv_dtype: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Read the keys and values of sequences out of a paged cache: what `write_kv` wrote.

    Args:
        k_cache: A cache of any dtype and layout that `paged_attention` takes, in CPU memory.
        v_cache: Likewise.
        block_table: Int32 [B, max_blocks], as in `paged_attention`.
        seq_lens: Int32 [B]: how many tokens of each sequence to read.
        k_scale: What keys are multiplied with, as in `paged_attention`.
        v_scale: Likewise for values.
        kv_dtype: As in `paged_attention`.
        stream: None: caches in GPU memory are refused.

    Returns:
        (keys, values), NumPy arrays [sum(seq_lens), Hkv, D], one sequence after another: float32 if
        the cache holds 8 bits or there is a scale, else in the cache's dtype (bfloat16 as uint16).

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError.

    Cost: one copy of what is read.

    >>> import numpy as np
    >>> keys = np.arange(12, dtype=np.float32).reshape(3, 1, 4, 1)
    >>> found, _ = gather_kv(keys, keys, np.array([[2, 0]], np.int32), np.array([6], np.int32))
    >>> found.ravel()
    array([ 8.,  9., 10., 11.,  0.,  1.], dtype=float32)
    """
    return backend_of(k_cache).gather_kv(
        *(k_cache, v_cache, block_table, seq_lens),
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        stream=stream,
    )


def copy_blocks(caches: Sequence[Any], copies: Iterable[Any], *, stream: Any = None) -> None:
    """Do a step's copy-on-write copies in every cache given, in one call for all layers.

    Args:
        caches: The key and value caches of all layers in any order, for example
            `[*k_caches, *v_caches]`: arrays [num_blocks, Hkv, block_size, D] of one pool, so equal
            in num_blocks and block_size; Hkv, D, the dtype and the strides may differ. On a CPU also
            x-packed keys, and scales [num_blocks, Hkv, block_size], which move with their blocks.
        copies: (source, destination, num_tokens) triples, or an integer array [N, 3]. The first
            num_tokens positions of block `source` are copied to block `destination`, and no other
            position is written. A destination is neither a source nor another's destination, so
            their order does not matter.
        stream: Of caches in GPU memory, where to launch; None means the current stream.

    Raises:
        ArrayError, ShapeError, ArgumentError, PoolIndexError: before anything is written.

    Cost: the bytes copied, and about a microsecond for each cache and copy.

    >>> import numpy as np
    >>> keys = np.arange(3, dtype=np.float32).repeat(4).reshape(3, 1, 4, 1)
    >>> copy_blocks([keys], [(1, 2, 3)])
    >>> keys[2, 0, :, 0]
    array([1., 1., 1., 2.], dtype=float32)
    """
    backend_of(*caches).copy_blocks(caches, copies, stream)


def swap_blocks(
    sources: Sequence[Any],
    destinations: Sequence[Any],
    copies: Iterable[Any],
    *,
    stream: Any = None,
) -> None:
    """Copy blocks from the caches of one pool to those of another, in one call for all layers.

    On a CPU both pools are in its memory. With a GPU one of them is there, and the other there too or in
    pinned memory of the host: the GPU reads and writes that itself, in one launch without staging, and
    is done when `stream` has got there, so that the caller's events say when a block may be used again.

    Args:
        sources: The caches of all layers [num_blocks, Hkv, block_size, D], in any order; on a CPU also
            x-packed keys and scales.
        destinations: As many caches of another pool, in the same order: of the shapes of the sources
            but for num_blocks, and of their dtypes.
        copies: (source, destination, num_tokens) triples; no destination comes twice. Whole blocks are
            (source, destination, block_size).
        stream: On a GPU; where to launch. None means the current one of the caller's framework.

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError: before anything is written.

    Cost: the bytes copied.

    >>> import numpy as np
    >>> device, host = np.ones((4, 1, 2, 1), np.float32), np.zeros((2, 1, 2, 1), np.float32)
    >>> swap_blocks([device], [host], [(3, 0, 2)])
    >>> host.ravel()
    array([1., 1., 0., 0.], dtype=float32)
    """
    backend_of(*sources, *destinations).swap_blocks(sources, destinations, copies, stream=stream)
