"""Who may ask, and whose cached blocks they may find. Knows keys and tenants, no endpoints."""

import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvruntime.server.errors import APIError, error_response
from kvruntime.server.metrics import ServerMetrics
from kvruntime.server.settings import ServerSettings

__all__ = ["Authentication"]

# What probes ask, and the page that asks for a key; they say nothing of anybody.
_OPEN_PATHS = {"/health", "/ready", "/"}


class Authentication:
    """Lets requests through whose key is known, and notes the tenant it belongs to.

    Where names of hosts are given, others are refused: a page of another site that has its name
    resolved to this machine does not get in.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.app = app
        self._metrics = metrics
        self._tenants = {key.encode(): tenant for key, tenant in settings.api_keys.items()}
        self._hosts = frozenset(map(_host_name, settings.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if error := self._wrong_host(headers) or self._wrong_key(scope, headers):
            self._metrics.rejected(error.code or str(error.status))
            await error_response(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _wrong_host(self, headers: Headers) -> APIError | None:
        host = _host_name(headers.get("host", ""))
        if not self._hosts or host in self._hosts:
            return None
        return APIError(421, f"this server does not answer for {host!r}", code="wrong_host")

    def _wrong_key(self, scope: Scope, headers: Headers) -> APIError | None:
        """Note whose key it is, or say that it is nobody's."""
        path = scope["path"]
        if not self._tenants or path in _OPEN_PATHS or path.startswith("/page/"):
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode() if kind.lower() == "bearer" else b""
        # All are compared, each in a time that does not say how much of it was right.
        found = [known for known in self._tenants if hmac.compare_digest(known, given)]
        if not found:
            return APIError(
                401,
                "the header Authorization: Bearer KEY must have a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["kvruntime.tenant"] = self._tenants[found[0]]
        return None


def _host_name(given: str) -> str:
    """A name as it is compared: in lower case, without a port, an address of IPv6 in brackets."""
    if given.count(":") > 1 and not given.startswith("["):
        return f"[{given}]".lower()
    return re.sub(r":\d*$", "", given).lower()
