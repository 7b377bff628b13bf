"""The public calls for arrays in GPU memory: views, outputs, workspaces and streams.

Lengths, tables and slots stay on the device and are not read here, so what only they would tell is not
refused. Given `out` and `workspace`, nothing is allocated and nothing waits, so calls can be captured in a graph.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkernels.cuda import attention, cache, launch, plan
from kvkernels.cuda.arrays import DeviceArray, current_stream, view
from kvkernels.errors import ArgumentError, ArrayError, ShapeError

_X_PACKED_AXES = 5


def _stream_of(stream: Any, array: Any, device: int) -> int:
    """The handle of a caller's stream: an integer, torch's, CuPy's, or the current one of `array`."""
    if stream is None:
        return current_stream(array, device)
    return int(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))


def _view_if(name: str, array: Any, dtype: str | None = None) -> DeviceArray | None:
    return None if array is None else view(name, array, dtype)


def _view_floats(name: str, array: Any) -> DeviceArray:
    """View an array of floats; 16-bit integers are bfloat16, which NumPy and CuPy do not have."""
    found = view(name, array)
    return replace(found, dtype="bfloat16") if found.dtype == "uint16" else found


def _scale(name: str, scale: Any) -> tuple[float, DeviceArray | None]:
    """A scale for all tokens, or the array of one for each token and head."""
    if hasattr(scale, "shape") and len(scale.shape):
        return 1.0, view(name, scale)
    scale = float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentError(f"{name} must be a positive number or an array, got {scale}")
    return scale, None


def _caches(k_cache: Any, v_cache: Any, kv_dtype: str | None) -> tuple[DeviceArray, DeviceArray]:
    keys, values = view("k_cache", k_cache, kv_dtype), view("v_cache", v_cache, kv_dtype)
    if len(keys.shape) == _X_PACKED_AXES:
        rule = "k_cache must have 4 axes on a GPU: x-packed keys [blocks, heads, D / x, block, x]"
        raise ShapeError(f"{rule} are taken on a CPU only, got {list(keys.shape)}")
    return keys, values


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any,
    scale: float | None,
    causal: bool,
    window_left: int,
    softcap: float,
    alibi_slopes: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
    kv_dtype: str | None,
    deterministic: bool,
    out: Any,
    lse: Any,
    return_lse: bool,
    workspace: Any,
    stream: Any,
) -> Any:
    """Do what the public `paged_attention` says, for arrays in GPU memory."""
    keys, values = _caches(k_cache, v_cache, kv_dtype)
    queries = _view_floats("q", q)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ArgumentError(f"softcap must be finite and not negative, got {softcap}")
    if lse is not None and not return_lse:
        raise ArgumentError("lse needs return_lse=True, got return_lse=False")
    out = launch.empty(q, queries.shape, queries.dtype) if out is None else out
    if return_lse and lse is None:
        lse = launch.empty(q, queries.shape[:2], "float32")
    (k_number, k_scales), (v_number, v_scales) = (
        _scale("k_scale", k_scale),
        _scale("v_scale", v_scale),
    )
    inputs = attention.Inputs(
        *(queries, keys, values, view("block_table", block_table), view("seq_lens", seq_lens)),
        _view_floats("out", out),
        lse=_view_if("lse", lse),
        cu_seqlens_q=_view_if("cu_seqlens_q", cu_seqlens_q),
        alibi_slopes=_view_if("alibi_slopes", alibi_slopes),
        sinks=_view_if("sinks", sinks),
        k_scales=k_scales,
        v_scales=v_scales,
    )
    inputs.check()
    scale = queries.shape[2] ** -0.5 if scale is None else scale
    options = attention.Options(scale, causal, window_left, softcap, k_number, v_number)
    handle = _stream_of(stream, q, queries.device)
    if queries.shape[0]:
        made = _plan(inputs, q, workspace, deterministic=deterministic)
        if made is not None:
            made.update(
                *(inputs.seq_lens, inputs.cu_seqlens_q),
                window_left=window_left,
                causal=causal,
                split_rows=made.size.split_rows,
                stream=handle,
            )
        attention.attend(inputs, options, made, launch.launcher_of(queries.device), handle)
    return (out, lse) if return_lse else out


def _size(inputs: attention.Inputs, *, deterministic: bool) -> plan.PlanSize | None:
    """The plan that a call needs; None where the generic kernel serves it."""
    if not inputs.can_use_tensor_cores():
        return None
    return plan.size_of(
        max_sequences=inputs.seq_lens.shape[0],
        max_rows=inputs.q.shape[0],
        max_seq_len=inputs.max_seq_len,
        heads=inputs.heads,
        has_many_rows=inputs.cu_seqlens_q is not None,
        deterministic=deterministic,
        launcher=launch.launcher_of(inputs.q.device),
    )


def _plan(
    inputs: attention.Inputs, like: Any, workspace: Any, *, deterministic: bool
) -> plan.Plan | None:
    size = _size(inputs, deterministic=deterministic)
    if size is None:
        return None
    if workspace is None:
        workspace = launch.empty(like, (size.num_bytes,), "uint8")
    memory = view("workspace", workspace)
    memory.require_contiguous()
    return plan.Plan(size, memory, launch.launcher_of(inputs.q.device))


def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    cos: Any,
    sin: Any,
    k_scale: Any,
    v_scale: Any,
    kv_dtype: str | None,
    stream: Any,
) -> None:
    """Do what the public `write_kv` says, for arrays in GPU memory."""
    keys, values = _caches(k_cache, v_cache, kv_dtype)
    (k_number, k_scales), (v_number, v_scales) = (
        _scale("k_scale", k_scale),
        _scale("v_scale", v_scale),
    )
    write = cache.Write(
        *(_view_floats("k", k), _view_floats("v", v), keys, values),
        view("slot_mapping", slot_mapping),
        *(_view_if("cos", cos), _view_if("sin", sin), k_scales, v_scales),
        k_scale=k_number,
        v_scale=v_number,
    )
    write.check()
    write.run(launch.launcher_of(keys.device), _stream_of(stream, k_cache, keys.device))


