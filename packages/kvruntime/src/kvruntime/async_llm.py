"""An engine in a thread of its own, and requests that come and go while it runs.

The thread alone touches the engine. Everything else hands it functions to run between two steps,
and is told what became of them on the event loop.

Knows threads and event loops. Does not know HTTP, tenants or what a client was promised.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Literal, TypeAlias, TypeVar, TypeVarTuple

import torch

from kvruntime.answer_stream import AnswerStream
from kvruntime.engine import Engine
from kvruntime.errors import EngineBusy, EngineFailed, EngineUnavailable, InvalidRequest
from kvruntime.guidance import Constraint
from kvruntime.llm import LLM
from kvruntime.observer import Observer
from kvruntime.open_request import OpenRequest
from kvruntime.request import Request
from kvruntime.sampling_params import BeamSearchParams, SamplingParams

__all__ = ["AsyncLLM", "Status"]

Status = Literal["loading", "ready", "draining", "stopped", "failed"]
Params: TypeAlias = SamplingParams | BeamSearchParams
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_TELLING_SECONDS = 1.0

_logger = logging.getLogger(__name__)


class AsyncLLM:
    """An `LLM` whose engine runs in a thread of its own, for many readers at a time.

    Args:
        llm: what to serve, or a function that loads it, which the thread calls; until it returns
            the status is "loading". Nobody else may use the engine from now on.
        observers: told what happens; more may be appended while nothing runs.
    """

    def __init__(self, llm: LLM | Callable[[], LLM], *, observers: Sequence[Observer] = ()) -> None:
        self.observers = list(observers)
        self._source = llm
        self._llm = llm if isinstance(llm, LLM) else None
        self._status: Status = "loading" if self._llm is None else "ready"
        self._error: BaseException | None = None
        self._is_stopped = False
        self._num_threads = torch.get_num_threads()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._request_ids = count()
        self._loaded: Future[None] = Future()
        # The rest belongs to the thread.
        self._open: dict[AnswerStream, OpenRequest] = {}
        self._drained: list[Future[None]] = []  # who waits until nothing is open
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kvruntime-engine", daemon=True)
        self._thread.start()

    # ── for the event loop ───────────────────────────────────────────────────────────────────

    @property
    def status(self) -> Status:
        """Whether requests are taken ("ready"), or why not."""
        if self._status in {"loading", "ready", "draining"} and not self._thread.is_alive():
            return "failed"
        return self._status

    @property
    def error(self) -> BaseException | None:
        """What the engine failed with, where the status is "failed"."""
        return self._error

    @property
    def llm(self) -> LLM:
        """The model; its tokenizer may be used by any thread, its engine only through `call`."""
        if self._llm is None:
            raise EngineUnavailable(f"the model is not there: the engine is {self._status}")
        return self._llm

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: Params,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AnswerStream:
        """Queue a request; returns when the engine has taken it.

        `InvalidRequest` for what can never be served, `EngineBusy` where as many wait as may wait,
        `EngineUnavailable` unless the status is "ready".
        """
        self.check_ready()
        token_ids = self.llm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        constraint = None
        if params.structured_outputs is not None:  # beside the engine, so that no step waits
            constraint = await asyncio.to_thread(self._prepare, params)
        seed = params.seed if isinstance(params, SamplingParams) else 0
        request = Request(
            next(self._request_ids),
            "",
            token_ids,
            params,
            secrets.randbits(64) if seed is None else seed,
            priority,
            cache_salt,
            constraint=constraint,
            name=request_id,
        )
        stream = AnswerStream(request_id, len(token_ids), self._abort)
        opened = OpenRequest(request, stream, self.llm.tokenizer, time.monotonic())
        try:
            await self.call(lambda engine: self._add(engine, opened))
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    def _prepare(self, params: Params) -> Constraint | None:
        engine = self.llm.engine
        try:
            return engine.prepare(params)
        except InvalidRequest:
            self._inbox.put(engine.count_rejection)
            raise

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine on its thread, between two steps, and return its result.

        What the function raises is raised here, and does the engine no harm. An engine that failed
        can still be asked.
        """
        engine = self.llm.engine
        if self._is_stopped:
            raise EngineUnavailable("the engine is stopped")
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine's thread has ended")
        future: Future[T] = Future()
        self._inbox.put(lambda: _carry_out(future, function, engine))
        return await asyncio.wrap_future(future)

    def check_ready(self) -> None:
        """Refuse unless requests are taken. `EngineUnavailable`."""
        status = self.status
        if status == "failed":
            raise EngineUnavailable(f"the engine failed: {self._error!r}")
        if status != "ready":
            raise EngineUnavailable(f"the engine is {status}")

    @property
    def num_waiting(self) -> int:
        """The answers that wait, as far as can be told while the engine works."""
        return 0 if self._llm is None else self._llm.engine.scheduler.num_waiting_sequences

    def check_room(self, num_answers: int, num_arriving: int = 0) -> None:
        """Refuse what there is surely no room for, before it costs anything. `EngineBusy`.

        `num_arriving` others count as if they waited. `submit` decides; this is as far as can be
        told while the engine works.
        """
        engine = self.llm.engine
        try:
            engine.check_room(num_answers, 0, num_arriving)
        except EngineBusy:
            self._inbox.put(engine.count_rejection)
            raise

    async def loaded(self) -> None:
        """Wait until the status is not "loading" any more."""
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait for those there are; whether all ended in time."""
        if self._status in {"loading", "ready"}:
            self._status = "draining"
        if self._llm is None or self._is_stopped:
            return True  # there are none
        drained: Future[None] = Future()
        self._inbox.put(lambda: self._tell_drained(drained))
        if seconds is not None:  # to be told takes as long as a step
            seconds = max(seconds, _TELLING_SECONDS)
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Abort what runs and end the thread. A model that is still loading is not waited for."""
        if self._status != "failed":
            self._status = "stopped"
        self._is_stopped = True
        self._inbox.put(self._end)
        if self._llm is not None:
            await asyncio.to_thread(self._thread.join)

    # ── for the engine's thread ──────────────────────────────────────────────────────────────

    def _run(self) -> None:
        # A setting of each thread, whatever its name says.
        torch.set_num_threads(self._num_threads)
        try:
            engine = self._start()
        except BaseException as error:  # noqa: BLE001 -- `status` and `error` say it
            self._fail(error)
            return
        finally:
            self._loaded.set_result(None)
        while not self._has_ended:
            try:
                self._take_calls(may_wait=not self._can_step(engine))
                if self._can_step(engine):
                    self._step(engine)
            # A panic in a library that is written in Rust is no `Exception`.
            except BaseException as error:
                _logger.exception("the engine failed")
                self._fail(error)

    def _can_step(self, engine: Engine) -> bool:
        return engine.has_work and self._status != "failed" and not self._has_ended

    def _start(self) -> Engine:
        self._llm = self._source if isinstance(self._source, LLM) else self._source()
        if self._status == "loading":
            self._status = "ready"
        return self._llm.engine

    def _take_calls(self, *, may_wait: bool) -> None:
        """Run what was handed in, in order."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(block=may_wait)()
            while not self._has_ended:
                self._inbox.get_nowait()()

    def _step(self, engine: Engine) -> None:
        started = time.monotonic()
        engine.step()
        now = time.monotonic()
        for opened in list(self._open.values()):
            self._emit(engine, opened, started, now)
        for observer in self.observers:
            observer.stepped(engine, now - started)

    def _emit(self, engine: Engine, opened: OpenRequest, started: float, now: float) -> None:
        """Deliver what a step added to a request."""
        request, stream = opened.request, opened.stream
        if request.num_cached_tokens is None:
            return  # it waits
        opened.observe(self.observers, started, now)
        deltas = opened.deltas()
        if not deltas and not request.is_finished:
            return
        if not _call_on(stream.loop, opened.deliver, deltas, request.is_finished):
            engine.abort(request)
            self._close(opened, "abort")
        elif request.is_finished:
            self._close(opened, opened.end_reason)

    def _add(self, engine: Engine, opened: OpenRequest) -> None:
        self.check_ready()
        if not opened.stream.is_over:
            engine.add(opened.request)
            self._open[opened.stream] = opened

    def _abort(self, stream: AnswerStream) -> None:
        """Drop a stream's request before the next step. For the event loop."""

        def abort() -> None:
            if opened := self._open.get(stream):
                self.llm.engine.abort(opened.request)
                self._close(opened, "abort")

        self._inbox.put(abort)

    def _close(self, opened: OpenRequest, reason: str) -> None:
        self._forget(opened)
        for observer in self.observers:
            _tell_ended(observer, opened, reason)

    def _forget(self, opened: OpenRequest) -> None:
        del self._open[opened.stream]
        self._tell_drained()

    def _tell_drained(self, *waiting: Future[None]) -> None:
        """Tell who waits for it, now or later, that nothing is open."""
        self._drained += waiting
        if not self._open:
            for future in self._drained:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._drained.clear()

    def _end(self) -> None:
        self._has_ended = True
        self._drop_all(EngineUnavailable("the engine was stopped"), "abort")

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._status = "failed"
        self._drop_all(EngineFailed(f"the engine failed: {error!r}"), "error")

    def _drop_all(self, error: Exception, reason: str) -> None:
        """End all requests, whatever else fails meanwhile."""
        for opened in list(self._open.values()):
            with contextlib.suppress(BaseException):  # what failed may be what frees
                self.llm.engine.abort(opened.request)
            _call_on(opened.stream.loop, opened.stream.fail, error)
            self._forget(opened)
            for observer in self.observers:
                try:
                    _tell_ended(observer, opened, reason)
                except BaseException:
                    _logger.exception("an observer failed as a request ended")


def _tell_ended(observer: Observer, opened: OpenRequest, reason: str) -> None:
    seconds = time.monotonic() - opened.submitted
    observer.ended(seconds, reason, opened.stream.num_prompt_tokens, opened.num_tokens)


def _call_on(
    loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *arguments: *Ts
) -> bool:
    """Let an event loop call a function soon; whether the loop is still there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # it is closed, and so is whoever read there
        return False
    return True


def _carry_out(future: Future[T], function: Callable[[Engine], T], engine: Engine) -> None:
    """Run what was asked for, unless who asked has left."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(engine))
    except BaseException as error:  # noqa: BLE001 -- it belongs to who asked
        future.set_exception(error)
