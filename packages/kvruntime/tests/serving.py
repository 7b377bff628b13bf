"""A server that tests can talk to: a tiny model behind uvicorn, on a free port of this machine."""

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
import uvicorn

from kvruntime import LLM, AsyncLLM, Observer
from kvruntime.engine import Engine
from kvruntime.server import ServerSettings, create_app
from kvruntime.server.run import HTTPProtocol

__all__ = ["LiveServer", "events", "live_server"]

MODEL = "tiny"
# httpx would read all certificates for every request, and the memory that takes does not all come back.
_TLS = ssl.create_default_context()
T = TypeVar("T")


@dataclass(frozen=True)
class LiveServer:
    """A running server."""

    url: str
    async_llm: AsyncLLM
    loop: asyncio.AbstractEventLoop

    def ask(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine between two of its steps."""
        return self.run(self.async_llm.call(function))

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
        return httpx.post(
            f"{self.url}{path}", content=content, headers=every, timeout=60, verify=_TLS
        )

    def send(self, path: str, body: Any, receive_buffer: int | None = None) -> socket.socket:
        """Send a request and read nothing yet; whoever has the connection closes it."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        host, port = self.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        return connection

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for a path."""
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60, verify=_TLS)


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


class _Log(logging.Handler):
    """Keeps the errors that one thread logs."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if record.thread == self._thread.ident:
            self.lines.append(self.format(record))


class Pace(Observer):
    """Makes each step of an engine last so long, so that tests meet requests in their midst."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002 -- the interface's
        """Wait, on the engine's thread."""
        time.sleep(self.seconds)


@contextmanager
def live_server(
    llm: LLM | Callable[[], LLM],
    settings: ServerSettings | None = None,
    *,
    step_seconds: float = 0.0,
    send_buffer: int | None = None,
    logs_errors: bool = False,
) -> Iterator[LiveServer]:
    """Serve a model while the context lasts, and see that nothing went wrong that nobody expected."""
    async_llm = AsyncLLM(llm, observers=[Pace(step_seconds)])
    app = create_app(async_llm, settings or ServerSettings(model_names=(MODEL,)))
    config = uvicorn.Config(
        app, http=HTTPProtocol, log_config=None, log_level="warning", timeout_graceful_shutdown=5
    )
    server = _Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    if send_buffer is not None:  # which the connections inherit
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server")
    log = _Log(thread)
    logging.getLogger("uvicorn.error").addHandler(log)
    thread.start()
    try:
        assert server.has_started.wait(timeout=60)
        assert server.loop is not None
        port = listener.getsockname()[1]
        yield LiveServer(f"http://127.0.0.1:{port}", async_llm, server.loop)
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
        logging.getLogger("uvicorn.error").removeHandler(log)
    assert logs_errors or not log.lines, "\n".join(log.lines)


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a finished stream, the end as a text."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
