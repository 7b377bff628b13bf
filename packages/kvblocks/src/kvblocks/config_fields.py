"""Fields of a model's config.json, read one by one with errors that name them.

Knows JSON values and ranges. Does not know what a field means.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from kvblocks.errors import InvalidModelConfig
from kvblocks.units import shorten

Fields: TypeAlias = Mapping[str, Any]

# More than any model has, and few enough to write down one by one.
MAX_LAYERS = 65_536
_MAX_WIDTH = 2**31 - 1


def has(fields: Fields, name: str) -> bool:
    """Whether a field is there, and not null."""
    return fields.get(name) is not None


def first(fields: Fields, *names: str) -> str | None:
    """The first of these names that is there."""
    return next((name for name in names if has(fields, name)), None)


def width(fields: Fields, name: str, most: int = _MAX_WIDTH) -> int:
    """A positive whole number. `InvalidModelConfig`.

    >>> width({"head_dim": 128}, "head_dim")
    128
    """
    return as_width(fields.get(name), name, most)


def as_width(value: object, name: str, most: int = _MAX_WIDTH) -> int:
    """The same of a value by itself. `InvalidModelConfig`."""
    return _whole(value, name, 1, most)


def optional_count(fields: Fields, name: str) -> int:
    """A whole number that may be 0, which it is where it is missing. `InvalidModelConfig`."""
    return _whole(fields[name], name, 0, _MAX_WIDTH) if has(fields, name) else 0


def layer_numbers(fields: Fields, name: str, num_layers: int, first_layer: int = 0) -> set[int]:
    """A list of layers, counted from 0 whatever the file counts from. `InvalidModelConfig`."""
    last = num_layers - 1 + first_layer
    return {_whole(value, name, first_layer, last) - first_layer for value in items(fields, name)}


def optional_width(fields: Fields, *names: str) -> int | None:
    """The first of these names that is there, as a positive whole number. `InvalidModelConfig`."""
    name = first(fields, *names)
    return None if name is None else width(fields, name)


def items(fields: Fields, name: str) -> list[Any]:
    """A list. `InvalidModelConfig`."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise InvalidModelConfig(f"{name} must be a list, got {shorten(value)}")
    return value


def per_layer(fields: Fields, name: str, num_layers: int) -> list[Any]:
    """A list with an entry a layer; what follows belongs to extra layers. `InvalidModelConfig`."""
    values = items(fields, name)
    if len(values) < num_layers:
        raise InvalidModelConfig(
            f"{name} must have an entry for each of {num_layers} layers, got {len(values)}"
        )
    return values[:num_layers]


def mapping(value: object, name: str) -> Fields:
    """A JSON object. `InvalidModelConfig`."""
    if not isinstance(value, dict):
        raise InvalidModelConfig(f"{name} must be an object, got {shorten(value)}")
    return value


def _whole(value: object, name: str, least: int, most: int) -> int:
    # JSON's true would pass as 1.
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidModelConfig(
            f"{name} must be a whole number in [{least}, {most}], got {shorten(value)}"
        )
    return value
