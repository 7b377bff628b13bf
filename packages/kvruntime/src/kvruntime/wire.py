"""OpenAI's interface as a client meets it: addresses, events of a stream, and what errors say.

Knows the shapes of answers. Does not know HTTP libraries, or what is asked.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvruntime.errors import InvalidRequest

__all__ = ["EventReader", "authorization", "base_url", "told", "usage_of"]

_DONE = object()
_SHOWN = 200  # characters of what a server says of an error


def base_url(url: str) -> str:
    """The address that the paths of the interface follow. `InvalidRequest` for one with no such port.

    >>> base_url("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000/v1'
    """
    try:
        urlsplit(url).port  # noqa: B018 -- it is checked when it is asked for
    except ValueError as error:
        raise InvalidRequest(
            f"url must be the address of a server, got {url!r} ({error})"
        ) from None
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that a key goes into. `InvalidRequest` for one that no header can hold."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("an API key must be printable ASCII")
    return {"Authorization": f"Bearer {api_key}"}


class EventReader:
    r"""Finds the events in a stream of bytes, wherever that is cut into pieces.

    An event is the JSON of a line of server-sent events. What is not JSON, and what is no object,
    is an error as servers send them.

    >>> reader = EventReader()
    >>> reader.feed(b': still here\n\ndata: {"choi'), reader.feed(b'ces": []}\r\n\r\ndata:')
    ([], [{'choices': []}])
    >>> reader.feed(b" [DONE]\n"), reader.is_done
    ([], True)
    """

    def __init__(self) -> None:
        self.is_done = False  # the server said that nothing follows
        self._rest = b""

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The events whose lines end in this piece."""
        # Only at the ends of lines that the protocol knows: U+2028 may stand in the midst of JSON.
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            event = _event_of(line.decode(errors="replace"))
            if event is _DONE:
                self.is_done = True
                break
            if event is not None:
                events.append(event)
        return events


def _event_of(line: str) -> Any:
    """The event of a line; `_DONE` at the end, None where a line has none."""
    field, _, value = line.partition(":")
    if field != "data":
        return None
    if value.strip() == "[DONE]":
        return _DONE
    with suppress(ValueError, RecursionError):
        event = json.loads(value)
        if isinstance(event, dict):
            return event
    return {"error": f"an event is no JSON object: {value.strip()}"}


def told(error: object) -> str:
    """What an error says, in one short line.

    >>> told('{"error": {"message": "the queue is full", "code": 429}}')
    'the queue is full'
    """
    with suppress(ValueError, TypeError, RecursionError):
        error = json.loads(error) if isinstance(error, str) else error
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or str(error)
    return " ".join(str(error).split())[:_SHOWN]


def usage_of(event: Mapping[str, Any]) -> tuple[int, int, int | None] | None:
    """Tokens of the prompt, those of it found in the cache, and generated ones; None if untold."""
    usage = event.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return usage.get("prompt_tokens") or 0, cached, usage.get("completion_tokens")
