"""`/openapi.json`: what this server can be asked, and what it answers, for programs.

Knows paths, statuses and the models of bodies, from which everything else is written. Does not know
how anything is answered. Rules between fields are told by the errors, since schemas of JSON cannot.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from kvruntime._version import __version__
from kvruntime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvruntime.server.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ErrorResponse,
    Model,
    ModelList,
    State,
)
from kvruntime.server.service import service_of
from kvruntime.server.settings import ServerSettings

__all__ = ["describe", "openapi"]

_REQUESTS = (CompletionRequest, ChatCompletionRequest)
_ANSWERS = (Completion, ChatCompletion, ChatChunk, ErrorResponse, Model, ModelList, State)
_STATUSES = {
    "400": "The request cannot be served; the message says what is wrong with it.",
    "401": "The key is none of this server's.",
    "404": "There is no such model.",
    "405": "The path knows other methods.",
    "408": "The body took too long to arrive.",
    "413": "The body is too long.",
    "415": "The body is not said to be JSON.",
    "421": "The server does not answer for this host.",
    "429": "As many wait as may wait: try again later.",
    "500": "Something went wrong in the server.",
    "503": "The server is loading, draining or full, or its engine failed.",
    "504": "The request took longer than any may.",
}
_EVERYWHERE = ("405", "500")


async def openapi(request: Request) -> Response:
    """Describe the server that is asked."""
    described = describe(service_of(request).settings)
    return Response(json.dumps(described), media_type="application/json")


def describe(settings: ServerSettings) -> dict[str, Any]:
    """Return the description of a server with these settings, by OpenAPI 3.1."""
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kvruntime", "version": __version__},
        "paths": _paths(settings),
        "components": {"schemas": _schemas(settings)},
    }
    if settings.api_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _schemas(settings: ServerSettings) -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Any]] = [(one, "validation") for one in _REQUESTS]
    models += [(one, "serialization") for one in _ANSWERS]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = found["$defs"]
    for model in _REQUESTS:
        names = {"type": "string", "enum": list(settings.model_names)}
        schemas[model.__name__]["properties"]["model"] = names
    return schemas


def _paths(settings: ServerSettings) -> dict[str, Any]:
    own = [
        *(["401"] if settings.api_keys else []),
        *(["421"] if settings.allowed_hosts else []),
    ]

    def operation(
        method: str,
        summary: str,
        answer: Mapping[str, Any],
        statuses: Iterable[str] = (),
        **more: Any,
    ) -> dict[str, Any]:
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
        for status in (*statuses, *own, *_EVERYWHERE):
            # Probes say the state either way; all else says what went wrong.
            is_state = status == "503" and answer == _json(State)
            content = answer if is_state else _json(ErrorResponse)
            responses[status] = {"description": _STATUSES[status], "content": content}
        return {method: {"summary": summary, "responses": dict(sorted(responses.items())), **more}}

    def generation(
        summary: str, body: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel]
    ) -> dict[str, Any]:
        content = {**_json(answer), "text/event-stream": {"schema": _event(chunk)}}
        statuses = ("400", "404", "408", "413", "415", "429", "503", "504")
        asked = {"required": True, "content": _json(body)}
        return operation("post", summary, content, statuses, requestBody=asked)

    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/v1/completions": generation("Continue texts.", CompletionRequest, Completion, Completion),
        "/v1/chat/completions": generation(
            "Answer a conversation.", ChatCompletionRequest, ChatCompletion, ChatChunk
        ),
        "/v1/models": operation("get", "List the models.", _json(ModelList), ["503"]),
        "/v1/models/{name}": operation(
            "get", "Describe a model.", _json(Model), ["404", "503"], parameters=[name]
        ),
        "/health": operation("get", "Tell if the engine lives.", _json(State), ["503"]),
        "/ready": operation("get", "Tell if requests are taken.", _json(State), ["503"]),
        "/metrics": operation("get", "Count and measure.", {"text/plain": {}}),
        "/debug/blocks": operation("get", "Show every block.", anything, ["503"]),
        "/openapi.json": operation("get", "Describe this server.", anything, ["503"]),
    }


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream, as OpenAPI 3.2 writes it."""
    said = f"JSON of a {chunk.__name__}, or of an ErrorResponse; in the last event, [DONE]"
    data = {"type": "string", "contentMediaType": "application/json", "description": said}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
