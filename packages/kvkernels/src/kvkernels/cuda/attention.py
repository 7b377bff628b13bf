"""Paged attention on a GPU: what is checked, which kernels run, and with which parameters.

It reads shapes and never data: lengths and tables stay on the device, so nothing waits for it. What only
the data would tell (an id outside the pool, a table too narrow) is therefore not refused here.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkernels.arguments import (
    CACHE_AXES,
    SCALE_AXES,
    Options,
    check_group,
    check_rows,
)
from kvkernels.cuda import kernels, source
from kvkernels.cuda.arrays import DeviceArray, require_one_device
from kvkernels.cuda.plan import Launcher, Plan
from kvkernels.errors import ArgumentError, DtypeError, ShapeError

LOG2_E = math.log2(math.e)
_QUERY_TYPES = ("float32", "bfloat16", "float16")
_EIGHT_BITS = ("float8_e4m3", "int8")
_CACHE_TYPES = (*_QUERY_TYPES, *_EIGHT_BITS)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of an attention call; those of the public function, None where not given."""

    q: DeviceArray
    k_cache: DeviceArray
    v_cache: DeviceArray
    block_table: DeviceArray
    seq_lens: DeviceArray
    out: DeviceArray
    lse: DeviceArray | None = None
    cu_seqlens_q: DeviceArray | None = None
    alibi_slopes: DeviceArray | None = None
    sinks: DeviceArray | None = None
    k_scales: DeviceArray | None = None
    v_scales: DeviceArray | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        """(num_heads, num_kv_heads, head_dim)."""
        return self.q.shape[1], self.k_cache.shape[1], self.q.shape[2]

    @property
    def max_seq_len(self) -> int:
        """Keys of a sequence at most, by the width of the table."""
        return self.block_table.shape[1] * self.k_cache.shape[2]

    def check(self) -> None:
        """Refuse dtypes, shapes and strides that do not fit; raises before anything is launched."""
        self.q.require(_QUERY_TYPES, "T, Hq, D", (None, None, None))
        num_rows, num_heads, head_dim = self.q.shape
        self.k_cache.require(_CACHE_TYPES, CACHE_AXES, (None, None, None, head_dim))
        self.v_cache.require((self.k_cache.dtype,), CACHE_AXES, self.k_cache.shape)
        _, num_kv_heads, block_size, _ = self.k_cache.shape
        check_group(num_heads, num_kv_heads)
        if not 1 <= head_dim <= MAX_HEAD_DIM or block_size == 0:
            rule = f"head_dim must be from 1 to {MAX_HEAD_DIM} and block_size positive"
            raise ShapeError(f"{rule}, got {head_dim} and {block_size}")
        self.seq_lens.require(("int32",), "B", (None,))
        num_sequences = self.seq_lens.shape[0]
        self.block_table.require(("int32",), "B, max_blocks", (num_sequences, None))
        for array in (self.q, self.k_cache, self.v_cache, self.block_table):
            array.require_dense_rows()
        if self.cu_seqlens_q is None:
            check_rows(num_rows, num_sequences)
        self.out.require((self.q.dtype,), "T, Hq, D", self.q.shape)
        _require_dense(self.seq_lens, "int32", "B", (num_sequences,))
        _require_dense(self.out, self.q.dtype, "T, Hq, D", self.q.shape)
        _require_dense(self.cu_seqlens_q, "int32", "B + 1", (num_sequences + 1,))
        _require_dense(self.lse, "float32", "T, Hq", (num_rows, num_heads))
        _require_dense(self.alibi_slopes, "float32", "Hq", (num_heads,))
        _require_dense(self.sinks, "float32", "Hq", (num_heads,))
        self._check_scales()
        require_one_device(getattr(self, name) for name in self.__slots__)

    def _check_scales(self) -> None:
        if (self.k_scales is None) != (self.v_scales is None):
            raise ArgumentError("k_scale and v_scale must both be arrays or both be numbers")
        for scales in (self.k_scales, self.v_scales):
            if scales is None:
                continue
            scales.require(("float32",), SCALE_AXES, self.k_cache.shape[:3])
            if self.k_cache.dtype not in _EIGHT_BITS:
                rule = f"scales for each token need a cache of {' or '.join(_EIGHT_BITS)}"
                raise DtypeError(f"{rule}, got {self.k_cache.dtype}")

    def can_use_tensor_cores(self) -> bool:
        """Whether dtypes, head dimension and alignment fit the fast kernels."""
        fits = kernels.can_use_tensor_cores(self.q.dtype, self.k_cache.dtype, self.q.shape[2])
        return fits and all(array.is_aligned(16) for array in (self.k_cache, self.v_cache))


