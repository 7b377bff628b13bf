"""Attention on the fiber GPU beside float64: a batch drawn at random, run, and compared.

Slots that no token owns hold NaN, table entries that must not be read hold an id far outside the pool, and
results start as NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvkernels.arguments import Options
from kvkernels.cuda import attention, plan
from kvkernels.cuda.arrays import DeviceArray

from .host_gpu import HostGPU, place_of

Array = np.ndarray[Any, Any]

# The dtype's name, torch's, the integer that holds its bits, and its NaN (int8 has none).
_TORCH = {
    "float32": (torch.float32, torch.int32, np.float32(np.nan)),
    "bfloat16": (torch.bfloat16, torch.int16, np.int16(0x7FFF)),
    "float16": (torch.float16, torch.int16, np.int16(0x7FFF)),
    "float8_e4m3": (torch.float8_e4m3fn, torch.uint8, np.uint8(0x7F)),
    "int8": (torch.int8, torch.int8, np.int8(-128)),
}
# Relative norm of the difference from float64, by the dtype of q. An 8-bit cache multiplies weights in 16
# bits too, and its values are exact.
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}
BEYOND_THE_POOL = 2**31 - 1


def encode(values: Array, dtype: str) -> Array:
    """Round to a dtype by torch; the bits as integers, float32 as itself."""
    if dtype == "float32":
        return values.astype(np.float32)
    kind, bits, _ = _TORCH[dtype]
    tensor = torch.from_numpy(values.astype(np.float32))
    tensor = tensor.round().clamp(-127, 127) if dtype == "int8" else tensor
    return np.array(tensor.to(kind).view(bits).numpy())


def decode(bits: Array, dtype: str) -> Array:
    """What bits mean, in float64."""
    if dtype == "float32":
        return bits.astype(np.float64)
    kind, _, _ = _TORCH[dtype]
    found = torch.from_numpy(np.ascontiguousarray(bits)).view(kind).to(torch.float32)
    return found.numpy().astype(np.float64)


def on_device(name: str, array: Array, dtype: str | None = None) -> DeviceArray:
    """Take a NumPy array for one on the device: on fibers it is there."""
    pointer, owner = place_of(array)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    kind = dtype or array.dtype.name
    return DeviceArray(name, pointer, array.shape, strides, kind, 0, owner)


@dataclass
class Case:
    """One batch and the options of its attention."""

    seq_lens: Sequence[int]
    num_queries: Sequence[int] | None = None
    query: str = "bfloat16"
    cache: str = "bfloat16"
    head_dim: int = 64
    num_kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    layout: str = "HND"
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    has_token_scales: bool = False
    chunk: int | None = None
    unowned_is_nan: bool = True
    seed: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draw()

    @property
    def counts(self) -> list[int]:
        """Rows of each sequence."""
        return [1] * len(self.seq_lens) if self.num_queries is None else list(self.num_queries)

    def _draw(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_heads = self.num_kv_heads * self.group
        blocks = [-(-length // self.block_size) for length in self.seq_lens]
        num_blocks = sum(blocks) + 3
        order = rng.permutation(num_blocks)
        table = np.full((len(blocks), max(blocks, default=0) + 2), BEYOND_THE_POOL, np.int32)
        taken = 0
        owned = np.zeros((num_blocks, self.block_size), bool)
        for s, count in enumerate(blocks):
            table[s, :count] = order[taken : taken + count]
            taken += count
            tokens = np.arange(self.seq_lens[s])
            owned[table[s, tokens // self.block_size], tokens % self.block_size] = True
        shape = (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        spread = 40.0 if self.cache == "int8" else 1.0
        for name in ("k_cache", "v_cache"):
            cache = encode(rng.standard_normal(shape) * spread, self.cache)
            if self.unowned_is_nan:
                cache.transpose(0, 2, 1, 3)[~owned] = _TORCH[self.cache][2]
            if self.layout == "NHD":
                cache = np.ascontiguousarray(cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
            self.arrays[name] = cache
        rows = sum(self.counts)
        self.arrays["q"] = encode(rng.standard_normal((rows, num_heads, self.head_dim)), self.query)
        self.arrays["block_table"] = table
        self.arrays["seq_lens"] = np.array(self.seq_lens, np.int32)
        if self.num_queries is not None:
            self.arrays["cu_seqlens_q"] = np.cumsum([0, *self.counts], dtype=np.int32)
        if self.has_alibi:
            self.arrays["alibi_slopes"] = 2.0 ** -np.arange(1, num_heads + 1, dtype=np.float32)
        if self.has_sinks:
            self.arrays["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
        if self.has_token_scales:
            for name in ("k_scales", "v_scales"):
                scales = rng.uniform(0.01, 0.03, shape[:3]).astype(np.float32)
                scales.transpose(0, 2, 1)[~owned] = np.nan
                self.arrays[name] = scales

    @property
    def options(self) -> Options:
        """The numbers of the call."""
        return Options(
            self.head_dim**-0.5,
            self.causal,
            self.window_left,
            self.softcap,
            self.k_scale,
            self.v_scale,
        )

    def run(self, gpu: HostGPU) -> tuple[Array, Array]:
        """Run the kernels; returns (out, lse) as they wrote them."""
        given = self.arrays
        rows, num_heads, _ = given["q"].shape
        out = encode(np.full(given["q"].shape, np.nan), self.query)
        lse = np.full((rows, num_heads), np.nan, np.float32)
        kinds = {"q": self.query, "k_cache": self.cache, "v_cache": self.cache}
        views = {name: on_device(name, array, kinds.get(name)) for name, array in given.items()}
        inputs = attention.Inputs(
            **views, out=on_device("out", out, self.query), lse=on_device("lse", lse)
        )
        inputs.check()
        made = self._plan(inputs, gpu) if inputs.can_use_tensor_cores() else None
        if made is not None:
            made.update(
                views["seq_lens"],
                views.get("cu_seqlens_q"),
                window_left=self.window_left,
                causal=self.causal,
                split_rows=made.size.split_rows,
                stream=0,
            )
        attention.attend(inputs, self.options, made, gpu, 0)
        return decode(out, self.query), lse

    def _plan(self, inputs: attention.Inputs, gpu: HostGPU) -> plan.Plan:
        size = plan.size_of(
            max_sequences=len(self.seq_lens),
            max_rows=inputs.q.shape[0],
            max_seq_len=inputs.max_seq_len,
            heads=inputs.heads,
            has_many_rows=self.num_queries is not None,
            deterministic=False,
            launcher=gpu,
        )
        if self.chunk is not None:
            size = replace(size, chunk=self.chunk)
        workspace = np.full(size.num_bytes + 64, 0xFF, np.uint8)
        skipped = -workspace.ctypes.data % 16
        self.red_zone = workspace[skipped + size.num_bytes :]
        usable = workspace[skipped : skipped + size.num_bytes]
        return plan.Plan(size, on_device("workspace", usable), gpu)

    def reference(self) -> tuple[Array, Array]:
        """Compute the same in float64, with the cache as it is dequantised."""
        given = self.arrays
        q = decode(given["q"], self.query)
        keys = decode(given["k_cache"], self.cache) * self.k_scale
        values = decode(given["v_cache"], self.cache) * self.v_scale
        if self.has_token_scales:
            keys = keys * given["k_scales"][..., None].astype(np.float64)
            values = values * given["v_scales"][..., None].astype(np.float64)
        out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        row = 0
        for s, count in enumerate(self.counts):
            for position in range(self.seq_lens[s] - count, self.seq_lens[s]):
                first = 0 if self.window_left < 0 else max(0, position - self.window_left)
                last = position if self.causal else self.seq_lens[s] - 1
                tokens = np.arange(first, max(first, last + 1))
                tokens = tokens[tokens < self.seq_lens[s]]
                if len(tokens):
                    self._attend_row(
                        q=q[row],
                        keys=keys,
                        values=values,
                        s=s,
                        tokens=tokens,
                        position=position,
                        out=out[row],
                        lse=lse[row],
                    )
                row += 1
        return out, lse

    def _attend_row(
        self,
        *,
        q: Array,
        keys: Array,
        values: Array,
        s: int,
        tokens: Array,
        position: int,
        out: Array,
        lse: Array,
    ) -> None:
        blocks = self.arrays["block_table"][s, tokens // self.block_size]
        for head in range(self.num_kv_heads * self.group):
            where = (blocks, head // self.group, tokens % self.block_size)
            scores = keys[where] @ q[head] * self.head_dim**-0.5
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.has_alibi:
                scores = scores + self.arrays["alibi_slopes"][head] * (tokens - position)
            top = scores.max()
            weights = np.exp(scores - top)
            lse[head] = top + np.log(weights.sum())
            total = weights.sum()
            if self.has_sinks:
                total += np.exp(self.arrays["sinks"][head].astype(np.float64) - top)
            out[head] = weights @ values[where] / total

    def check(self, gpu: HostGPU) -> None:
        """Run, and compare with float64."""
        out, lse = self.run(gpu)
        expected, expected_lse = self.reference()
        assert np.isfinite(out).all(), "a result is not finite"
        size = np.linalg.norm(expected) or 1.0
        error = np.linalg.norm(out - expected) / size
        assert error < TOLERANCE[self.query], f"relative error {error:.2e}"
        assert np.array_equal(np.isinf(lse), np.isinf(expected_lse)), "a row has keys, or has none"
        finite = np.isfinite(expected_lse)
        worst = np.abs(lse[finite] - expected_lse[finite]).max(initial=0.0)
        assert worst < 3 * TOLERANCE[self.query], f"error of lse {worst:.2e}"
        if hasattr(self, "red_zone"):
            assert (self.red_zone == 0xFF).all(), "the workspace was written past its end"
