"""The answers of the OpenAI API. Knows their fields; what is not set is not sent."""

from typing import Literal, TypeAlias

from pydantic import BaseModel

from kvruntime.server.tools import AssistantCall, CallChunk

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "ErrorDetails",
    "ErrorResponse",
    "FinishReason",
    "Model",
    "ModelList",
    "PromptDetails",
    "State",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those whose keys and values were found."""

    cached_tokens: int


class Usage(BaseModel):
    """How many tokens a request had."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(BaseModel):
    """The tokens of an answer; an entry of `top_logprobs` is None where there is nothing before."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Completion(BaseModel):
    """The body of an answer to `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None


class TopLogprob(BaseModel):
    """A token that might have come; `bytes` are those it stands for."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AssistantCall] = []


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    """The body of an answer to `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What is new of a message; nothing, in the last chunk of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[CallChunk] = []


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatChunk(BaseModel):
    """One chunk of a stream; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class State(BaseModel):
    """How the engine is; `error` is what it failed with."""

    status: str
    error: str | None = None


class ErrorDetails(BaseModel):
    """What went wrong: `param` names the field, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of an answer that is an error, and the data of a stream's last event."""

    error: ErrorDetails
