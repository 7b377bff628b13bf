"""Server-sent events, and work that ends when nobody waits for it any more.

Knows how events are written and how a client that left is noticed. Does not know what they say.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStreamResponse", "event", "while_connected"]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_END = {"type": "http.response.body", "body": b"", "more_body": False}
_LAST_SECONDS = 1.0  # in which a client must take the event that ends a stream early


class _NobodyReads(Exception):
    """A client does not take the end of a stream."""


def event(data: str) -> bytes:
    r"""Return one event; the data is one line, as JSON is.

    >>> event('{"a": 1}')
    b'data: {"a": 1}\n\n'
    """
    return f"data: {data}\n\n".encode()


class EventStreamResponse(Response):
    """Sends events as they come, and closes what they come from, whatever ends the response.

    Args:
        events: what to send.
        close: called at the end, also where nothing was sent.
        seconds: how long it may take; None lets it run. A client that then does not read the last
            event at once is left: its connection is dropped.
        tell: makes the last event of a stream that fails or takes too long.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], object],
        seconds: float | None,
        tell: Callable[[Exception], bytes],
        headers: dict[str, str] | None = None,
    ) -> None:
        # Between us and the client nobody shall collect events or keep them.
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._seconds = seconds
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        try:
            # A client that has left wants no answer, and the log no traceback.
            async with contextlib.aclosing(self._events):
                with contextlib.suppress(ClientDisconnect):
                    await while_connected(receive, self._send(send))
        except _NobodyReads:
            if (drop := scope.get("kvruntime.drop_connection")) is not None:
                drop()
                await receive()  # that it is gone
        finally:
            self._close()  # a generator that never began closes nothing itself

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send(_END)
        except Exception as error:  # noqa: BLE001 -- the status is sent, so that an event says it
            self._close()  # what runs, before the client is waited for
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    chunk = self._tell(error)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await send(_END)
            except TimeoutError:
                raise _NobodyReads from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client; `ClientDisconnect`, and the work is cancelled, once it has left.

    The body of the request must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
