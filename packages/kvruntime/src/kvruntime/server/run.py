"""A process that serves: a socket, uvicorn, and signals that end it in good order.

Knows processes and what a person reads while one starts and ends. Does not know requests.
"""

import asyncio
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import typer
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvruntime._version import __version__
from kvruntime.async_llm import AsyncLLM
from kvruntime.llm import LLM
from kvruntime.server import create_app
from kvruntime.server.settings import ServerSettings

__all__ = ["HTTPProtocol", "run"]

_CLOSING_SECONDS = 5  # for answers that are complete to reach their readers
_MAX_NUM_CONNECTIONS = 10_000  # far beyond the requests that may be open
_NUM_OTHER_FILES = 256  # of the model, the log, and connections that are only refused
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def run(
    load: Callable[[], LLM],
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    access_log: bool,
) -> bool:
    """Load and serve a model until a signal comes; whether every request was answered.

    The first signal drains: no new requests are taken, and those there are are finished, for at
    most `drain_seconds`. The second aborts them. What the model cannot be loaded for is raised,
    and `OSError` where the port cannot be had.
    """
    _raise_descriptor_limit(settings.max_num_open)
    listener = _listen(host, port)
    _say(f"kvruntime {__version__} loads {settings.model_names[0]}")
    _say(f"listening on {_url(listener)}")
    if not settings.api_keys:
        if _is_loopback(listener):
            settings = replace(
                settings, allowed_hosts=(host, *_LOOPBACK_NAMES, *settings.allowed_hosts)
            )
        else:
            _say("anybody who reaches this address may use it: no --api-key was given")
    has_answered_all, is_loading = asyncio.run(
        _serve(load, settings, listener, drain_seconds, access_log)
    )
    if is_loading:
        # Its thread may be in the midst of native code, which must not find the interpreter gone.
        os._exit(0 if has_answered_all else 1)
    return has_answered_all


def _raise_descriptor_limit(num_open: int) -> None:
    """Let the process have as many files as it may have requests, as far as the system allows."""
    try:
        import resource  # noqa: PLC0415 -- not everywhere
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_open + _NUM_OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    load: Callable[[], LLM],
    settings: ServerSettings,
    listener: socket.socket,
    drain_seconds: float,
    access_log: bool,  # noqa: FBT001 -- handed on
) -> tuple[bool, bool]:
    """Whether every request was answered, and whether the model is still loading."""
    async_llm = AsyncLLM(load)
    config = uvicorn.Config(
        create_app(async_llm, settings),
        http=HTTPProtocol,
        log_config=_log_config(),
        access_log=access_log,
        limit_concurrency=_MAX_NUM_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        server_header=False,
    )
    server = _Server(config, async_llm, drain_seconds)
    telling = asyncio.create_task(_tell_when_loaded(server, async_llm))
    await server.serve(sockets=[listener])
    is_loading = not telling.done()  # nobody waits for a model that is
    if is_loading:
        telling.cancel()
    else:
        await telling
    return server.has_answered_all, is_loading


async def _tell_when_loaded(server: "_Server", async_llm: AsyncLLM) -> None:
    started = time.monotonic()
    await async_llm.loaded()
    if async_llm.error is not None:
        server.should_exit = True
        raise async_llm.error
    if async_llm.status != "ready":
        return
    engine = async_llm.llm.engine
    _say(
        f"ready after {time.monotonic() - started:.1f} s: {engine.manager.num_blocks} blocks of "
        f"{engine.manager.block_size} tokens, {engine.max_model_len} tokens a request at most"
    )


class HTTPProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, where the application may drop a connection that nobody reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        app = self.app

        async def droppable(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "kvruntime.drop_connection": transport.abort}, receive, send)

        self.app = droppable


class _Server(uvicorn.Server):
    """A server of uvicorn that goes on answering while it drains."""

    def __init__(self, config: uvicorn.Config, async_llm: AsyncLLM, drain_seconds: float) -> None:
        super().__init__(config)
        self.has_answered_all = True
        self._async_llm = async_llm
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._ending: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- uvicorn's
        """Take a signal, between two lines of any code."""
        self._loop.call_soon_threadsafe(self._take_signal, signal.Signals(sig).name)

    def _take_signal(self, name: str) -> None:
        if not self._ending:
            _say(f"{name}: what runs is finished first; once more aborts it")
            self._ending.append(asyncio.create_task(self._drain()))
        elif not self.should_exit:
            _say(f"{name}: what runs is aborted")
            self._ending.append(asyncio.create_task(self._abort()))

    async def _drain(self) -> None:
        if not await self._async_llm.drain(self._drain_seconds):
            await self._abort()
        self.should_exit = True

    async def _abort(self) -> None:
        self.has_answered_all = False
        await self._async_llm.stop()
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot listen on {host}, port {port}: {error.strerror}"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _log_config() -> dict[str, object]:
    """Everything to standard error; the paths that were asked for, and never a body."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "loggers": {
            "uvicorn.error": {"handlers": ["stderr"], "level": "WARNING"},
            "uvicorn.access": {"handlers": ["stderr"], "level": "INFO"},
            "kvruntime": {"handlers": ["stderr"], "level": "INFO"},
        },
    }


def _say(line: str) -> None:
    typer.echo(line, err=True)
