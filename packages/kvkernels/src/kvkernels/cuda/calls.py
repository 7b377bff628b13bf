"""The public calls for arrays in GPU memory: views, outputs, workspaces and streams.

Lengths, tables and slots stay on the device and are not read here, so what only they would tell is not
refused. Given `out` and `workspace`, nothing is allocated and nothing waits, so calls can be captured in a graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from kvkernels import arguments
from kvkernels.arguments import AttentionCall, WriteCall
from kvkernels.cuda import attention, cache, debug, launch, plan
from kvkernels.cuda.arrays import DeviceArray, current_stream, require_one_device, view
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
    number = arguments.number_of(name, scale)
    return (1.0, view(name, scale)) if number is None else (number, None)


def _caches(k_cache: Any, v_cache: Any, kv_dtype: str | None) -> tuple[DeviceArray, DeviceArray]:
    keys, values = view("k_cache", k_cache, kv_dtype), view("v_cache", v_cache, kv_dtype)
    if len(keys.shape) == _X_PACKED_AXES:
        rule = "k_cache must have 4 axes on a GPU: x-packed keys [blocks, heads, D / x, block, x]"
        raise ShapeError(f"{rule} are taken on a CPU only, got {list(keys.shape)}")
    return keys, values


def paged_attention(call: AttentionCall) -> Any:
    """Do what the public `paged_attention` says, for arrays in GPU memory."""
    if call.num_splits or call.num_shared_tokens:
        what = "num_splits" if call.num_splits else "num_shared_tokens"
        raise ArgumentError(f"{what} must be 0 on a GPU, got {getattr(call, what)}")
    keys, values = _caches(call.k_cache, call.v_cache, call.kv_dtype)
    queries = _view_floats("q", call.q)
    if len(queries.shape) != 3:
        raise ShapeError(f"q must have the shape [T, Hq, D], got {list(queries.shape)}")
    options = arguments.check_options(call, queries.shape[2])
    place = queries.device, _stream_of(call.stream, call.q, queries.device)
    out, lse = call.out, call.lse
    if out is None:
        out = launch.empty(call.q, queries.shape, queries.dtype, *place)
    if call.return_lse and lse is None:
        lse = launch.empty(call.q, queries.shape[:2], "float32", *place)
    inputs = attention.Inputs(
        *(queries, keys, values),
        *(view("block_table", call.block_table), view("seq_lens", call.seq_lens)),
        _view_floats("out", out),
        lse=_view_if("lse", lse),
        cu_seqlens_q=_view_if("cu_seqlens_q", call.cu_seqlens_q),
        alibi_slopes=_view_if("alibi_slopes", call.alibi_slopes),
        sinks=_view_if("sinks", call.sinks),
        k_scales=_scale("k_scale", call.k_scale)[1],
        v_scales=_scale("v_scale", call.v_scale)[1],
    )
    inputs.check()
    if arguments.is_debugging(call.debug):
        debug.check_batch(call, queries.shape[0], keys.shape, options.window_left)
    if queries.shape[0]:
        handle = place[1]
        made = _plan(inputs, call, handle)
        if made is not None:
            made.update(
                *(inputs.seq_lens, inputs.cu_seqlens_q),
                window_left=options.window_left,
                causal=options.causal,
                split_rows=made.size.split_rows,
                stream=handle,
            )
        attention.attend(inputs, options, made, launch.launcher_of(queries.device), handle)
    return (out, lse) if call.return_lse else out


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


def _plan(inputs: attention.Inputs, call: AttentionCall, stream: int) -> plan.Plan | None:
    size = _size(inputs, deterministic=call.deterministic)
    if size is None:
        return None
    workspace = call.workspace
    if workspace is None:
        # It is dropped when the call returns, while its kernels have yet to run on the stream.
        workspace = launch.empty(call.q, (size.num_bytes,), "uint8", inputs.q.device, stream)
    memory = view("workspace", workspace)
    memory.require_contiguous()
    require_one_device([inputs.q, memory])
    return plan.Plan(size, memory, launch.launcher_of(inputs.q.device))


def write_kv(call: WriteCall) -> None:
    """Do what the public `write_kv` says, for arrays in GPU memory."""
    keys, values = _caches(call.k_cache, call.v_cache, call.kv_dtype)
    (k_number, k_scales), (v_number, v_scales) = (
        _scale("k_scale", call.k_scale),
        _scale("v_scale", call.v_scale),
    )
    write = cache.Write(
        *(_view_floats("k", call.k), _view_floats("v", call.v), keys, values),
        view("slot_mapping", call.slot_mapping),
        *(_view_if("cos", call.cos), _view_if("sin", call.sin), k_scales, v_scales),
        k_scale=k_number,
        v_scale=v_number,
    )
    write.check()
    if arguments.is_debugging(call.debug):
        debug.check_slots(call.slot_mapping, keys.shape)
    write.run(launch.launcher_of(keys.device), _stream_of(call.stream, call.k_cache, keys.device))


def gather_kv(k_cache: Any, *_arrays: Any, **_options: Any) -> NoReturn:
    """Refuse what is done on a CPU only."""
    rule = "gather_kv takes caches in CPU memory only"
    raise ArrayError(f"{rule}, got {type(k_cache).__qualname__} in GPU memory")


def copy_blocks(caches: Sequence[Any], copies: Iterable[Any], stream: Any = None) -> None:
    """Do what the public `copy_blocks` says, for caches in GPU memory."""
    views = [view(f"caches[{n}]", array) for n, array in enumerate(caches)]
    arguments.check_pools("caches", [one.shape for one in views])
    checked = arguments.check_copies(copies, *arguments.blocks_of(views[0].shape))
    _refuse_packed("caches", views)
    require_one_device(views)
    launcher = launch.launcher_of(views[0].device)
    handle = _stream_of(stream, caches[0], views[0].device)
    cache.copy_blocks(views, views, _as_array(checked), launcher, handle)


def _as_array(copies: Sequence[arguments.Copy]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(copies, np.int32).reshape(-1, 3)


def _refuse_packed(names: str, views: Sequence[DeviceArray]) -> None:
    for n, one in enumerate(views):
        if len(one.shape) == _X_PACKED_AXES:
            rule = f"{names}[{n}] must have 3 or 4 axes on a GPU: x-packed keys are taken on a CPU only"
            raise ShapeError(f"{rule}, got {list(one.shape)}")
        if len(one.shape) == 4:
            one.require_dense_rows()


def swap_blocks(
    sources: Sequence[Any],
    destinations: Sequence[Any],
    copies: Iterable[Any],
    *,
    stream: Any = None,
) -> None:
    """Do what the public `swap_blocks` says, between GPU memory and that or pinned memory."""
    on_gpu = [array for array in (*sources, *destinations) if _is_in_gpu_memory(array)]
    if not on_gpu:
        raise ArgumentError("sources or destinations must be on a GPU, got neither")
    device = view("cache", on_gpu[0]).device
    ours, theirs = (
        [_view_reachable(f"{name}[{n}]", array, device) for n, array in enumerate(caches)]
        for name, caches in (("sources", sources), ("destinations", destinations))
    )
    arguments.check_swap_pools([one.shape for one in ours], [one.shape for one in theirs])
    for one, other in zip(ours, theirs, strict=True):
        other.require((one.dtype,), "num_blocks, Hkv, block_size, D", other.shape)
    _refuse_packed("sources", ours)
    _refuse_packed("destinations", theirs)
    require_one_device([*ours, *theirs])
    num_sources, block_size = arguments.blocks_of(ours[0].shape)
    checked = arguments.check_swaps(copies, num_sources, theirs[0].shape[0], block_size)
    handle = _stream_of(stream, on_gpu[0], device)
    launcher = launch.launcher_of(device)
    cache.copy_blocks(ours, theirs, _as_array(checked), launcher, handle, is_swap=True)


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
    """Do what the public `merge_states` says, for results in GPU memory."""
    views = [_view_floats(f"outs[{n}]", array) for n, array in enumerate(outs)]
    if not views:
        raise ArgumentError("outs must hold at least one result, got none")
    place = views[0].device, _stream_of(stream, outs[0], views[0].device)
    if out is None:
        out = launch.empty(outs[0], views[0].shape, views[0].dtype, *place)
    if lse is None:
        lse = launch.empty(outs[0], views[0].shape[:2], "float32", *place)
    cache.merge_states(
        *(views, [view(f"lses[{n}]", array) for n, array in enumerate(lses)]),
        *(launch.launcher_of(views[0].device), place[1]),
        out=_view_floats("out", out),
        lse=view("lse", lse),
        sinks=_view_if("sinks", sinks),
    )
    return out, lse