def _require_dense(
    array: DeviceArray | None, dtype: str, axes: str, shape: tuple[int, ...]
) -> None:
    if array is not None:
        array.require((dtype,), axes, shape)
        array.require_contiguous()


def features_of(inputs: Inputs, options: Options) -> int:
    """The FEATURES that a call needs."""
    features = 0
    if options.softcap:
        features |= kernels.SOFTCAP
    if inputs.alibi_slopes is not None:
        features |= kernels.ALIBI
    if inputs.cu_seqlens_q is not None:
        features |= kernels.MANY_ROWS
    if inputs.k_scales is not None:
        features |= kernels.TOKEN_SCALES
    if inputs.k_cache.shape[2] % 16 == 0:
        features |= kernels.WHOLE_TILES
    return features


def make_params(inputs: Inputs, options: Options) -> "np.ndarray[Any, Any]":
    """The AttentionParams of a call, without those of a plan."""
    params = np.zeros((), source.struct("AttentionParams"))
    pointers = {name: getattr(inputs, name) for name in Inputs.__slots__}
    for name, array in pointers.items():
        params[name] = 0 if array is None else array.pointer
    params["q_row"], params["q_head"] = inputs.q.strides[:2]
    strided: list[tuple[str, DeviceArray | None]] = [("k", inputs.k_cache), ("v", inputs.v_cache)]
    strided += [("k_scale", inputs.k_scales), ("v_scale", inputs.v_scales)]
    for prefix, array in strided:
        if array is not None:
            for axis, name in enumerate(("block", "head", "token")):
                params[f"{prefix}_{name}"] = array.strides[axis]
    num_heads, num_kv_heads, head_dim = inputs.heads
    params["table_row"] = inputs.block_table.strides[0]
    params["block_size"] = inputs.k_cache.shape[2]
    params["head_dim"] = head_dim
    params["num_sequences"] = inputs.seq_lens.shape[0]
    params["num_rows"] = inputs.q.shape[0]
    params["num_kv_heads"] = num_kv_heads
    params["group"] = num_heads // num_kv_heads
    params["window_left"] = options.window_left
    params["causal"] = options.causal
    scale = options.scale * options.k_scale
    params["score_scale"] = scale / options.softcap if options.softcap else scale * LOG2_E
    params["softcap"] = options.softcap * LOG2_E
    params["v_scale"] = options.v_scale
    return params


def attend(
    inputs: Inputs, options: Options, plan: Plan | None, launcher: Launcher, stream: int
) -> None:
    """Launch the attention of a checked call. A plan is needed for the tensor-core kernels only."""
    params = make_params(inputs, options)
    features = features_of(inputs, options)
    dtypes = (inputs.q.dtype, inputs.k_cache.dtype)
    if plan is None:
        wanted = features & (kernels.SOFTCAP | kernels.ALIBI | kernels.TOKEN_SCALES)
        grid = min(max(1, inputs.q.shape[0] * inputs.heads[0]), 16 * launcher.num_multiprocessors)
        launcher.launch(kernels.attend_generic(*dtypes, wanted), grid, params, stream)
        return
    size = plan.size
    for name, pointer in plan.pointers.items():
        params[name] = pointer
    params["columns"] = size.columns
    params["split_rows"] = size.split_rows
    split = kernels.attend_split(*dtypes, size.head_dim, size.tiles, features)
    launcher.launch(split, size.num_blocks, params, stream)
    if size.has_many_rows:
        wanted = features & ~(kernels.MANY_ROWS | kernels.WHOLE_TILES)
        prefill = kernels.attend_prefill(*dtypes, size.head_dim, wanted)
        launcher.launch(prefill, size.num_blocks, params, stream)
    launcher.launch(kernels.merge_splits(inputs.q.dtype), size.num_blocks, params, stream)
