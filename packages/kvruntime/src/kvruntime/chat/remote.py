"""Answers of an OpenAI-compatible server.

Knows HTTP and chat completions. Does not know terminals.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from kvruntime.chat.session import Message, Turn
from kvruntime.errors import ServerError
from kvruntime.wire import EventReader, authorization, base_url, told, usage_of

__all__ = ["RemoteAnswerer"]


class RemoteAnswerer:
    """Asks a server, by the fields of `body` besides the messages; closing an answer hangs up.

    `model` None takes the first that the server lists. Raises `ServerError` with its words.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        body: dict[str, Any] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = base_url(url)
        self._body = dict(body or {})
        self._http = httpx.Client(
            headers=authorization(api_key),
            timeout=httpx.Timeout(600.0, connect=10.0),
            transport=transport,
        )
        self.model = model or self._first_model()

    def answer(self, messages: Sequence[Message], turn: Turn) -> Generator[str, None, None]:
        """Read the server's stream."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._body,
        }
        try:
            with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise ServerError(f"{response.status_code}: {told(response.text)}")
                yield from _pieces(response, turn)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} does not answer ({error!r})") from error

    def _first_model(self) -> str:
        try:
            response = self._http.get(f"{self.url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no server answers at {self.url} ({error})") from error
        if not response.is_success:
            raise ServerError(
                f"{self.url}/models answered {response.status_code}: {told(response.text)}"
            )
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/models lists no model; name one by --model") from error


def _events(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    """The events of an answer, until it says that it is done."""
    reader = EventReader()
    for piece in response.iter_bytes():
        yield from reader.feed(piece)
        if reader.is_done:
            return


def _pieces(response: httpx.Response, turn: Turn) -> Generator[str, None, None]:
    for event in _events(response):
        if "error" in event:
            raise ServerError(told(event["error"]))
        for choice in event.get("choices") or ():
            turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
            if text := (choice.get("delta") or {}).get("content"):
                yield text
        if usage := usage_of(event):
            turn.num_prompt_tokens, turn.num_cached_tokens, generated = usage
            turn.num_output_tokens = generated or 0
