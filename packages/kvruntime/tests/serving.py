"""A server that tests can talk to: a tiny model behind uvicorn, on a free port of this machine."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
import uvicorn

from kvruntime import LLM, AsyncLLM
from kvruntime.engine import Engine
from kvruntime.server import ServerSettings, create_app

__all__ = ["LiveServer", "events", "live_server"]

MODEL = "tiny"
T = TypeVar("T")


@dataclass(frozen=True)
class LiveServer:
    """A running server."""

    url: str
    async_llm: AsyncLLM
    loop: asyncio.AbstractEventLoop

    def ask(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine between two of its steps."""
        future = asyncio.run_coroutine_threadsafe(self.async_llm.call(function), self.loop)
        return future.result(timeout=60)

    def wait_until(self, holds: Callable[[Engine], bool]) -> None:
        """Wait for the engine; a test that waits forever has failed."""
        while not self.ask(holds):
            pass

    def client(self, **settings: Any) -> openai.OpenAI:
        """Return a client of the official package."""
        chosen = {"api_key": "none", "max_retries": 0, "timeout": 60, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **chosen)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send one body, JSON or bytes that need not be."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        every = {"Content-Type": "application/json", **headers}
        return httpx.post(f"{self.url}{path}", content=content, headers=every, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for a path."""
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60)


class _Server(uvicorn.Server):
    """A server of uvicorn that says when it has started, and where."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Start, then tell."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.has_started.set()


@contextmanager
def live_server(
    llm: LLM | Callable[[], LLM], settings: ServerSettings | None = None
) -> Iterator[LiveServer]:
    """Serve a model while the context lasts."""
    async_llm = AsyncLLM(llm)
    app = create_app(async_llm, settings or ServerSettings(model_names=(MODEL,)))
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    server = _Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        assert server.has_started.wait(timeout=60)
        assert server.loop is not None
        port = server.servers[0].sockets[0].getsockname()[1]
        yield LiveServer(f"http://127.0.0.1:{port}", async_llm, server.loop)
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a finished stream, the end as a text."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
