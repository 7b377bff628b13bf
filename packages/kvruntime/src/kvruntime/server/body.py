"""What every object of a request's body obeys. Knows no fields."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

__all__ = ["Body"]


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Say in a schema that what may be left out may be null."""
    for name, field in schema.get("properties", {}).items():
        is_nullable = {"type": "null"} in field.get("anyOf", ())
        if name not in schema.get("required", ()) and not is_nullable:
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class Body(BaseModel):
    """An object whose unknown fields and wrong types are refused; null is as good as left out."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_allow_nulls,
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        known = _known_names(cls)
        # One that is unknown is enough to be refused; an error for each would cost memory.
        first_unknown = next((name for name in given if name not in known), None)
        return {
            name: value for name, value in given.items() if name in known or name == first_unknown
        }


@cache
def _known_names(kind: type[Body]) -> frozenset[str]:
    """What a client calls the fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
