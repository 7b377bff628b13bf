"""What every object of a request's body obeys. Knows no fields."""

from collections.abc import Mapping
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
        return {name: value for name, value in data.items() if value is not None}
