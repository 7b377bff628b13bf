"""A checked batch, cut into items of work, and attention over it on the threads. It knows no arithmetic.

One cut serves the layers of a step. Of a cascade there are two: the whole pieces that all sequences share
are computed once for all rows, as if these were rows of one sequence, and folded in their order; every
row then begins with that state. It goes through the additions that it would go through alone, so a
cascade changes no bit.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvkernels.arguments import Options
from kvkernels.arrays import Array, flatten
from kvkernels.cpu import threads, work
from kvkernels.cpu.attention import attend_for
from kvkernels.cpu.merge import merge
from kvkernels.cpu.vectors import FLOAT8_FACTOR
from kvkernels.dtypes import FLOAT8
from kvkernels.inputs import Batch, Caches

_NOTHING = np.empty(0, np.float32)
_NO_STATES = np.empty((0, 0), np.float32)
_SLOT, _ROWS, _HEADS = 7, 2, 4  # columns of items


class Sizes(NamedTuple):
    """The sizes of attention that a cut depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch and its items of work, and how many states of single pieces they leave."""

    batch: Batch
    items: Array
    num_states: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Step:
    """The cut of a batch, and the cut of what its sequences share, if that is a piece or more."""

    cut: Cut
    shared: Cut | None
    num_rows: int
    num_threads: int

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the float32 arrays that attention over this step works in."""
        width = sizes.head_dim + 2
        shapes: dict[str, tuple[int, ...]] = {"states": (self.cut.num_states, width)}
        if self.shared is not None:
            shapes["shared"] = (self.num_rows * sizes.num_heads, width)
            shapes["shared_states"] = (self.shared.num_states, width)
        return shapes


def shared_keys(num_shared_tokens: int, block_size: int) -> int:
    """Return how many of the tokens that sequences share are whole pieces of a context."""
    piece_keys = int(work.piece_keys_of(block_size, 0, 0))
    return num_shared_tokens // piece_keys * piece_keys


def cut_step(
    batch: Batch, sizes: Sizes, options: Options, num_shared_tokens: int, num_threads: int
) -> Step:
    """Cut a checked batch for so many threads; the cost is proportional to the items."""
    num_rows = int(batch.offsets[-1])
    num_shared = shared_keys(num_shared_tokens, sizes.block_size)
    shared = None
    if num_shared and num_rows:
        prefix = Batch(
            batch.block_table[:1],
            np.array([num_shared], np.int32),
            np.array([0, num_rows], np.int32),
        )
        everything = Options(1.0, causal=False)
        shared = _cut(prefix, sizes, everything, num_threads, 0, all_apart=True)
    own = _cut(batch, sizes, options, num_threads, num_shared if shared else 0, all_apart=False)
    return Step(own, shared, num_rows, num_threads)


def _cut(
    batch: Batch,
    sizes: Sizes,
    options: Options,
    num_threads: int,
    num_shared: int,
    *,
    all_apart: bool,
) -> Cut:
    items = work.cut(
        *(batch.seq_lens, batch.offsets, sizes.num_kv_heads, sizes.group, sizes.block_size),
        *(options.causal, options.window_left, options.num_splits, num_threads),
        *(num_shared, all_apart),
    )
    num_states = 0
    if len(items) and items[:, _SLOT].max() >= 0:
        last = items[items[:, _SLOT].argmax()]
        num_states = int(last[_SLOT] + last[_ROWS] * last[_HEADS] * sizes.group)
    return Cut(batch, items, num_states, options.causal)


@dataclass(frozen=True, slots=True)
class Layer:
    """What attention over one layer reads, checked; q [T, Hq, D] is float32 where kernels read it."""

    q: Array
    caches: Caches
    options: Options
    alibi_slopes: Array | None
    sinks: Array | None

    @property
    def sizes(self) -> Sizes:
        """The sizes of this attention."""
        _, num_kv_heads, block_size, head_dim = self.caches.shape
        return Sizes(self.q.shape[1], num_kv_heads, head_dim, block_size)


class Outputs(NamedTuple):
    """Where results go, float32 and C-contiguous: out [T, Hq, D] and lse [T, Hq]."""

    out: Array
    lse: Array


def attend(step: Step, layer: Layer, memory: dict[str, Array], outputs: Outputs) -> None:
    """Write attention to the outputs; `memory` is that of `Step.shapes`."""
    shared = memory.get("shared", _NO_STATES)
    if step.shared is not None:
        states = memory["shared_states"]
        _run(step, step.shared, layer, (_NO_STATES, states, *outputs))
        _merge(step.shared, layer, (states, shared, True, *outputs))
    states = memory["states"]
    _run(step, step.cut, layer, (shared, states, *outputs))
    if step.cut.num_states:
        _merge(step.cut, layer, (states, shared, False, *outputs))


def _run(step: Step, cut: Cut, layer: Layer, arrays: tuple[Any, ...]) -> None:
    """Compute a cut's items on the threads; `arrays` are the kernel's last."""
    caches, options, batch = layer.caches, layer.options, cut.batch
    _, num_kv_heads, block_size, _ = caches.shape
    keys, k_steps, k_part = caches.keys.flatten()
    values, v_steps, v_part = caches.values.flatten()
    scale = options.scale * options.k_scale * _factor(caches)
    arguments = (
        *flatten("q", layer.q),
        *(keys, k_steps, *_flatten_scales("k_scale", caches.k_scales)),
        *(values, v_steps, *_flatten_scales("v_scale", caches.v_scales)),
        (k_part, v_part),
        *(batch.block_table, batch.seq_lens, batch.offsets),
        *((num_kv_heads, block_size, options.num_splits), scale, cut.causal),
        *(options.window_left, options.softcap, _or_nothing(layer.alibi_slopes)),
        *(_or_nothing(layer.sinks), options.v_scale * _factor(caches)),
        *(cut.items, np.zeros(1, np.int64), *arrays),
    )
    work_on = attend_for(caches.keys.dtype.kernel)
    threads.run(work_on, arguments, min(step.num_threads, len(cut.items)))


def _merge(cut: Cut, layer: Layer, arrays: tuple[Any, ...]) -> None:
    """Fold the states of a cut's pieces; `arrays` are the kernel's last."""
    _, num_kv_heads, block_size, _ = layer.caches.shape
    batch = cut.batch
    merge(
        *(batch.block_table, batch.seq_lens, batch.offsets, num_kv_heads, block_size),
        *(_or_nothing(layer.sinks), layer.options.v_scale * _factor(layer.caches)),
        *(cut.items, *arrays),
    )


def _factor(caches: Caches) -> float:
    return FLOAT8_FACTOR if caches.keys.dtype is FLOAT8 else 1.0


def _or_nothing(array: Array | None) -> Array:
    return _NOTHING if array is None else array


def _flatten_scales(name: str, scales: Array | None) -> tuple[Array, tuple[int, ...]]:
    if scales is None:
        return _NOTHING, (0, 0, 0)
    items, steps = flatten(name, scales[..., None])
    return items, steps
