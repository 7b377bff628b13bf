"""What `kvblocks plan` was given: a model, a memory, lengths.

Knows which options belong together. Does not know what is made of them.
"""

import argparse
import re
from dataclasses import dataclass, field
from fractions import Fraction

from kvblocks.errors import InvalidSize, InvalidUsage
from kvblocks.files import read_text
from kvblocks.model_config import LayerCache, read_model_config
from kvblocks.planning import WindowPart
from kvblocks.sizing import bytes_per_token, dtype_bytes, pool_bytes, require, weight_bytes
from kvblocks.units import parse_count

MODEL_OPTIONS = (
    "--bytes-per-token, or --config, or all of --layers, --kv-heads, --head-dim, --dtype"
)
_SHAPE = ("layers", "kv_heads", "head_dim", "dtype")
_BESIDES = ("weights", "parameters", "weights_dtype", "workspace", "reserve", "utilization")


@dataclass(frozen=True)
class Model:
    """What a token takes, and as far as it is known, why."""

    bytes_per_token: int
    name: str = ""
    num_layers: int = 0
    layers: dict[LayerCache, int] = field(default_factory=dict)
    dtype: str = ""
    bytes_per_element: int = 0
    notes: tuple[str, ...] = ()

    @property
    def windows(self) -> list[WindowPart]:
        """The layers that keep only the last tokens."""
        return [
            WindowPart(num_layers * layer.elements_per_token * self.bytes_per_element, layer.window)
            for layer, num_layers in self.layers.items()
            if layer.window is not None
        ]


@dataclass(frozen=True)
class Memory:
    """The pool, and where it was computed, out of what."""

    pool_bytes: int | None = None
    memory_bytes: int | None = None
    weight_bytes: int = 0
    weights_as: str = ""  # how they were computed
    workspace_bytes: int | None = None
    reserve_bytes: int | None = None
    utilization: Fraction | None = None


def read_model(options: argparse.Namespace) -> Model | None:
    """The model, or None where nothing was said about it. `InvalidUsage`, `InvalidModelConfig`."""
    given = [name for name in _SHAPE if getattr(options, name) is not None]
    ways = [
        options.bytes_per_token is not None,
        options.config is not None,
        bool(set(given) - {"dtype"}),
    ]
    if sum(ways) > 1:
        raise InvalidUsage(f"the cache of a token is given one way: {MODEL_OPTIONS}")
    if options.config is not None:
        return _from_config(options.config, options.dtype)
    if options.bytes_per_token is not None:
        if options.dtype is not None:
            raise InvalidUsage("--dtype says nothing beside --bytes-per-token")
        require("--bytes-per-token", options.bytes_per_token)
        return Model(options.bytes_per_token)
    if not given:
        return None
    if len(given) < len(_SHAPE):
        missing = [name for name in _SHAPE if name not in given]
        raise InvalidUsage(f"the shape of a token lacks {_options(missing)}")
    return _from_shape(options)


def _from_shape(options: argparse.Namespace) -> Model:
    size = dtype_bytes(options.dtype)
    num_bytes = bytes_per_token(options.layers, options.kv_heads, options.head_dim, size)
    layer = LayerCache(options.kv_heads, options.head_dim, options.head_dim)
    return Model(num_bytes, "", options.layers, {layer: options.layers}, options.dtype, size)


def _from_config(path: str, dtype: str | None) -> Model:
    cache = read_model_config(path)
    dtype = dtype or cache.dtype
    if dtype is None:
        raise InvalidUsage(f"{path} names no dtype: give --dtype, as float16")
    size = dtype_bytes(dtype)
    return Model(
        cache.bytes_per_token(size),
        cache.model_type,
        cache.num_layers,
        cache.kinds,
        dtype,
        size,
        cache.notes,
    )


def read_memory(options: argparse.Namespace) -> Memory:
    """The pool: given, computed, or none. `InvalidUsage`, `NothingLeft`."""
    besides = [name for name in _BESIDES if getattr(options, name) is not None]
    if options.gpu_memory is None:
        if besides:
            raise InvalidUsage(f"{_options(besides[:1])} needs --gpu-memory to be taken from")
        if options.pool is not None:
            require("--pool", options.pool)
        return Memory(options.pool)
    if options.pool is not None:
        raise InvalidUsage("the pool is given by --pool or by --gpu-memory, not by both")
    weights, weights_as = _weights(options)
    left = pool_bytes(
        options.gpu_memory,
        weight_bytes=weights,
        workspace_bytes=options.workspace or 0,
        reserve_bytes=options.reserve or 0,
        utilization=options.utilization or Fraction(1),
    )
    return Memory(
        left,
        options.gpu_memory,
        weights,
        weights_as,
        options.workspace,
        options.reserve,
        options.utilization,
    )


def _weights(options: argparse.Namespace) -> tuple[int, str]:
    if options.weights is not None:
        if options.parameters is not None or options.weights_dtype is not None:
            raise InvalidUsage("weights are given by --weights or by --parameters, not by both")
        return options.weights, ""
    if options.parameters is None or options.weights_dtype is None:
        raise InvalidUsage(
            "--gpu-memory needs the weights that live there: --weights, or --parameters with "
            "--weights-dtype"
        )
    size = dtype_bytes(options.weights_dtype)
    return (
        weight_bytes(options.parameters, size),
        f"{options.parameters:,} parameters of {size} bytes",
    )


def read_lengths(options: argparse.Namespace) -> list[int]:
    """The lengths of sequences; none where none were given. `UnreadableFile`, `InvalidSize`."""
    if options.lengths_from is None:
        return options.lengths or []
    lengths = []
    for number, line in enumerate(read_text(options.lengths_from).splitlines(), 1):
        for text in re.split(r"[\s,]+", line.strip()):
            try:
                lengths += [parse_length(text)] if text else []
            except InvalidSize as error:
                raise InvalidSize(f"{options.lengths_from}, line {number}: {error}") from error
    if not lengths:
        raise InvalidSize(f"{options.lengths_from} has no lengths in it")
    return lengths


def parse_length(text: str) -> int:
    """Tokens of a sequence or of a block: at least one. `InvalidSize`."""
    count = parse_count(text)
    require("a number of tokens", count)
    return count


def _options(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
