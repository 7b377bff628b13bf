"""What every block is used for now, as plain data: `/debug/blocks`, once or as a stream.

Knows how to read an engine between two steps, and when a stream has something new to say. Does not
know threads or how it is drawn, and never reads prompts or answers.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Protocol, TypedDict, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from kvblocks import BlockState
from kvruntime.engine import Engine
from kvruntime.errors import KVRuntimeError
from kvruntime.request import Request, Sequence
from kvruntime.steps import StepRecord

__all__ = ["STATES", "EngineThread", "LiveBlocks", "Snapshot", "snapshot"]

_T = TypeVar("_T")

# One letter a block, so that ten thousand of them are one short text.
STATES = {"free": "f", "held": "h", "shared": "s", "cached": "c", "fenced": "x"}


class SequenceState(TypedDict):
    """One sample: its tokens, and the physical block of each of its logical blocks.

    A sequence that is swapped out has no block table, but `num_host_blocks` blocks of the host.
    """

    index: int
    state: str
    num_tokens: int
    num_computed: int
    block_table: list[int]
    num_host_blocks: int


class RequestState(TypedDict):
    """One unfinished request; `num_cached_tokens` is None until it is first admitted.

    `name` is the id that its client was told.
    """

    id: int
    name: str
    state: str
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_tokens: int
    max_tokens: int
    priority: int
    num_preemptions: int
    sequences: list[SequenceState]


class BlockEvent(TypedDict):
    """Something that happened in a step; `request` is None for what concerns blocks alone."""

    step: int
    request: int | None
    sequence: int | None
    kind: str
    detail: str
    blocks: list[int]


class Snapshot(TypedDict):
    """An engine between two steps. `states` has one letter a block, see `STATES`."""

    step: int
    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_fenced: int
    num_host_blocks: int
    num_free_host_blocks: int
    states: str
    ref_counts: list[int]
    requests: list[RequestState]
    counters: dict[str, int]
    events: list[BlockEvent]


def snapshot(engine: Engine, *, num_events: int = 48) -> Snapshot:
    """What an engine holds now, as data that JSON can say.

    To be called on the engine's own thread, between two steps; changes nothing. O(pool + blocks in
    all tables). `events` are the newest of the step log, the oldest of them first.
    """
    manager, pool = engine.manager, engine.manager.stats()
    log = engine.scheduler.log
    requests = [_describe(engine, request) for request in _unfinished(engine)]
    ref_counts = [0] * manager.num_blocks
    for request in requests:
        for sequence in request["sequences"]:
            for block in sequence["block_table"]:
                ref_counts[block] += 1
    return Snapshot(
        step=log[-1].step if log else 0,
        block_size=manager.block_size,
        num_blocks=manager.num_blocks,
        num_free=pool.num_free_blocks,
        num_cached=pool.num_cached_blocks,
        num_held=pool.num_held_blocks,
        num_fenced=pool.num_fenced_blocks,
        num_host_blocks=pool.num_host_blocks,
        num_free_host_blocks=pool.num_free_host_blocks,
        states=_letters(manager.block_states(), ref_counts),
        ref_counts=ref_counts,
        requests=requests,
        counters=asdict(engine.stats()),
        events=_newest_events(list(log), num_events),
    )


class EngineThread(Protocol):
    """Who owns the engine: `kvruntime.async_llm.AsyncLLM`, as far as it matters here."""

    @property
    def status(self) -> str:
        """One of "loading", "ready", "draining", "stopped" and "failed"."""

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function on the engine between two steps."""


