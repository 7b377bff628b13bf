"""One request to an OpenAI-compatible server, and when each part of its answer came.

Knows HTTP, server-sent events and the fields of completions and chat completions. Does not know when
requests are sent or what their times mean. Times are those of the running event loop's clock.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import httpx

from kvruntime.bench.figures import Outcome, Record
from kvruntime.bench.prompts import Asked
from kvruntime.errors import InvalidRequest, ServerError
from kvruntime.wire import EventReader, authorization, base_url, told, usage_of

__all__ = ["Client", "Endpoint"]


class Endpoint(StrEnum):
    """Where requests go: completions take texts and token ids, chat takes messages."""

    COMPLETIONS = "completions"
    CHAT = "chat"


_PATHS = {Endpoint.COMPLETIONS: "/completions", Endpoint.CHAT: "/chat/completions"}
_TOO_MANY_REQUESTS = 429


class Client:
    """Sends requests to one server; use it as an asynchronous context.

    Args:
        url: where the server is, with or without `/v1`.
        endpoint: which of the two it asks.
        model: the name to ask for; None takes the first that the server lists.
        extra: more fields of every request's body.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a request has failed.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        model: str | None = None,
        extra: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not timeout > 0:
            raise InvalidRequest(f"timeout must be above 0, got {timeout}")
        self.url = base_url(url)
        self.endpoint = endpoint
        self.model = model or ""
        self._extra = dict(extra or {})
        self._http = httpx.AsyncClient(
            headers=authorization(api_key),
            timeout=timeout,
            # A pool of connections would make requests wait here, unseen by the server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def send(self, asked: Asked, record: Record) -> None:
        """Ask, and note in `record` what comes when; a failure is noted, not raised."""
        record.sent = _now()
        body = self._body(asked)
        try:
            async with self._http.stream(
                "POST", self.url + _PATHS[self.endpoint], json=body
            ) as response:
                record.http_status = response.status_code
                if response.is_success:
                    await _read(response, record)
                else:
                    await response.aread()
                    is_full = response.status_code == _TOO_MANY_REQUESTS
                    record.outcome = Outcome.REJECTED if is_full else Outcome.FAILED
                    record.error = f"{response.status_code}: {told(response.text)}"
        except httpx.HTTPError as error:
            record.outcome = Outcome.FAILED
            record.error = _sentence(error)
        record.ended = record.ended or _now()

    async def warm_up(self, asked: Sequence[Asked]) -> None:
        """Ask one after another. `ServerError` with the server's words if one is not answered."""
        for one in asked:
            record = Record(arrival=0.0)
            await self.send(one, record)
            if not record.is_completed:
                raise ServerError(f"{self.url} does not answer as it should ({record.error})")

    def _body(self, asked: Asked) -> dict[str, Any]:
        body = {
            "model": self.model,
            "max_tokens": asked.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if self.endpoint is Endpoint.COMPLETIONS:
            return {**body, "prompt": asked.prompt}
        prompt = asked.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {**body, "messages": messages}

    async def _first_model(self) -> str:
        try:
            response = await self._http.get(f"{self.url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no server answers at {self.url} ({_sentence(error)})") from error
        if not response.is_success:
            raise ServerError(
                f"{self.url}/models answered {response.status_code}: {told(response.text)}"
            )
        try:
            name = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/models lists no model; name one by --model") from error
        return str(name)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _read(response: httpx.Response, record: Record) -> None:
    """Note the times of what is generated, and the counts of tokens at the end."""
    is_whole = False
    ended = None
    async for event in _events(response):
        if "error" in event:
            record.outcome = Outcome.FAILED
            record.error = f"in the stream: {told(event['error'])}"
            return
        for choice in event.get("choices") or ():
            is_last = choice.get("finish_reason") is not None
            if is_last or _has_output(choice):
                ended = _now()
            # An end without output, after which nothing else comes, stands for all there was.
            if _has_output(choice) or (is_last and not record.chunk_times):
                record.chunk_times.append(_now())
            is_whole = is_whole or is_last
        if usage := usage_of(event):
            record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens = usage
    record.ended = ended
    if not is_whole:
        record.outcome, record.error = Outcome.FAILED, "the stream ended before the answer did"
    elif record.num_output_tokens is None:
        record.outcome, record.error = Outcome.FAILED, "the server told no usage: no tokens known"
    else:
        record.outcome = Outcome.COMPLETED


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The events of an answer, until it says that it is done."""
    reader = EventReader()
    async for piece in response.aiter_bytes():
        for event in reader.feed(piece):
            yield event
        if reader.is_done:
            return


def _has_output(choice: Mapping[str, Any]) -> bool:
    """Whether anything was generated: the first event of a chat only names the role."""
    delta = choice.get("delta") or choice
    return any(delta.get(key) for key in ("text", "content", "reasoning_content", "tool_calls"))


def _sentence(error: Exception) -> str:
    """An error of the network in words; some carry none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
