"""Results over disjoint sets of keys, and the one over all of them. It knows no keys."""

from collections.abc import Sequence
from typing import Any

from kvkernels.backends import backend_of


def merge_states(
    outs: Sequence[Any],
    lses: Sequence[Any],
    *,
    sinks: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge attention to disjoint sets of keys into attention to all of them, in the order given.

    Args:
        outs: Results [T, Hq, D] of `paged_attention` without sinks, float32, float16 or bfloat16, all
            of one dtype; on a GPU at most 16 and C-contiguous.
        lses: Their float32 [T, Hq], natural logarithms.
        sinks: Float32 [Hq], counted once here: none of the results may have counted them.
        out: [T, Hq, D] like outs, C-contiguous, written and returned; it overlaps none of them. None
            makes one.
        lse: Float32 [T, Hq], C-contiguous, written and returned. None makes one.
        stream: On a GPU; where to launch. None means the current one of the framework of outs.

    Returns:
        (out, lse). A row without keys in any of the results is 0 with an lse of -inf.

    Raises:
        ArrayError, DtypeError, ShapeError, ArgumentError: before anything is written.

    Cost: a read of outs. On a CPU in float32, with shares in float64: a merge adds about a rounding for
        each result; see `cascade_attention` for a shared prefix to the last bit.

    >>> import numpy as np
    >>> ones = np.ones((1, 1, 8), np.float32)
    >>> out, lse = merge_states([ones, 3 * ones], [np.zeros((1, 1), np.float32)] * 2)
    >>> out[0, 0, 0], lse[0, 0]
    (np.float32(2.0), np.float32(0.6931472))
    """
    return backend_of(*outs).merge_states(outs, lses, sinks=sinks, out=out, lse=lse, stream=stream)
