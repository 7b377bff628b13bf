"""A server for the page alone: its files, and whatever a test says for the rest.

Knows how to run an application of Starlette in a thread. Does not know engines or models.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvruntime.server.page import page_routes


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Run an application in a thread, at the URL that is given."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(20)


def state_of(num_blocks: int = 24, **changes: Any) -> dict[str, Any]:
    """A snapshot with nothing in it."""
    empty = {
        "step": 0,
        "block_size": 4,
        "num_blocks": num_blocks,
        "num_free": num_blocks,
        "num_cached": 0,
        "num_held": 0,
        "num_fenced": 0,
        "num_host_blocks": 0,
        "num_free_host_blocks": 0,
        "states": "f" * num_blocks,
        "ref_counts": [0] * num_blocks,
        "requests": [],
        "counters": {},
        "events": [],
    }
    return {**empty, **changes}


def request_of(request_id: int, *tables: list[int], **changes: Any) -> dict[str, Any]:
    """A request of a snapshot with these block tables, all but the last token computed."""
    sequences = [
        {
            "index": index,
            "state": "running",
            "num_tokens": 4 * len(table),
            "num_computed": 4 * len(table) - 1,
            "block_table": table,
            "num_host_blocks": 0,
        }
        for index, table in enumerate(tables)
    ]
    made = {
        "id": request_id,
        "name": f"chatcmpl-{request_id}-0",
        "state": "running",
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_tokens": sum(4 * len(table) for table in tables),
        "max_tokens": 40,
        "priority": 0,
        "num_preemptions": 0,
        "sequences": sequences,
    }
    return {**made, **changes}


def holding(num_blocks: int, *requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A snapshot of a pool in which these requests hold what their tables say."""
    counts = [0] * num_blocks
    for request in requests:
        for sequence in request["sequences"]:
            for block in sequence["block_table"]:
                counts[block] += 1
    held = sum(count > 0 for count in counts)
    return state_of(
        num_blocks,
        requests=list(requests),
        ref_counts=counts,
        states="".join("f" if not c else "h" if c == 1 else "s" for c in counts),
        num_held=held,
        num_free=num_blocks - held,
        **changes,
    )


class CannedServer:
    """Answers the page with what a test puts into `state`, `chunks` and `refusal`."""

    def __init__(self) -> None:
        self.state = state_of()
        self.chunks: list[dict[str, Any] | str] = []
        self.refusal: Response | None = None
        self.key = ""
        self.model = "tiny"
        self.hangs = False  # after the chunks, until the client goes away
        self.bodies: list[dict[str, Any]] = []
        self.num_left = 0  # clients that went away before the end
        self.is_live = True
        self.url = ""
        self.app = Starlette(
            routes=[
                *page_routes(),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/debug/blocks/stream", self._stream),
            ]
        )

    def _is_refused(self, request: Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _models(self, request: Request) -> Response:
        if self._is_refused(request):
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _stream(self, request: Request) -> Response:
        if self._is_refused(request):
            return JSONResponse({"error": {"message": "no key"}}, 401)
        if not self.is_live:
            return Response(status_code=503)

        async def states() -> AsyncIterator[str]:
            sent = ""
            while self.is_live:
                if (text := json.dumps(self.state)) != sent:
                    sent = text
                    yield f"data: {text}\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(states(), media_type="text/event-stream")

    async def _complete(self, request: Request) -> Response:
        if self._is_refused(request):
            return JSONResponse({"error": {"message": "no key"}}, 401)
        self.bodies.append(await request.json())
        if self.refusal is not None:
            return self.refusal

        async def chunks() -> AsyncIterator[str]:
            is_done = False
            try:
                for chunk in self.chunks:
                    text = chunk if isinstance(chunk, str) else json.dumps(chunk)
                    yield f"data: {text}\n\n"
                while self.hangs:  # noqa: ASYNC110 -- a test says so in another thread
                    await asyncio.sleep(0.02)
                is_done = True
            finally:
                self.num_left += not is_done

        return StreamingResponse(chunks(), media_type="text/event-stream")


def chunk(content: str, index: int = 0, *, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a chat completion."""
    delta = {"content": content} if content else {}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "tiny",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }
