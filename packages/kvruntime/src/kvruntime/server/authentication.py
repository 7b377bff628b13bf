"""Who may ask, and whose cached blocks they may find. Knows keys and tenants, no endpoints."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvruntime.server.errors import APIError, error_response
from kvruntime.server.settings import ServerSettings

__all__ = ["Authentication"]

_OPEN_PATHS = {"/health", "/ready"}  # which probes ask, and which say nothing of anybody


class Authentication:
    """Lets requests through whose key is known, and notes the tenant it belongs to.

    The time that it takes says nothing about how much of a key was right.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._tenants = {key.encode(): tenant for key, tenant in settings.api_keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or not self._tenants or scope["path"] in _OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode() if kind.lower() == "bearer" else b""
        # All are compared, so that the time does not say which it was.
        found = [known for known in self._tenants if hmac.compare_digest(known, given)]
        if not found:
            error = APIError(
                401,
                "the header Authorization: Bearer KEY must have a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        scope["kvruntime.tenant"] = self._tenants[found[0]]
        await self.app(scope, receive, send)
