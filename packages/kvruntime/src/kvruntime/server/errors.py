"""Errors as the OpenAI API says them: a status, and one JSON object.

Knows which error of ours has which status. Does not know where they are raised. Nothing of a prompt
is logged: an error that nobody expected leaves its traceback, and no request, on the log.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvruntime.errors import (
    EngineBusy,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    MissingDependency,
)
from kvruntime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvruntime.server.sse import event

__all__ = ["APIError", "as_api_error", "error_response", "exception_handlers", "stream_error"]

logger = logging.getLogger(__name__)

# What clients that read the type, and not the status, expect.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


# What pydantic calls a choice where a field may have several types.
_TYPE_NAMES = {"NamedTool", "bool", "float", "int", "list", "str"}


class APIError(Exception):
    """An answer that is an error.

    `param` names the field that is wrong, `code` the kind of error for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def as_json(self) -> dict[str, Any]:
        """The body of the answer, and the data of a stream's last event."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


# What has an answer of its own.
_EXPECTED = (
    APIError,
    InvalidRequest,
    MissingDependency,
    ValidationError,
    EngineBusy,
    EngineUnavailable,
    EngineFailed,
    TimeoutError,
    HTTPException,
)


def as_api_error(error: Exception, seconds: int = 1) -> APIError:  # noqa: PLR0911 -- a table
    """Return what a client is told of an error; `seconds` is when it may try again."""
    wait = {"Retry-After": str(seconds)}
    match error:
        case APIError():
            return error
        case InvalidRequest():
            return APIError(400, str(error), param=_field_named(str(error)), code="invalid_request")
        case MissingDependency():  # of what was asked for, and of nothing else
            return APIError(400, str(error), code="unsupported_field")
        case ValidationError():
            return _invalid(error)
        case EngineBusy():
            return APIError(429, str(error), code="queue_full", headers=wait)
        case EngineUnavailable():
            return APIError(503, str(error), code="unavailable", headers=wait)
        case EngineFailed():
            return APIError(500, str(error), code="engine_failed")
        case TimeoutError():
            # The same work again would take as long again.
            return APIError(
                504,
                "the request took longer than this server lets any run",
                code="timeout",
                headers={"X-Should-Retry": "false"},
            )
        case HTTPException():
            return APIError(error.status_code, error.detail, headers=dict(error.headers or {}))
        case _:
            return APIError(500, "something went wrong in the server; its log says what")


def error_response(error: APIError) -> Response:
    """Return an error as an answer of HTTP."""
    return Response(
        json.dumps(error.as_json()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def stream_error(error: Exception) -> bytes:
    """Return the last event of a stream that fails."""
    if not isinstance(error, _EXPECTED):
        logger.error("a stream failed", exc_info=error)
    return event(json.dumps(as_api_error(error).as_json()))


def exception_handlers() -> dict[Any, Callable[[Request, Exception], Any]]:
    """Return Starlette's handlers: every error leaves in the API's shape."""
    return {
        **dict.fromkeys(_EXPECTED, _answer),
        ClientDisconnect: _nobody_listens,
        Exception: _unexpected,
    }


async def _answer(request: Request, error: Exception) -> Response:
    found = as_api_error(error, request.app.state.service.retry_after())
    if request.method == "POST" and not request.scope.get("kvruntime.is_submitted"):
        request.app.state.metrics.rejected(found.code or str(found.status))
    return error_response(found)


async def _nobody_listens(request: Request, error: Exception) -> Response:  # noqa: ARG001 -- Starlette's
    return Response(status_code=499)  # which only the log sees


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises it again, and the server that it runs in writes the traceback.
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return error_response(as_api_error(error))


def _invalid(error: ValidationError) -> APIError:
    """Say the first thing that is wrong with a body, and what all is where there are choices."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return APIError(
            400, f"the field {path} is not supported", param=path, code="unsupported_field"
        )
    if first["type"] == "missing":
        return APIError(400, f"the field {path} is missing", param=path, code="missing_field")
    if first["type"] == "value_error" and not first["loc"]:  # fields that do not go together
        message = first["msg"].removeprefix("Value error, ")
        return APIError(400, message, param=_field_named(message), code="invalid_request")
    same = [
        one["msg"].removeprefix("Value error, ")
        for one in found
        if one["loc"][:1] == first["loc"][:1]
    ]
    said = ", or: ".join(dict.fromkeys(same))
    param = path if first["loc"] else None
    return APIError(400, f"{path}: {said}", param=param, code="invalid_field")


def _field_named(message: str) -> str | None:
    """The field that a message begins with, as those about a field do."""
    name = message.partition(" ")[0]
    is_field = name in CompletionRequest.model_fields or name in ChatCompletionRequest.model_fields
    return name if is_field else None


def _path(location: tuple[int | str, ...]) -> str:
    """A field's place in the body, as `messages[0].content`; choices of types are left out."""
    path = ""
    if location[:1] == ("response_format",):
        location = (location[0], *location[2:])  # the second says which of the formats it is
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path or "body"
