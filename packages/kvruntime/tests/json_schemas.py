"""Random JSON schemas, as many as asked for, of which every instance is short.

Knows the keywords that structured outputs take. Does not know how they are followed.
"""

import random
from typing import Any

__all__ = ["random_schema"]


def random_schema(chance: random.Random) -> dict[str, Any]:
    """Return a schema whose instances are short, with definitions that its parts may refer to."""
    return {**_part(chance, 3), "$defs": _DEFINITIONS}


_DEFINITIONS = {
    "flag": {"type": "boolean"},
    "chain": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
}


def _part(chance: random.Random, depth: int) -> dict[str, Any]:
    """A schema whose containers are at most `depth` deep."""
    scalars = (_string, _pattern, _integer, _number, _enum, _const, _simple, _format, _reference)
    containers = (_object, _object, _array, _tuple, _any_of)
    return chance.choice(scalars + containers if depth else scalars)(chance, depth - 1)


def _string(chance: random.Random, _depth: int) -> dict[str, Any]:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _pattern(chance: random.Random, _depth: int) -> dict[str, Any]:
    patterns = ["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(red|green|blue)$", "^[A-Z][a-z]?é{0,2}$"]
    return {"type": "string", "pattern": chance.choice(patterns)}


def _integer(chance: random.Random, _depth: int) -> dict[str, Any]:
    least = chance.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 5000)}


def _number(chance: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": [chance.randint(-9, 9) / 4, round(chance.random(), 3), 1e21]}


def _enum(chance: random.Random, _depth: int) -> dict[str, Any]:
    values = ["a", "ä", 'quote " and \\', "line\nbreak", 3, -1.5, True, None, [1, "x"], {"k": 0}]
    return {"enum": chance.sample(values, chance.randint(1, 5))}


def _const(chance: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": chance.choice(["fixed", 7, False, None, [], {"a": [1, 2]}])}


def _simple(chance: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _format(chance: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(["date", "uuid", "ipv4"])}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["id", "name", "größe", "tags", "a b", 'q"'], chance.randint(0, 4))
    properties = {name: _part(chance, depth) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {
        "type": "array",
        "items": _part(chance, depth),
        "minItems": least,
        "maxItems": least + chance.randint(0, 2),
    }


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    items = [_part(chance, depth) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_part(chance, depth) for _ in range(chance.randint(1, 3))]}


def _reference(chance: random.Random, _depth: int) -> dict[str, Any]:
    return {"$ref": chance.choice(["#/$defs/flag", "#/$defs/chain"])}
