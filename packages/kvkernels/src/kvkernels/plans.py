"""What is known before arrays come: the memory of calls, and the plan of a step for all layers.

It knows limits of batches, and no kernel.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkernels.arguments import AttentionCall, check_group, check_options
from kvkernels.cuda import launch, plan
from kvkernels.errors import ArgumentError, ShapeError
from kvkernels.inputs import Batch, view_batch

if TYPE_CHECKING:
    from kvkernels.cpu.steps import Sizes, Step


def workspace_size(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_num_rows: int,
    max_seq_len: int,
    max_num_seqs: int | None = None,
    q_dtype: str = "float32",
    num_splits: int = 0,
    num_shared_tokens: int = 0,
    deterministic: bool = False,
    device: str = "cpu",
) -> int:
    """Return the bytes of a `workspace` in which any call within these limits finds room.

    On a CPU the number of threads counts that `get_num_threads` tells now.

    Args:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Dimension of a head.
        block_size: Tokens of a block.
        max_num_rows: Rows of q, at most.
        max_seq_len: Tokens of a sequence, at most; on a GPU the width of the block table times
            block_size counts, whatever the lengths.
        max_num_seqs: Sequences, at most; None means as many as rows.
        q_dtype: Of q: on a CPU 16-bit queries are computed in float32, in the workspace.
        num_splits: As in `paged_attention`.
        num_shared_tokens: As in `cascade_attention`, at most.
        deterministic: As in `paged_attention`; it matters on a GPU.
        device: "cpu", or "cuda" for the current GPU.

    Raises:
        ShapeError, ArgumentError.

    >>> limits = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    >>> workspace_size(**limits, max_num_rows=4, max_seq_len=1024, q_dtype="bfloat16")
    16576
    """
    check_group(num_heads, num_kv_heads)
    limits = (head_dim, block_size, max_num_rows, max_seq_len)
    if min(limits) < 1:
        rule = "head_dim, block_size, max_num_rows and max_seq_len must be positive"
        raise ArgumentError(f"{rule}, got {', '.join(map(str, limits))}")
    heads = (num_heads, num_kv_heads, head_dim)
    if device == "cpu":
        from kvkernels.cpu import steps, threads, workspace  # noqa: PLC0415  # Numba is slow

        shapes = workspace.largest_shapes(
            steps.Sizes(*heads, block_size),
            max_num_rows=max_num_rows,
            max_seq_len=max_seq_len,
            has_float_queries=q_dtype == "float32",
            num_splits=num_splits,
            num_shared_tokens=num_shared_tokens,
            num_threads=threads.get_num_threads(),
        )
        return workspace.num_bytes(shapes)
    if device != "cuda" or launch.why_no_gpu():
        missing = "" if device != "cuda" else launch.why_no_gpu()
        raise ArgumentError(missing or f"device must be 'cpu' or 'cuda', got {device!r}")
    return max(
        plan.size_of(
            max_sequences=max_num_rows if max_num_seqs is None else max_num_seqs,
            max_rows=max_num_rows,
            max_seq_len=-(-max_seq_len // block_size) * block_size,
            heads=heads,
            has_many_rows=has_many_rows,
            deterministic=deterministic,
            launcher=launch.launcher_of(launch.current_device()),
        ).num_bytes
        for has_many_rows in (False, True)
    )


class AttentionPlan:
    """The attention of a model's layers on a CPU: made once, updated for a step, used by its layers.

    What depends on lengths and tables alone is so done once for all layers: they are checked, copied
    and cut into pieces of work. Layers of one window share a plan. `attend` gives the bits of
    `paged_attention`; plans are not for several threads at the same time.

    Args:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Dimension of a head.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
        max_num_rows: Rows of a step, at most.
        max_seq_len: Tokens of a sequence, at most.
        q_dtype: Of queries and results.
        causal: As in `paged_attention`.
        window_left: As in `paged_attention`.
        num_splits: As in `paged_attention`.

    Memory: a workspace of `workspace_size` bytes, made here, and a copy of a step's tables.

    >>> keys = values = np.ones((3, 1, 4, 8), np.float32)
    >>> plan = AttentionPlan(
    ...     num_heads=2, num_kv_heads=1, head_dim=8, num_blocks=3, block_size=4,
    ...     max_num_rows=1, max_seq_len=12,
    ... )
    >>> plan.update(np.array([[2, 0]], np.int32), np.array([6], np.int32))
    >>> plan.attend(np.ones((1, 2, 8), np.float32), keys, values).sum(axis=-1)
    array([[8., 8.]], dtype=float32)
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        max_num_rows: int,
        max_seq_len: int,
        q_dtype: str = "float32",
        causal: bool = True,
        window_left: int = -1,
        num_splits: int = 0,
    ) -> None:
        self._pool = (num_blocks, num_kv_heads, block_size, head_dim)
        self._num_heads = num_heads
        self._limits = (max_num_rows, max_seq_len)
        self._rules: dict[str, Any] = {
            "causal": causal,
            "window_left": window_left,
            "num_splits": num_splits,
        }
        num_bytes = workspace_size(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            max_num_rows=max_num_rows,
            max_seq_len=max_seq_len,
            q_dtype=q_dtype,
            num_splits=num_splits,
        )
        from kvkernels.cpu import threads  # noqa: PLC0415  # importing Numba is slow

        self._num_threads = threads.get_num_threads()
        self._workspace = np.empty(num_bytes, np.uint8)
        self._step: Step | None = None

    @property
    def _sizes(self) -> "Sizes":
        from kvkernels.cpu.steps import Sizes  # noqa: PLC0415  # importing Numba is slow

        _, num_kv_heads, block_size, head_dim = self._pool
        return Sizes(self._num_heads, num_kv_heads, head_dim, block_size)

    def update(self, block_table: Any, seq_lens: Any, cu_seqlens_q: Any = None) -> None:
        """Plan a step: the arguments are those of `paged_attention`, and are copied.

        Raises:
            ArrayError, DtypeError, ShapeError, ArgumentError, PoolIndexError: the plan then has no step.
        """
        from kvkernels.cpu import steps, values  # noqa: PLC0415  # importing Numba is slow

        self._step = None
        viewed = view_batch(block_table, seq_lens, cu_seqlens_q, None)
        batch = Batch(viewed.block_table.copy(), viewed.seq_lens.copy(), viewed.offsets.copy())
        max_num_rows, max_seq_len = self._limits
        num_rows, longest = int(batch.offsets[-1]), int(batch.seq_lens.max(initial=0))
        if num_rows > max_num_rows or longest > max_seq_len:
            rule = f"a step of this plan has at most {max_num_rows} rows and {max_seq_len} tokens"
            raise ArgumentError(f"{rule} of a sequence, got {num_rows} and {longest}")
        num_blocks, _, block_size, head_dim = self._pool
        options = check_options(self._call(None, None, None), head_dim)
        values.check_batch(batch, num_rows, num_blocks, block_size, options.window_left)
        self._step = steps.cut_step(batch, self._sizes, options, 0, self._num_threads)

    def attend(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        kv_dtype: str | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend in one layer of the step: see `paged_attention`, whose arguments these are.

        Raises:
            ArrayError, DtypeError, ShapeError, ArgumentError: before anything is written.
        """
        from kvkernels.cpu import calls  # noqa: PLC0415  # importing Numba is slow

        if self._step is None:
            raise ArgumentError("a plan must be updated before it attends, got no step")
        call = self._call(
            *(q, k_cache, v_cache),
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=kv_dtype,
            out=out,
            lse=lse,
            return_lse=return_lse,
            workspace=self._workspace,
        )
        layer, results = calls.view_layer_call(call)
        rows = (self._step.num_rows, self._num_heads, self._pool[3])
        if layer.q.shape != rows or layer.caches.shape != self._pool:
            rule = (
                f"q and the caches of this step have the shapes {list(rows)} and {list(self._pool)}"
            )
            raise ShapeError(f"{rule}, got {list(layer.q.shape)} and {list(layer.caches.shape)}")
        return calls.attend(call, self._step, layer, results)

    def _call(self, q: Any, k_cache: Any, v_cache: Any, **options: Any) -> AttentionCall:
        arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        return AttentionCall(**arrays, block_table=None, seq_lens=None, **self._rules, **options)
