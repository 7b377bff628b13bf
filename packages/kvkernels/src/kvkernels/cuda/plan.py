"""The plan of a batch: memory for cutting it into pieces of work, made once and updated on the device.

It knows sizes and never lengths: `update` is one launch that reads them where they lie, so that it is
captured in a graph with everything else and replayed for other lengths.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvkernels.cuda import kernels, source
from kvkernels.cuda.arrays import DeviceArray
from kvkernels.errors import ArgumentError, ShapeError

# Keys in a split of deterministic mode, whatever the batch.
DETERMINISTIC_CHUNK = 512
_ALIGNMENT = 256
# The chosen chunk gives a grid at most about so many splits for each of its blocks.
_SPLITS_PER_BLOCK = 16
_BLOCKS_PER_MULTIPROCESSOR = 3
QUERY_TILE = 64


class Launcher(Protocol):
    """What launches kernels: CuPy on a GPU, and what tests put in its place."""

    num_multiprocessors: int

    def launch(
        self, kernel: kernels.Kernel, grid: int, params: "np.ndarray[Any, Any]", stream: int
    ) -> None:
        """Launch a kernel with its parameters by value on a stream, asynchronously."""


@dataclass(frozen=True, slots=True)
class PlanSize:
    """The limits of a plan, and the layout of its workspace in bytes.

    Attributes:
        max_sequences: Sequences of a batch, at most.
        max_rows: Rows of a batch, at most.
        max_seq_len: Keys of a sequence, at most.
        num_heads, num_kv_heads, head_dim: Of the attention.
        has_many_rows: Whether sequences may have more than one row.
        chunk: Keys in a split; 0 lets the device choose by the batch.
        num_blocks: Thread blocks of the grids.
    """

    max_sequences: int
    max_rows: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_many_rows: bool
    chunk: int
    num_blocks: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tiles(self) -> int:
        """Tiles of 8 columns that a warp holds: as many as registers have room for."""
        room = max(1, 256 // max(self.head_dim, 64))
        return min(room, -(-self.columns // 8))

    @property
    def split_rows(self) -> int:
        """Sequences with more rows are tiled over their rows."""
        return max(1, 16 // self.group) if self.has_many_rows else 1

    @property
    def columns(self) -> int:
        """(row, head) pairs of a split for one KV head."""
        return self.split_rows * self.group

    @property
    def max_splits(self) -> int:
        """Room for splits: what any batch within the limits has."""
        if self.chunk:
            return self.max_sequences * max(1, -(-self.max_seq_len // self.chunk))
        return self.max_sequences + -(-_SPLITS_PER_BLOCK * self.num_blocks // self.num_kv_heads)

    @property
    def max_query_tiles(self) -> int:
        """Room for query tiles."""
        if not self.has_many_rows:
            return 0
        return self.max_rows * self.group // QUERY_TILE + self.max_sequences

    def layout(self) -> dict[str, tuple[int, int]]:
        """Offset and length in bytes of each part of the workspace, by its field in the params."""
        partials = self.max_splits * self.num_kv_heads * self.columns
        lengths = {
            "plan": source.struct("PlanHeader").itemsize,
            "splits": self.max_splits * source.struct("Split").itemsize,
            "first_slot": self.max_sequences * 4,
            "num_slots": self.max_sequences * 4,
            "query_tiles": self.max_query_tiles * source.struct("QueryTile").itemsize,
            "partial_lse": partials * 4,
            "partial_out": partials * self.head_dim * 4,
        }
        layout, offset = {}, 0
        for name, length in lengths.items():
            layout[name] = (offset, length)
            offset += -(-length // _ALIGNMENT) * _ALIGNMENT
        return layout

    @property
    def num_bytes(self) -> int:
        """Bytes of the workspace."""
        offset, length = list(self.layout().values())[-1]
        return offset + -(-length // _ALIGNMENT) * _ALIGNMENT


class Plan:
    """A batch cut into pieces, in a workspace on the device.

    One `update` serves the attention of all layers of a step.
    """

    def __init__(self, size: PlanSize, workspace: DeviceArray, launcher: Launcher) -> None:
        num_bytes = int(np.prod(workspace.shape)) * np.dtype(workspace.dtype).itemsize
        if num_bytes < size.num_bytes or workspace.pointer % 16:
            rule = f"workspace must have {size.num_bytes} bytes, aligned to 16"
            raise ShapeError(f"{rule}, got {num_bytes} at {workspace.pointer:#x}")
        self.size = size
        self.workspace = workspace
        self.launcher = launcher
        self._params = np.zeros((), source.struct("PlanParams"))
        self.pointers = {
            name: workspace.pointer + offset for name, (offset, _) in size.layout().items()
        }
        for name in ("plan", "splits", "first_slot", "num_slots", "query_tiles"):
            self._params[name] = self.pointers[name]
        self._params["num_kv_heads"] = size.num_kv_heads
        self._params["group"] = size.group
        self._params["chunk"] = size.chunk
        self._params["max_splits"] = size.max_splits
        self._params["num_blocks"] = size.num_blocks
        self._params["column_tiles"] = -(-size.columns // (8 * size.tiles))
        self._params["query_tile"] = QUERY_TILE
        self._params["max_query_tiles"] = size.max_query_tiles

    def update(
        self,
        seq_lens: DeviceArray,
        cu_seqlens_q: DeviceArray | None,
        *,
        window_left: int,
        causal: bool,
        split_rows: int,
        stream: int,
    ) -> None:
        """Cut a batch: one launch, which reads the lengths on the device."""
        num_sequences = seq_lens.shape[0]
        if num_sequences > self.size.max_sequences:
            rule = f"a batch of this plan has at most {self.size.max_sequences} sequences"
            raise ArgumentError(f"{rule}, got {num_sequences}")
        self._params["seq_lens"] = seq_lens.pointer
        self._params["cu_seqlens_q"] = cu_seqlens_q.pointer if cu_seqlens_q else 0
        self._params["num_sequences"] = num_sequences
        self._params["window_left"] = window_left
        self._params["causal"] = causal
        self._params["split_rows"] = split_rows
        self.launcher.launch(kernels.PLAN, 1, self._params, stream)


def size_of(
    *,
    max_sequences: int,
    max_rows: int,
    max_seq_len: int,
    heads: tuple[int, int, int],
    has_many_rows: bool,
    deterministic: bool,
    launcher: Launcher,
) -> PlanSize:
    """Size a plan; `heads` is (num_heads, num_kv_heads, head_dim)."""
    num_blocks = _BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors
    chunk = DETERMINISTIC_CHUNK if deterministic else 0
    size = PlanSize(
        *(max_sequences, max_rows, max_seq_len, *heads), has_many_rows, chunk, num_blocks
    )
    if chunk and max_seq_len <= chunk:
        return replace(size, max_seq_len=chunk)
    return size