def copy_blocks(
    caches: Sequence[Any], triples: Sequence[tuple[int, int, int]], stream: Any
) -> None:
    """Copy checked triples within caches in GPU memory."""
    views = [view(f"caches[{n}]", array) for n, array in enumerate(caches)]
    copies = np.array(triples, np.int32).reshape(-1, 3)
    launcher = launch.launcher_of(views[0].device)
    cache.copy_blocks(
        views, views, copies, launcher, _stream_of(stream, caches[0], views[0].device)
    )


def swap_blocks(
    sources: Sequence[Any],
    destinations: Sequence[Any],
    copies: Sequence[tuple[int, int, int]],
    *,
    stream: Any = None,
) -> None:
    """Copy blocks between the caches of a GPU and caches in pinned memory of the host.

    The GPU reads and writes pinned memory itself: one launch for all layers, no staging, and done when
    `stream` has got there, so that the caller's events say when a block may be used again.

    Args:
        sources: Caches [num_blocks, Hkv, block_size, D]: torch tensors, CuPy arrays, or NumPy
            arrays in pinned memory.
        destinations: As many caches, of the shapes of the sources but for num_blocks.
        copies: (source, destination, num_tokens) triples; no destination comes twice.
        stream: Where to launch; None means the current stream of the caller's framework.

    Raises:
        ArrayError: for memory that the GPU cannot reach.
        ShapeError, ArgumentError: before anything is launched.
    """
    on_gpu = [array for array in (*sources, *destinations) if _is_in_gpu_memory(array)]
    if not on_gpu or len(sources) != len(destinations):
        rule = "sources and destinations must be as many, and one of them on a GPU"
        raise ArgumentError(f"{rule}, got {len(sources)} and {len(destinations)}")
    device = view("cache", on_gpu[0]).device
    views = [
        [_view_reachable(f"{name}[{n}]", array, device) for n, array in enumerate(caches)]
        for name, caches in (("sources", sources), ("destinations", destinations))
    ]
    for one, other in zip(*views, strict=True):
        other.require((one.dtype,), "num_blocks, Hkv, block_size, D", (None, *one.shape[1:]))
    triples = np.array([tuple(copy) for copy in copies], np.int32).reshape(-1, 3)
    limits = (views[0][0].shape[0], views[1][0].shape[0], views[0][0].shape[2] + 1)
    if ((triples < 0) | (triples >= limits)).any():
        rule = f"copies must be (source, destination, num_tokens) below {limits}"
        raise ArgumentError(f"{rule}, got {triples.tolist()}")
    if len(set(triples[:, 1].tolist())) != len(triples):
        raise ArgumentError("a block must be the destination of one copy only, got one twice")
    handle = _stream_of(stream, on_gpu[0], device)
    launcher = launch.launcher_of(device)
    cache.copy_blocks(views[0], views[1], triples, launcher, handle, is_swap=True)


def _is_in_gpu_memory(array: Any) -> bool:
    return bool(getattr(array, "is_cuda", False)) or hasattr(array, "__cuda_array_interface__")


def _view_reachable(name: str, array: Any, device: int) -> DeviceArray:
    """View an array on the GPU, or in pinned memory, which it can reach by the same addresses."""
    if _is_in_gpu_memory(array):
        return view(name, array)
    if type(array).__module__.partition(".")[0] == "torch":
        if not array.is_pinned():
            raise ArrayError(f"{name} must be in pinned memory (pin_memory=True), got pageable")
        kind = str(array.dtype).rpartition(".")[2].replace("float8_e4m3fn", "float8_e4m3")
        shape, strides = tuple(array.shape), tuple(array.stride())
        return DeviceArray(name, array.data_ptr(), shape, strides, kind, device, array)
    if not isinstance(array, np.ndarray) or not launch.is_pinned(array.ctypes.data):
        raise ArrayError(f"{name} must be on a GPU or in pinned memory, got {type(array).__name__}")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    kind = array.dtype.name
    return DeviceArray(name, array.ctypes.data, array.shape, strides, kind, device, array)


def merge_states(
    outs: Sequence[Any],
    lses: Sequence[Any],
    *,
    sinks: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge results over disjoint sets of keys, in the order given; returns (out, lse).

    Args:
        outs: Results [T, Hq, D], at most 16, float32, float16 or bfloat16, C-contiguous.
        lses: Their float32 [T, Hq], natural.
        sinks: Float32 [Hq]; then none of the results may have counted them.
        out: Like one of outs, written; None makes one.
        lse: Like one of lses, written; None makes one.
        stream: Where to launch; None means the current stream of the caller's framework.
    """
    views = [_view_floats(f"outs[{n}]", array) for n, array in enumerate(outs)]
    if not views:
        raise ArgumentError("outs must hold at least one result, got none")
    out = launch.empty(outs[0], views[0].shape, views[0].dtype) if out is None else out
    lse = launch.empty(outs[0], views[0].shape[:2], "float32") if lse is None else lse
    device = views[0].device
    cache.merge_states(
        *(views, [view(f"lses[{n}]", array) for n, array in enumerate(lses)]),
        *(launch.launcher_of(device), _stream_of(stream, outs[0], device)),
        out=_view_floats("out", out),
        lse=view("lse", lse),
        sinks=_view_if("sinks", sinks),
    )
    return out, lse
