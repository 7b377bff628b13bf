"""`/v1/completions`: texts or token ids in, what follows them out.

Knows this endpoint's fields and chunks. Does not know how tokens come about.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from kvruntime.answer_stream import Delta
from kvruntime.llm import LLM
from kvruntime.sampler import TokenLogprobs
from kvruntime.server.answers import Answers, finish_reason
from kvruntime.server.errors import stream_error
from kvruntime.server.logprobs import CompletionLogprobsWriter
from kvruntime.server.protocol import CompletionRequest
from kvruntime.server.responses import Completion, CompletionChoice, Usage
from kvruntime.server.service import FINGERPRINT, Service, service_of
from kvruntime.server.sse import DONE, EventStreamResponse, event, while_connected

__all__ = ["completions"]


async def completions(request: Request) -> Response:
    """Answer a request for completions."""
    service = service_of(request)
    body = await service.read(request, CompletionRequest)
    return await while_connected(request.receive, _respond(service, request, body))


async def _respond(service: Service, request: Request, body: CompletionRequest) -> Response:
    with service.admit(body, len(body.prompts)):
        llm = service.async_llm.llm
        prompts = await service.in_thread(lambda: _token_ids(llm, body.prompts))
        constraint = body.constraint
        params = [
            body.params(
                max(1, min(body.max_tokens, service.num_tokens_left(prompt))),
                best_of=body.best_of,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                constraint=constraint,
            )
            for prompt in prompts
        ]
        await service.prepare(params[0])
        writer = _Writer(service, body, prompts)
        answers = await service.open(request, body, prompts, params, request_id=writer.id)
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


def _token_ids(llm: LLM, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    return [llm.encode(one) if isinstance(one, str) else one for one in prompts]


class _Writer:
    """Writes the answers to one request, whole or in chunks."""

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._service = service
        self._body = body
        self._prompts = prompts
        self._created = int(time.time())
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}  # of choices that have begun

    async def whole(self, answers: Answers) -> str:
        """Return the body of the answer."""
        deltas: dict[int, Delta] = {}
        async for index, delta in answers.deltas():
            before = deltas.get(index)
            deltas[index] = delta if before is None else before.then(delta)
        choices = [self._choice(index, deltas[index], answers) for index in sorted(deltas)]
        return self._completion(choices, self._usage(answers))

    async def events(self, answers: Answers) -> AsyncGenerator[bytes]:
        """Yield a chunk for each delta that says something, and what ends a stream."""
        async for index, delta in answers.deltas():
            choice = self._choice(index, delta, answers)
            if choice.text or choice.logprobs or choice.finish_reason:
                yield event(self._completion([choice], is_chunk=True))
        if self._body.includes_usage:
            yield event(self._completion([], self._usage(answers), is_chunk=True))
        yield DONE

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None = None, *, is_chunk: bool = False
    ) -> str:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self._created,
            model=self._service.settings.model_names[0],
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        ).model_dump_json(exclude={"usage"} if is_chunk and not self._body.includes_usage else None)

    def _choice(self, index: int, delta: Delta, answers: Answers) -> CompletionChoice:
        """Return what is new of a choice; with `echo`, first of all its prompt."""
        body, place = self._body, index // answers.n
        token_ids, logprobs, text = delta.token_ids, delta.logprobs, delta.text
        if body.max_tokens == 0:
            token_ids, logprobs, text = (), (), ""
        noted: list[TokenLogprobs | None] = list(logprobs)
        is_first = index not in self._logprobs
        if is_first:
            self._logprobs[index] = CompletionLogprobsWriter(self._service.async_llm.llm.tokenizer)
            if body.echo:
                text = self._prompt_text(place) + text
                token_ids = (*self._prompts[place], *token_ids)
                noted = [*answers.streams[place].prompt_logprobs, *noted]
        wants_logprobs = body.logprobs is not None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs[index].write(token_ids, noted) if wants_logprobs else None,
            finish_reason=finish_reason(delta),
            stop_reason=delta.stop_reason,
        )

    def _prompt_text(self, place: int) -> str:
        prompt = self._body.prompts[place]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.async_llm.llm.tokenizer
        return tokenizer.decode(prompt, skip_special_tokens=False)

    def _usage(self, answers: Answers) -> Usage:
        usage = answers.usage()
        if self._body.max_tokens:
            return usage
        # The token that was generated beside the prompt's log-probabilities is not answered.
        return usage.model_copy(
            update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens}
        )
