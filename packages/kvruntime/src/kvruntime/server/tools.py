"""Tools in requests, and their calls in answers, as the OpenAI API writes them.

Knows fields, and which choice of tools means what. Does not know how models write their calls.
"""

import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from kvruntime.server.body import Body
from kvruntime.tools import ToolCall, ToolFormat, ToolParser

__all__ = [
    "AnswerParser",
    "AssistantCall",
    "CallChunk",
    "FunctionCall",
    "MessageCall",
    "NamedTool",
    "Tool",
    "ToolChoice",
    "offered",
    "schemas",
]

_ALPHANUMERIC = string.ascii_letters + string.digits

Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function that may be called; without `parameters` its arguments are any object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    """Something that may be called."""

    type: Literal["function"]
    function: Function

    def as_template_input(self) -> dict[str, Any]:
        """Return what chat templates are written for."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class FunctionName(Body):
    """Which function."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Body):
    """A call that is sent back; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class MessageCall(Body):
    """A call in a message of the assistant that is sent back."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionCall(BaseModel):
    """A function and its arguments, as the text of a JSON object."""

    name: str
    arguments: str


class AssistantCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class CallChunk(AssistantCall):
    """A call in a stream: whole, in one chunk."""

    index: int


def offered(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Return the tools that an answer may call."""
    if choice == "none":
        return ()
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools


class AnswerParser:
    """Separates the calls of one answer from its text, while it comes."""

    def __init__(self, tool_format: ToolFormat, names: set[str]) -> None:
        self.calls: list[AssistantCall] = []
        self._parser = ToolParser(tool_format, names)

    def append(self, text: str, *, is_last: bool) -> Iterator[str | CallChunk]:
        """Take more of the text; what is decided now."""
        pieces = self._parser.append(text)
        if is_last:
            pieces += self._parser.finish()
        for piece in pieces:
            yield self._chunk(piece) if isinstance(piece, ToolCall) else piece

    def _chunk(self, call: ToolCall) -> CallChunk:
        function = FunctionCall(name=call.name, arguments=call.arguments)
        # Nine letters and digits: what the templates of Mistral insist on.
        call_id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        self.calls.append(AssistantCall(id=call_id, type="function", function=function))
        return CallChunk(index=len(self.calls) - 1, id=call_id, type="function", function=function)


def schemas(
    tools: Sequence[Tool], *, is_required: bool
) -> list[tuple[str, Mapping[str, Any] | None]]:
    """Return the name of each tool, and the schema that its arguments are held to.

    Where no call is required, only those of strict tools are.
    """
    return [
        (
            tool.function.name,
            tool.function.parameters if is_required or tool.function.strict else None,
        )
        for tool in tools
    ]
