"""An OpenAI-compatible server: `create_app` makes it of an `AsyncLLM`.

Knows which path is answered by what. Needs the extra `serve`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from kvruntime.async_llm import AsyncLLM
from kvruntime.server.authentication import Authentication
from kvruntime.server.chat import chat_completions
from kvruntime.server.completions import completions
from kvruntime.server.crowd import BoundedCrowd
from kvruntime.server.errors import exception_handlers
from kvruntime.server.live import LiveBlocks
from kvruntime.server.metrics import ServerMetrics, dashboard
from kvruntime.server.openapi import openapi
from kvruntime.server.page import page_routes
from kvruntime.server.service import Service
from kvruntime.server.settings import ServerSettings
from kvruntime.server.status import health, model, models, ready

__all__ = ["ServerSettings", "Service", "create_app", "routes"]

routes: list[BaseRoute] = [
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/health", health),
    Route("/ready", ready),
    Route("/openapi.json", openapi),
]


def create_app(async_llm: AsyncLLM, settings: ServerSettings | None = None) -> Starlette:
    """Return the application that serves a model; the model is stopped when it shuts down."""
    settings = settings or ServerSettings()
    service = Service(async_llm, settings)
    metrics, live = ServerMetrics(async_llm), LiveBlocks(async_llm)
    async_llm.observers += [service.throughput, metrics]
    what_is_seen = [
        *page_routes(),
        Route("/metrics", metrics.get),
        Route("/grafana.json", dashboard),
        Route("/debug/blocks", live.get),
        Route("/debug/blocks/stream", live.stream),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await async_llm.stop()

    app = Starlette(
        routes=[*routes, *what_is_seen],
        middleware=[
            Middleware(BoundedCrowd, service=service, metrics=metrics),
            Middleware(Authentication, settings=settings, metrics=metrics),
        ],
        exception_handlers=exception_handlers(),
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.metrics = metrics
    return app
