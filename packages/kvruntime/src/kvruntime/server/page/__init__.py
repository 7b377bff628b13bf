"""The page at `/`: a chat, and beside it what every block of the cache is used for.

Plain files, read once: HTML, CSS and ES modules, which need no build step and no other host. Knows how
they are served. Does not know what is on them.
"""

import hashlib
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing but the server itself is asked for anything, and no text can become a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes() -> list[Route]:
    """The routes of the page: `/`, and `/page/{name}` for its parts."""
    parts = {
        part.name: part.read_bytes()
        for part in files(__package__).iterdir()
        if part.name.rpartition(".")[2] in _TYPES
    }

    async def index(request: Request) -> Response:
        return _answer(request, "index.html", parts["index.html"])

    async def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in parts:
            raise HTTPException(404)
        return _answer(request, name, parts[name])

    return [Route("/", index), Route("/page/{name}", part)]


def _answer(request: Request, name: str, content: bytes) -> Response:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Cache-Control": "no-cache",  # asked for each time, answered only if it has changed
        "ETag": etag,
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
