"""`/v1/chat/completions`: a conversation in, the assistant's next message out.

Knows this endpoint's fields and chunks, and that the checkpoint's template writes the prompt. Does
not know how tokens come about.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request
from starlette.responses import Response

from kvruntime.answer_stream import Delta
from kvruntime.server.answers import Answers, finish_reason
from kvruntime.server.errors import stream_error
from kvruntime.server.logprobs import chat_logprobs
from kvruntime.server.protocol import ChatCompletionRequest
from kvruntime.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    Usage,
)
from kvruntime.server.service import FINGERPRINT, Service, service_of
from kvruntime.server.sse import DONE, EventStreamResponse, event, while_connected
from kvruntime.server.tools import AnswerParser, CallChunk, NamedTool, schemas
from kvruntime.structured_outputs import StructuredOutputsParams
from kvruntime.tools import call_constraint

__all__ = ["chat_completions"]


async def chat_completions(request: Request) -> Response:
    """Answer a request for chat completions."""
    service = service_of(request)
    body = await service.read(request, ChatCompletionRequest)
    return await while_connected(request.receive, _respond(service, request, body))


async def _respond(service: Service, request: Request, body: ChatCompletionRequest) -> Response:
    with service.admit(body, 1):
        prompt = await service.in_thread(lambda: _token_ids(service, body))
        longest = service.num_tokens_left(prompt)
        params = body.params(
            longest if body.limit is None else min(body.limit, longest),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=_constraint(service, body),
        )
        await service.prepare(params)
        writer = _Writer(service, body)
        answers = await service.open(request, body, [prompt], [params], request_id=writer.id)
    headers = {"X-Request-Id": writer.id}
    if body.stream:
        return EventStreamResponse(
            writer.events(answers),
            close=answers.close,
            seconds=service.settings.request_seconds,
            tell=stream_error,
            headers=headers,
        )
    with contextlib.closing(answers):
        async with asyncio.timeout(service.settings.request_seconds):
            whole = await writer.whole(answers)
    return Response(whole, media_type="application/json", headers=headers)


def _token_ids(service: Service, body: ChatCompletionRequest) -> list[int]:
    llm = service.async_llm.llm
    text = llm.tokenizer.apply_chat_template(
        [message.as_template_input() for message in body.messages],
        tools=[tool.as_template_input() for tool in body.offered_tools],
    )
    return llm.encode(text, add_special_tokens=False)


def _constraint(service: Service, body: ChatCompletionRequest) -> StructuredOutputsParams | None:
    """What the answers must be: what the request says, or calls of its tools."""
    tool_format = service.async_llm.llm.tokenizer.tool_format
    if tool_format is None or not body.enforces_tools:
        return body.constraint
    return call_constraint(
        tool_format,
        schemas(body.offered_tools, is_required=body.tool_choice != "auto"),
        is_required=body.tool_choice != "auto",
        is_parallel=body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool),
    )


class _Writer:
    """Writes the answers to one request, whole or in chunks."""

    def __init__(self, service: Service, body: ChatCompletionRequest) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._service = service
        self._body = body
        self._created = int(time.time())
        self._parsers: dict[int, AnswerParser] = {}

    async def whole(self, answers: Answers) -> str:
        """Return the body of the answer."""
        deltas: dict[int, Delta] = {}
        async for index, delta in answers.deltas():
            before = deltas.get(index)
            deltas[index] = delta if before is None else before.then(delta)
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self._created,
            model=self._service.settings.model_names[0],
            system_fingerprint=FINGERPRINT,
            choices=[self._choice(index, deltas[index]) for index in sorted(deltas)],
            usage=answers.usage(),
        ).model_dump_json(exclude_unset=True)

    async def events(self, answers: Answers) -> AsyncGenerator[bytes]:
        """Yield the role of each answer, a chunk for each delta that says something, and the end."""
        begun: set[int] = set()
        async for index, delta in answers.deltas():
            if index not in begun:
                begun.add(index)
                first = ChatDelta(role="assistant", content="")
                yield self._chunk(_chunk_choice(index, first))
            for choice in self._chunk_choices(index, delta):
                yield self._chunk(choice)
        if self._body.includes_usage:
            yield self._chunk(usage=answers.usage())
        yield DONE

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        pieces = self._pieces(index, delta)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        message = ChatMessage(role="assistant", content=text)
        parser = self._parsers.get(index)
        if parser is not None and parser.calls:
            message = ChatMessage(
                role="assistant", content=text.strip() or None, tool_calls=parser.calls
            )
        reason = self._finish_reason(index, delta)
        assert reason is not None, "the stream has ended"
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(delta),
            finish_reason=reason,
            stop_reason=delta.stop_reason,
        )

    def _chunk_choices(self, index: int, delta: Delta) -> Iterator[ChatChunkChoice]:
        """What is new of an answer, and on its own that it has ended."""
        pieces = self._pieces(index, delta)
        logprobs = self._logprobs(delta)
        if logprobs is not None and logprobs.content and not pieces:
            pieces = [""]  # their text is held back
        for piece in pieces:
            new = (
                ChatDelta(content=piece)
                if isinstance(piece, str)
                else ChatDelta(tool_calls=[piece])
            )
            yield _chunk_choice(index, new, logprobs)
            logprobs = None
        if (reason := self._finish_reason(index, delta)) is not None:
            end = _chunk_choice(index, ChatDelta(), finish_reason=reason)
            yield end.model_copy(update={"stop_reason": delta.stop_reason})

    def _chunk(self, choice: ChatChunkChoice | None = None, usage: Usage | None = None) -> bytes:
        chunk = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._service.settings.model_names[0],
            system_fingerprint=FINGERPRINT,
            choices=[] if choice is None else [choice],
            usage=usage,
        )
        # Of a delta, what is not new is left out.
        hidden = None if self._body.includes_usage else {"usage"}
        return event(chunk.model_dump_json(exclude_unset=True, exclude=hidden))

    def _pieces(self, index: int, delta: Delta) -> list[str | CallChunk]:
        """What is new of an answer: its text, and calls of tools where there are any."""
        tool_format = self._service.async_llm.llm.tokenizer.tool_format
        tools = self._body.offered_tools
        if tool_format is None or not tools:
            return [delta.text] if delta.text else []
        if index not in self._parsers:
            names = {tool.function.name for tool in tools}
            self._parsers[index] = AnswerParser(tool_format, names)
        is_last = delta.finish_reason is not None
        return list(self._parsers[index].append(delta.text, is_last=is_last))

    def _finish_reason(self, index: int, delta: Delta) -> FinishReason | None:
        """Why an answer ended; a call that was asked for by name is no reason."""
        reason = finish_reason(delta)
        parser = self._parsers.get(index)
        is_called = parser is not None and bool(parser.calls)
        is_named = isinstance(self._body.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and is_called and not is_named else reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._service.async_llm.llm.tokenizer, delta.logprobs)


def _chunk_choice(
    index: int,
    delta: ChatDelta,
    logprobs: ChatLogprobs | None = None,
    finish_reason: FinishReason | None = None,
) -> ChatChunkChoice:
    # Clients expect these two in every chunk, null as they mostly are.
    return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
