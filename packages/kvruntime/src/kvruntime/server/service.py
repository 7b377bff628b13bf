"""What the endpoints share: the engine, the settings, and the way from a body to answers.

Knows bodies, names, tenants and limits. Does not know what an endpoint's answers look like.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from kvruntime._version import __version__
from kvruntime.async_llm import AsyncLLM, Params
from kvruntime.sampling_params import SamplingParams
from kvruntime.server.answers import Answers
from kvruntime.server.errors import APIError
from kvruntime.server.overload import Throughput
from kvruntime.server.protocol import GenerationRequest
from kvruntime.server.settings import ServerSettings

__all__ = ["FINGERPRINT", "Service", "service_of"]

FINGERPRINT = f"kvruntime-{__version__}"

# Nobody knows; a model loads in seconds, and a server that drains or failed is started again.
_SECONDS_UNTIL_READY = {"loading": 2, "draining": 10}

# A body of so many is checked in a few milliseconds, and a longer one beside the event loop.
_NUM_BYTES_AT_ONCE = 64 * 2**10

# Some hundreds of megabytes. One answer that fills a context of 131,072 tokens, with 20 a token, fits.
MAX_NUM_LOGPROBS_IN_ALL = 2**22

BodyType = TypeVar("BodyType", bound=BaseModel)
T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """One engine that is served, and how."""

    async_llm: AsyncLLM
    settings: ServerSettings
    throughput: Throughput = field(default_factory=Throughput)
    created: int = field(default_factory=lambda: int(time.time()))
    num_arriving: int = 0  # answers that are admitted, and not submitted yet

    async def read(self, request: Request, kind: type[BodyType]) -> BodyType:
        """Read a body and check it. `APIError` or pydantic's error for what is no such body."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # Not only for order: a page of another site can send all else without being asked.
            raise APIError(
                415,
                "the body must be JSON with the header Content-Type: application/json, "
                f"got {content_type or 'none'}",
                code="unsupported_media_type",
            )
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                body = await self._read_bytes(request)
        except TimeoutError:
            raise APIError(
                408,
                f"the body must arrive within {self.settings.body_seconds:g} seconds",
                code="slow_body",
            ) from None
        if len(body) <= _NUM_BYTES_AT_ONCE:
            return kind.model_validate_json(body)
        return await self.in_thread(lambda: kind.model_validate_json(body))

    async def _read_bytes(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.settings.max_body_bytes:
                raise APIError(
                    413,
                    f"the body must have at most {self.settings.max_body_bytes} bytes",
                    code="body_too_large",
                )
        return bytes(body)

    @contextmanager
    def admit(self, body: GenerationRequest, num_prompts: int) -> Iterator[None]:
        """Refuse what need not be looked at any further, before any work is done for it.

        What is admitted has its room in the queue until it is submitted, where the context ends.
        `APIError` for another model's name, `EngineUnavailable` and `EngineBusy` as the engine's.
        """
        if body.model not in self.settings.model_names:
            raise APIError(
                404,
                f"the model {body.model!r} does not exist; there is "
                f"{' and '.join(self.settings.model_names)}",
                param="model",
                code="model_not_found",
            )
        self.async_llm.check_ready()
        config = self.async_llm.llm.engine.config
        if body.priority and config.policy != "priority":
            raise APIError(
                400,
                f"priority must be 0 where the server's policy is fcfs, got {body.priority}",
                param="priority",
                code="invalid_request",
            )
        num_answers, limit = num_prompts * body.num_sequences, config.max_num_waiting
        if limit is not None and num_answers > limit:
            raise APIError(
                400,
                f"a request may have at most {limit} answers, as many as may wait, "
                f"got {num_prompts} * {body.num_sequences}",
                param="n" if num_prompts == 1 else "prompt",
                code="invalid_request",
            )
        self.async_llm.check_room(num_answers, self.num_arriving)
        self.num_arriving += num_answers
        try:
            yield
        finally:
            self.num_arriving -= num_answers

    async def open(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Params],
        *,
        request_id: str,
    ) -> Answers:
        """Submit the prompts of a body. `APIError` for what is too much whatever else waits."""
        self._check_num_tokens(prompts)
        _check_num_logprobs(prompts, params)
        answers = await Answers.open(
            self.async_llm,
            prompts,
            params,
            request_id=request_id,
            priority=body.priority,
            cache_salt=_salt(request.scope.get("kvruntime.tenant"), body.cache_salt),
        )
        request.scope["kvruntime.is_submitted"] = True
        return answers

    def _check_num_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that have no room beside one another; one alone always has."""
        limit = self.async_llm.llm.engine.config.max_num_waiting_tokens
        num_tokens = sum(map(len, prompts))
        if limit is not None and len(prompts) > 1 and num_tokens > limit:
            raise APIError(
                400,
                f"the prompts of a request may have at most {limit} tokens together, as many as "
                f"may wait, got {num_tokens} in {len(prompts)} prompts",
                param="prompt",
                code="invalid_request",
            )

    async def prepare(self, params: Params) -> None:
        """Compile what answers must be beside the engine, so that nobody else waits for it."""
        if params.structured_outputs is not None:
            await self.in_thread(lambda: self.async_llm.llm.engine.prepare(params))

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Do what takes long for a long prompt beside the event loop."""
        return await asyncio.to_thread(function)

    def retry_after(self) -> int:
        """Return the seconds after which somebody who is refused now may try again."""
        status = self.async_llm.status
        if status != "ready":
            return _SECONDS_UNTIL_READY.get(status, 30)
        return self.throughput.seconds_for(self.async_llm.num_waiting + self.num_arriving)

    def num_tokens_left(self, prompt: Sequence[int]) -> int:
        """How many tokens can follow a prompt; at least one, and the engine says if there is none."""
        return max(1, self.async_llm.llm.engine.max_model_len - len(prompt))


def service_of(request: Request) -> Service:
    """Return the service that an application was made for."""
    service: Service = request.app.state.service
    return service


def _check_num_logprobs(prompts: Sequence[Sequence[int]], params: Sequence[Params]) -> None:
    """Refuse a request whose log-probabilities would be a burden to hold."""
    num_logprobs = 0
    for prompt, chosen in zip(prompts, params, strict=True):
        if not isinstance(chosen, SamplingParams):
            continue
        if chosen.logprobs is not None:
            num_logprobs += chosen.num_sequences * chosen.max_tokens * (chosen.logprobs + 1)
        if chosen.prompt_logprobs is not None:
            num_logprobs += len(prompt) * (chosen.prompt_logprobs + 1)
    if num_logprobs > MAX_NUM_LOGPROBS_IN_ALL:
        raise APIError(
            400,
            f"a request may have at most {MAX_NUM_LOGPROBS_IN_ALL} log-probabilities (answers * "
            f"tokens * (top + 1)), got {num_logprobs}",
            param="logprobs",
            code="invalid_request",
        )


def _salt(tenant: str | None, cache_salt: str | None) -> str | None:
    """The namespace of the prefix cache: no choice of one tenant's can name that of another."""
    if tenant is None and cache_salt is None:
        return None
    return hashlib.sha256(json.dumps([tenant, cache_salt]).encode()).hexdigest()
