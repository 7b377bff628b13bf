"""What is served and how it is: `/v1/models`, `/health`, `/ready`. Knows states, no requests."""

import json

from starlette.requests import Request
from starlette.responses import Response

from kvruntime.server.errors import APIError
from kvruntime.server.responses import Model, ModelList
from kvruntime.server.service import Service, service_of

__all__ = ["health", "model", "models", "ready"]


async def models(request: Request) -> Response:
    """List the names that the model has."""
    service = service_of(request)
    data = [_model(service, name) for name in service.settings.model_names]
    return _json(ModelList(object="list", data=data).model_dump_json())


async def model(request: Request) -> Response:
    """Describe one model."""
    service, name = service_of(request), request.path_params["name"]
    if name not in service.settings.model_names:
        raise APIError(404, f"the model {name!r} does not exist", code="model_not_found")
    return _json(_model(service, name).model_dump_json())


async def health(request: Request) -> Response:
    """Whether the process is worth keeping: 200 unless the engine failed or was stopped."""
    service = service_of(request)
    return _state(service, is_good=service.async_llm.status in {"loading", "ready", "draining"})


async def ready(request: Request) -> Response:
    """Whether requests are taken now."""
    service = service_of(request)
    return _state(service, is_good=service.async_llm.status == "ready")


def _model(service: Service, name: str) -> Model:
    async_llm = service.async_llm
    is_loaded = async_llm.status != "loading"
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="kvruntime",
        max_model_len=async_llm.llm.engine.max_model_len if is_loaded else None,
    )


def _state(service: Service, *, is_good: bool) -> Response:
    async_llm = service.async_llm
    said: dict[str, str] = {"status": async_llm.status}
    if async_llm.error is not None:
        said["error"] = type(async_llm.error).__name__  # the log has the rest, and no key
    headers = {} if is_good else {"Retry-After": str(service.retry_after())}
    return Response(
        json.dumps(said),
        status_code=200 if is_good else 503,
        headers=headers,
        media_type="application/json",
    )


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