class LiveBlocks:
    """Snapshots for any number of watchers: one every `interval` seconds at most, while any watch."""

    def __init__(
        self,
        thread: EngineThread,
        *,
        interval: float = 0.1,
        keep_alive: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._interval = interval
        self._keep_alive = keep_alive
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest = b""
        self._is_idle = False
        self._taken = -float("inf")

    async def latest(self) -> bytes:
        """A snapshot as JSON, at most `interval` seconds old."""
        async with self._lock:
            if self._clock() - self._taken >= self._interval:
                found = await self._thread.call(snapshot)
                self._is_idle = not found["requests"]
                self._latest = json.dumps(found, separators=(",", ":")).encode("ascii")
                self._taken = self._clock()
            return self._latest

    async def get(self, _: HTTPRequest) -> Response:
        """`GET /debug/blocks`."""
        return Response(await self.latest(), media_type="application/json")

    async def stream(self, _: HTTPRequest) -> Response:
        """`GET /debug/blocks/stream`: server-sent events, one whenever something has changed."""
        await self.latest()  # an engine that is not there yet is an answer of its own
        return StreamingResponse(
            self._changes(),
            media_type="text/event-stream",
            # Proxies that collect answers would show the past.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _changes(self) -> AsyncIterator[bytes]:
        sent, when = b"", self._clock()
        while not self._is_over:
            try:
                found = await self.latest()
            except KVRuntimeError:
                return  # it was stopped just now
            if found != sent:
                sent, when = found, self._clock()
                yield b"data: " + found + b"\n\n"
            elif self._clock() - when >= self._keep_alive:
                when = self._clock()
                yield b": nothing has changed\n\n"
            await asyncio.sleep(self._interval)

    @property
    def _is_over(self) -> bool:
        """Whether nothing more will happen: a server that shall end waits for its open answers."""
        status = self._thread.status
        return status in {"stopped", "failed"} or (status == "draining" and self._is_idle)


def _letters(states: Iterable[BlockState], ref_counts: Iterable[int]) -> str:
    letters = {state: STATES[state.value] for state in BlockState}
    pairs = zip(states, ref_counts, strict=True)
    return "".join([STATES["shared"] if n > 1 else letters[state] for state, n in pairs])


def _unfinished(engine: Engine) -> list[Request]:
    """Requests with a sample that runs or waits, in the order of their arrival."""
    sequences = (*engine.scheduler.running, *engine.scheduler.waiting)
    requests = dict.fromkeys(sequence.request for sequence in sequences)
    return sorted(requests, key=lambda request: request.arrival)


def _describe(engine: Engine, request: Request) -> RequestState:
    running = set(engine.scheduler.running)
    sequences = [
        _describe_sequence(engine, sequence, is_running=sequence in running)
        for sequence in request.sequences
        if not sequence.is_finished
    ]
    states = {sequence["state"] for sequence in sequences}
    return RequestState(
        id=request.request_id,
        name=request.name,
        # Samples may differ; what is nearest to an answer is said of the request.
        state=next(s for s in ("running", "swapped", "preempted", "waiting") if s in states),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_tokens=sum(sequence["num_tokens"] for sequence in sequences),
        max_tokens=request.params.max_tokens,
        priority=request.priority,
        num_preemptions=request.num_preemptions,
        sequences=sequences,
    )


def _describe_sequence(engine: Engine, sequence: Sequence, *, is_running: bool) -> SequenceState:
    manager = engine.manager
    has_blocks = sequence.seq_id in manager and not sequence.is_swapped
    num_host_blocks = 0
    if sequence.is_swapped:
        num_host_blocks = -(-manager.num_computed_tokens(sequence.seq_id) // manager.block_size)
    return SequenceState(
        index=sequence.index,
        state=_state(sequence, is_running=is_running),
        num_tokens=len(sequence.token_ids),
        num_computed=sequence.num_computed_tokens,
        block_table=manager.block_table(sequence.seq_id).tolist() if has_blocks else [],
        num_host_blocks=num_host_blocks,
    )


def _state(sequence: Sequence, *, is_running: bool) -> str:
    if is_running:
        return "running"
    if sequence.is_swapped:
        return "swapped"
    return "preempted" if sequence.has_run else "waiting"


# ── what happened ────────────────────────────────────────────────────────────────────────────


def _newest_events(log: list[StepRecord], num_events: int) -> list[BlockEvent]:
    newest: list[BlockEvent] = []
    for place in range(len(log) - 1, -1, -1):
        # What was evicted before the oldest record belongs to steps that are forgotten.
        before = log[place - 1] if place else log[0]
        newest[:0] = _events_of(
            log[place], log[place].num_evicted_blocks - before.num_evicted_blocks
        )
        if len(newest) >= num_events:
            break
    return newest[-num_events:]


def _events_of(record: StepRecord, num_evicted: int) -> Iterator[BlockEvent]:
    """What a step did, in the order in which it did it: blocks are taken first."""
    if num_evicted:
        blocks = "block" if num_evicted == 1 else "blocks"
        yield _event(record, "evicted", f"{num_evicted} cached {blocks} made free")
    for source, destination, num_tokens in record.copies:
        detail = f"block {source} to block {destination}, {num_tokens} tokens"
        yield _event(record, "copied on write", detail, [source, destination])
    for event in record.events:
        request, index = event.seq_id
        yield BlockEvent(
            step=event.step,
            request=request,
            sequence=index,
            kind=event.kind,
            detail=event.detail,
            blocks=[],
        )


def _event(
    record: StepRecord, kind: str, detail: str, blocks: list[int] | None = None
) -> BlockEvent:
    return BlockEvent(
        step=record.step, request=None, sequence=None, kind=kind, detail=detail, blocks=blocks or []
    )
