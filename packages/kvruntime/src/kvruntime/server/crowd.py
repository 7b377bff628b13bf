"""How many requests may be open at a time. Knows paths of probes, and nothing of what is asked."""

from starlette.types import ASGIApp, Receive, Scope, Send

from kvruntime.server.errors import APIError, error_response
from kvruntime.server.metrics import ServerMetrics
from kvruntime.server.service import Service

__all__ = ["BoundedCrowd"]

# What must be answered of a server that is full.
_EXEMPT_PATHS = {"/health", "/ready", "/metrics"}


class BoundedCrowd:
    """Lets requests through while fewer than `max_num_open` are open, and refuses the others."""

    def __init__(self, app: ASGIApp, service: Service, metrics: ServerMetrics) -> None:
        self.app = app
        self._service = service
        self._metrics = metrics
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in _EXEMPT_PATHS:
            await self.app(scope, receive, send)
            return
        limit = self._service.settings.max_num_open
        if self._num_open >= limit:
            error = APIError(
                503,
                f"at most {limit} requests may be open, and as many are",
                code="too_many_requests",
                headers={"Retry-After": str(self._service.retry_after())},
            )
            self._metrics.rejected("too_many_requests")
            await error_response(error)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_open -= 1
