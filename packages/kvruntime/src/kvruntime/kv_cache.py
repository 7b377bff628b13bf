"""The arrays that hold keys and values, on a device or on the host, and the copies between blocks.

Knows dtypes, shapes and bytes. Does not know which sequence a block belongs to, nor attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvblocks import BlockCopy, BlockSwap
from kvkernels import copy_blocks
from kvruntime.config import ModelConfig
from kvruntime.engine_config import KVDtype
from kvruntime.errors import InvalidRequest

__all__ = ["KVCache", "LayerCache", "block_bytes"]

_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_SCALED = {"fp8", "int8"}  # 8 bits need a scale for each vector, float32


def block_bytes(config: ModelConfig, block_size: int, kv_dtype: KVDtype) -> int:
    """The bytes of a block over all layers: keys, values and the scales of 8-bit ones."""
    vector = config.head_dim * _TORCH[kv_dtype].itemsize
    if kv_dtype in _SCALED:
        vector += torch.float32.itemsize
    return 2 * config.num_layers * config.num_kv_heads * block_size * vector


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of a layer, [num_blocks, num_kv_heads, block_size, head_dim].

    8-bit ones are multiplied by `key_scales` and `value_scales`, float32 [num_blocks, num_kv_heads,
    block_size], one for each token and head, which move with their blocks; for others these are 1.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | float
    value_scales: torch.Tensor | float

    @property
    def parts(self) -> list[torch.Tensor]:
        """All that moves with a block, in four dimensions."""
        scales = (self.key_scales, self.value_scales)
        found = [scale[..., None] for scale in scales if isinstance(scale, torch.Tensor)]
        return [self.keys, self.values, *found]


class KVCache:
    """The blocks of all layers on one device.

    On a CPU only address space is reserved; the system provides memory when blocks are first
    written. `is_pinned` is for memory of the host that a GPU copies from and to by itself.
    `InvalidRequest` where there is not as much memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: KVDtype = "float32",
        device: str = "cpu",
        is_pinned: bool = False,
    ) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size)
        dtype = _TORCH[kv_dtype]

        def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            if device != "cpu" or is_pinned or not num_blocks:
                return torch.zeros(shape, dtype=dtype, device=device, pin_memory=is_pinned)
            num_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
            return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype)

        def scales() -> torch.Tensor | float:
            return make(*shape, dtype=torch.float32) if kv_dtype in _SCALED else 1.0

        try:
            self.layers = tuple(
                LayerCache(
                    make(*shape, config.head_dim, dtype=dtype),
                    make(*shape, config.head_dim, dtype=dtype),
                    scales(),
                    scales(),
                )
                for _ in range(config.num_layers)
            )
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            size = block_bytes(config, block_size, kv_dtype)
            raise InvalidRequest(
                f"the pool must fit into memory, got {num_blocks} blocks of {size} bytes"
            ) from error
        self._parts = list(chain.from_iterable(layer.parts for layer in self.layers))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first tokens of blocks to others, in every layer."""
        if copies:
            copy_blocks(self._parts, copies)

    def swap_to(self, other: KVCache, swaps: Sequence[BlockSwap]) -> None:
        """Copy whole blocks of every layer into another cache of the same layout.

        Between a GPU and pinned memory the copies are queued on the current stream, where all that
        reads either side is queued too.
        """
        if not swaps:
            return
        is_one_memory = self._parts[0].device == other._parts[0].device
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            if is_one_memory:
                sources, destinations = torch.tensor(swaps).T
                _bits(theirs)[destinations] = _bits(ours)[sources]
                continue
            for source, destination in swaps:
                theirs[destination].copy_(ours[source], non_blocking=True)

    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(math.prod(part.shape) * part.itemsize for part in self._parts)


def _bits(array: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: not every dtype can be indexed."""
    return array.view(torch.uint8)
