"""The requests of the OpenAI API that are served, field by field, with the extras of vLLM.

A field that is not here is refused by its name, and so is a value of the wrong type; null is the
same as leaving a field out. A field that can only have the value that changes nothing says so by
its type.

Knows JSON and the sampling parameters behind it. Does not know what a model, a queue or a context
can hold.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from kvruntime.sampling_params import BeamSearchParams, SamplingParams
from kvruntime.server.body import Body
from kvruntime.server.constraints import (
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
    constraint_of,
)
from kvruntime.server.tools import MessageCall, NamedTool, Tool, ToolChoice, offered
from kvruntime.structured_outputs import StructuredOutputsParams

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "GenerationRequest",
    "Message",
    "StreamOptions",
]

MAX_NUM_ANSWERS = 128
MAX_NUM_PROMPTS = 256
MAX_NUM_LOGPROBS = 20
MAX_NUM_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_NUM_BIASES = 1024
MAX_NUM_MESSAGES = 4096
MAX_NUM_PARTS = 4096
MAX_NUM_TOOLS = 128

Answers: TypeAlias = Annotated[int, Field(ge=1, le=MAX_NUM_ANSWERS)]
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUM_LOGPROBS)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]

# What only sampling knows, and the values that say nothing.
_OF_SAMPLING: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "seed": (),
    "stop": (),
    "include_stop_str_in_output": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "response_format": (TextFormat(type="text"),),
    "structured_outputs": (),
}
_OF_BEAMS = ("num_beams", "length_penalty", "early_stopping")


def _check_num_biases(given: object) -> object:
    """Refuse too many before each of them is looked at."""
    if isinstance(given, dict) and len(given) > MAX_NUM_BIASES:
        raise ValueError(f"there may be at most {MAX_NUM_BIASES} biases, got {len(given)}")
    return given


class StreamOptions(Body):
    """What a stream says besides its answers."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(Body):
    """What completions and chat completions share.

    `n` answers with `use_beam_search` are the best of `num_beams`, which is `n` if it is not given.
    """

    model: str
    n: Answers = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_NUM_STOPS, fail_fast=True)] | None = (
        None
    )
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_NUM_BIASES),
        BeforeValidator(_check_num_biases),
    ] = Field(default_factory=dict)
    user: str | None = None  # which is for the provider's own records, of which there are none
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_NUM_STOPS, fail_fast=True)] = (
        Field(default_factory=list)
    )
    include_stop_str_in_output: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    structured_outputs: StructuredOutputs | None = None

    use_beam_search: bool = False
    num_beams: Answers | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    early_stopping: bool | Literal["never"] = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs cannot go with response_format")
        given = self.model_fields_set
        if not self.use_beam_search:
            if strange := [name for name in _OF_BEAMS if name in given]:
                raise ValueError(f"{strange[0]} needs use_beam_search to be true")
            return self
        for name, neutral in _OF_SAMPLING.items():
            if name in given and not _is_one_of(getattr(self, name), neutral):
                raise ValueError(f"{name} cannot go with use_beam_search")
        return self

    @property
    def num_sequences(self) -> int:
        """How many answers to a prompt run side by side."""
        return (self.num_beams or self.n) if self.use_beam_search else self.n

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """What the answers must be. `InvalidRequest` for what says nothing."""
        return constraint_of(self.response_format, self.structured_outputs)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(
        self,
        max_tokens: int,
        *,
        best_of: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        constraint: StructuredOutputsParams | None = None,
    ) -> SamplingParams | BeamSearchParams:
        """Return what the engine is asked for. `InvalidRequest` where values do not go together."""
        shared: dict[str, Any] = {
            "n": self.n,
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": {_token_id(name): bias for name, bias in self.logit_bias.items()},
            "structured_outputs": constraint,
        }
        if self.use_beam_search:
            return BeamSearchParams(
                **shared,
                num_beams=self.num_sequences,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            )
        return SamplingParams(
            **shared,
            best_of=best_of,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**64,
            stop=self.stop or (),
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    best_of: Answers | None = None
    logprobs: TopLogprobs | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n, got {self.best_of} and {self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or echo must be true, got 0 and false")
        if self.use_beam_search and self.best_of is not None:
            raise ValueError("best_of cannot go with use_beam_search; num_beams says how many")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt is a list of one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        listed: list[str] | list[list[int]] = prompt
        return listed

    @property
    def num_sequences(self) -> int:
        """How many answers to a prompt run side by side."""
        return self.best_of or super().num_sequences


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; answers of ours can be sent back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=MAX_NUM_PARTS, fail_fast=True)] | None
    ) = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: (
        Annotated[list[MessageCall], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)] | None
    ) = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """Return what chat templates are written for: content that is one text."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class ChatCompletionRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_NUM_MESSAGES, fail_fast=True)
    ]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] = False

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if None not in {self.max_tokens, self.max_completion_tokens} and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError(
                f"max_tokens and max_completion_tokens are the same, "
                f"got {self.max_tokens} and {self.max_completion_tokens}"
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(names) > len(set(names)):
            raise ValueError("tools must have names of their own")
        choice = self.tool_choice
        if not names and choice not in {"none", "auto"}:
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which tools do not have")
        if self.offered_tools:
            for name in ("response_format", "structured_outputs"):
                if getattr(self, name) not in (None, TextFormat(type="text")):
                    raise ValueError(f"{name} cannot go with tools that may be called")
            if self.use_beam_search and self.enforces_tools:
                raise ValueError("tools cannot be enforced with use_beam_search")

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that an answer may call."""
        return offered(self.tools, self.tool_choice)

    @property
    def enforces_tools(self) -> bool:
        """Whether calls are enforced: there must be one, or but one, or a tool is strict."""
        is_strict = any(tool.function.strict for tool in self.offered_tools)
        is_free = self.tool_choice == "auto" and self.parallel_tool_calls and not is_strict
        return bool(self.offered_tools) and not is_free

    @property
    def limit(self) -> int | None:
        """The tokens an answer may have, if the client says it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _is_one_of(value: object, others: tuple[object, ...]) -> bool:
    """Whether a value is among others, where 0 is not False."""
    return any(type(value) is type(other) and value == other for other in others)


def _token_id(name: str) -> Any:
    """A key of `logit_bias`; what is no token id is refused by who knows which there are."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 12 else name
