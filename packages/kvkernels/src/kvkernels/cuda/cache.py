"""Writing into a cache on a GPU, copies of its blocks, swaps to the host and back, and merges of results.

It reads shapes and never data, as kvkernels.cuda.attention: slots stay on the device and are not checked.
The triples of copies come from the host, and are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkernels.arguments import CACHE_AXES, SCALE_AXES, check_angles
from kvkernels.cuda import kernels, source
from kvkernels.cuda.arrays import DeviceArray, require_one_device
from kvkernels.cuda.plan import Launcher
from kvkernels.errors import ArgumentError, DtypeError, ShapeError

_MAX_HEAD_DIM = 256
_EIGHT_BITS = ("float8_e4m3", "int8")
# Thread blocks for each multiprocessor: enough to hide the latency of memory.
_WAVES = 16
# A swap waits for the bus, which a few thread blocks keep busy; the others are left to attention.
_SWAP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Write:
    """The arrays and numbers of a write; those of the public function, None where not given."""

    k: DeviceArray
    v: DeviceArray
    k_cache: DeviceArray
    v_cache: DeviceArray
    slots: DeviceArray
    cos: DeviceArray | None = None
    sin: DeviceArray | None = None
    k_scales: DeviceArray | None = None
    v_scales: DeviceArray | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def check(self) -> None:
        """Refuse what does not fit; raises before anything is launched."""
        self.k_cache.require(tuple(kernels.TYPES), CACHE_AXES, (None, None, None, None))
        self.v_cache.require((self.k_cache.dtype,), CACHE_AXES, self.k_cache.shape)
        _, num_kv_heads, block_size, head_dim = self.k_cache.shape
        if not 1 <= head_dim <= _MAX_HEAD_DIM or block_size == 0:
            rule = f"head_dim must be from 1 to {_MAX_HEAD_DIM} and block_size positive"
            raise ShapeError(f"{rule}, got {head_dim} and {block_size}")
        self.slots.require(("int64",), "T", (None,))
        num_tokens = self.slots.shape[0]
        for new in (self.k, self.v):
            new.require(("float32", "bfloat16", "float16"), "T, Hkv, D", (None, None, None))
            new.require((self.k.dtype,), "T, Hkv, D", (num_tokens, num_kv_heads, head_dim))
        for array in (self.k, self.v, self.k_cache, self.v_cache):
            array.require_dense_rows()
        self.slots.require_contiguous()
        self._check_rotation(num_tokens, head_dim)
        if (self.k_scales is None) != (self.v_scales is None):
            raise ArgumentError("k_scale and v_scale must both be arrays or both be numbers")
        for scales in (self.k_scales, self.v_scales):
            if scales is None:
                continue
            scales.require(("float32",), SCALE_AXES, self.k_cache.shape[:3])
            if self.k_cache.dtype not in _EIGHT_BITS:
                rule = f"scales for each token need a cache of {' or '.join(_EIGHT_BITS)}"
                raise DtypeError(f"{rule}, got {self.k_cache.dtype}")
        if not (self.k_scale > 0 and self.v_scale > 0):
            rule = "k_scale and v_scale must be positive"
            raise ArgumentError(f"{rule}, got {self.k_scale} and {self.v_scale}")
        numbers = ("k_scale", "v_scale")
        require_one_device(getattr(self, name) for name in self.__slots__ if name not in numbers)

    def _check_rotation(self, num_tokens: int, head_dim: int) -> None:
        if (self.cos is None) != (self.sin is None):
            raise ArgumentError("cos and sin must be given together")
        if self.cos is None or self.sin is None:
            return
        self.cos.require(("float32",), "T, rotary_dim / 2", (num_tokens, None))
        self.sin.require(("float32",), "T, rotary_dim / 2", self.cos.shape)
        check_angles(self.cos.shape, head_dim)
        for angles in (self.cos, self.sin):
            angles.require_contiguous()

    def run(self, launcher: Launcher, stream: int) -> None:
        """Launch a checked write."""
        params = np.zeros((), source.struct("WriteParams"))
        features = 0
        for name in ("k", "v", "k_cache", "v_cache", "slots", "cos", "sin", "k_scales", "v_scales"):
            array = getattr(self, name)
            params[name] = 0 if array is None else array.pointer
        for prefix, new in (("new_k", self.k), ("new_v", self.v)):
            params[f"{prefix}_row"], params[f"{prefix}_head"] = new.strides[:2]
        strided = [("k", self.k_cache), ("v", self.v_cache)]
        if self.k_scales is not None and self.v_scales is not None:
            strided += [("k_scale", self.k_scales), ("v_scale", self.v_scales)]
            features |= kernels.OWN_SCALES
        for prefix, array in strided:
            for axis, name in enumerate(("block", "head", "token")):
                params[f"{prefix}_{name}"] = array.strides[axis]
        if self.cos is not None:
            features |= kernels.ROTARY
            params["rotary_dim"] = 2 * self.cos.shape[1]
        params["num_tokens"] = self.slots.shape[0]
        _, params["num_kv_heads"], params["block_size"], params["head_dim"] = self.k_cache.shape
        params["k_inverse"], params["v_inverse"] = 1 / self.k_scale, 1 / self.v_scale
        units = 2 * self.slots.shape[0] * self.k_cache.shape[1]
        grid = min(-(-units // 4), _WAVES * launcher.num_multiprocessors)
        if units:
            kernel = kernels.write_tokens(self.k.dtype, self.k_cache.dtype, features)
            launcher.launch(kernel, grid, params, stream)


def copy_blocks(
    sources: Sequence[DeviceArray],
    destinations: Sequence[DeviceArray],
    copies: "np.ndarray[Any, np.dtype[np.int32]]",
    launcher: Launcher,
    stream: int,
    *,
    is_swap: bool = False,
) -> None:
    """Copy blocks from each source cache to its destination, which may be the same.

    `copies` is int32 [N, 3], checked. Caches of one geometry share a launch: 128 of them and 128
    copies, so all layers of most models are one launch.
    """
    groups: defaultdict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for own, other in zip(sources, destinations, strict=True):
        geometry = (_byte_strides(own), _byte_strides(other), own.shape[1], _row_bytes(own))
        groups[geometry].append((own.pointer, other.pointer))
    grid = _SWAP_BLOCKS if is_swap else _WAVES * launcher.num_multiprocessors
    for geometry, pointers in groups.items():
        steps, other_steps, num_kv_heads, row_bytes = geometry
        for first in range(0, len(pointers), kernels.MAX_CACHES):
            caches = np.array(pointers[first : first + kernels.MAX_CACHES], np.uint64)
            width = _piece(caches, (*steps, *other_steps, row_bytes))
            params = np.zeros((), source.struct("CopyParams"))
            params["sources"][: len(caches)], params["destinations"][: len(caches)] = caches.T
            for axis, name in enumerate(("block", "head", "token")):
                params[f"source_{name}"] = steps[axis]
                params[f"destination_{name}"] = other_steps[axis]
            params["num_caches"], params["num_kv_heads"] = len(caches), num_kv_heads
            params["row_bytes"] = row_bytes
            for start in range(0, len(copies), kernels.MAX_COPIES):
                part = copies[start : start + kernels.MAX_COPIES]
                params["copies"][: part.size] = part.ravel()
                params["num_copies"] = len(part)
                blocks = min(grid, len(caches) * len(part))
                launcher.launch(kernels.copy_tokens(width), blocks, params, stream)


def _itemsize(array: DeviceArray) -> int:
    return kernels.ITEMSIZE.get(array.dtype) or np.dtype(array.dtype).itemsize


def _row_bytes(array: DeviceArray) -> int:
    # Scales, which move with their blocks, have no last axis.
    return _itemsize(array) * (array.shape[3] if len(array.shape) == 4 else 1)


def _byte_strides(array: DeviceArray) -> tuple[int, ...]:
    return tuple(stride * _itemsize(array) for stride in array.strides[:3])


def _piece(pointers: "np.ndarray[Any, np.dtype[np.uint64]]", steps: Sequence[int]) -> int:
    """The longest piece that every address and step is a multiple of."""
    for width in (16, 2):
        if not (pointers % width).any() and all(step % width == 0 for step in steps):
            return width
    return 1


def merge_states(
    outs: Sequence[DeviceArray],
    lses: Sequence[DeviceArray],
    launcher: Launcher,
    stream: int,
    *,
    out: DeviceArray,
    lse: DeviceArray | None,
    sinks: DeviceArray | None,
) -> None:
    """Merge results over disjoint sets of keys, in the order given, into `out` and `lse`."""
    if not 1 <= len(outs) == len(lses) <= kernels.MAX_STATES:
        rule = f"outs and lses must be from 1 to {kernels.MAX_STATES} of each"
        raise ArgumentError(f"{rule}, got {len(outs)} and {len(lses)}")
    out.require(("float32", "bfloat16", "float16"), "T, Hq, D", (None, None, None))
    num_rows, num_heads, head_dim = out.shape
    for array in (*outs, out):
        array.require((out.dtype,), "T, Hq, D", out.shape)
        array.require_contiguous()
    for array in (*lses, *([lse] if lse else [])):
        array.require(("float32",), "T, Hq", out.shape[:2])
        array.require_contiguous()
    if sinks is not None:
        sinks.require(("float32",), "Hq", (num_heads,))
        sinks.require_contiguous()
    require_one_device([*outs, *lses, out, lse, sinks])
    params = np.zeros((), source.struct("MergeParams"))
    params["outs"][: len(outs)] = [array.pointer for array in outs]
    params["lses"][: len(lses)] = [array.pointer for array in lses]
    params["out"], params["lse"] = out.pointer, lse.pointer if lse else 0
    params["sinks"] = sinks.pointer if sinks else 0
    params["num_states"], params["num_rows"] = len(outs), num_rows
    params["num_heads"], params["head_dim"] = num_heads, head_dim
    if num_rows:
        grid = min(-(-num_rows * num_heads // 4), _WAVES * launcher.num_multiprocessors)
        launcher.launch(kernels.merge_results(out.dtype), grid, params, stream)
