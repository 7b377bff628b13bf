"""What an answer must be: `response_format` of the OpenAI API, and `structured_outputs` of vLLM.

Knows their fields. Does not know what a schema or a grammar means, nor how it is enforced.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from kvruntime.server.body import Body
from kvruntime.structured_outputs import StructuredOutputsParams

__all__ = ["ResponseFormat", "StructuredOutputs", "constraint_of"]

MAX_NUM_CHOICES = 1024


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JSONObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema, its name and what it is for; it is enforced whatever `strict` says."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class JSONSchemaFormat(Body):
    """An instance of a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """One constraint, in vLLM's names."""

    json_document: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_NUM_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


def constraint_of(
    response_format: TextFormat | JSONObjectFormat | JSONSchemaFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> StructuredOutputsParams | None:
    """Return the constraint that a request names. `InvalidRequest` for what is none."""
    if structured_outputs is not None:
        return StructuredOutputsParams(**structured_outputs.model_dump(by_alias=True))
    match response_format:
        case JSONSchemaFormat(json_schema=named):
            return StructuredOutputsParams(json=named.definition)
        case JSONObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case _:
            return None
