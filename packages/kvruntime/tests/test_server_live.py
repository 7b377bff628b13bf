"""`/debug/blocks`: what a snapshot says of an engine, and when the stream speaks."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from kvruntime import EngineConfig, SamplingParams
from kvruntime.engine import Engine
from kvruntime.errors import EngineUnavailable
from kvruntime.request import FinishReason, Request
from kvruntime.server.live import STATES, LiveBlocks, Snapshot, snapshot

from .simulated_model import simulated_engine

T = TypeVar("T")


def engine_of(num_blocks: int = 16, **config: Any) -> Engine:
    return simulated_engine(EngineConfig(num_blocks=num_blocks, block_size=4, **config))[0]


def add(engine: Engine, request_id: int, num_tokens: int, n: int = 1, **options: Any) -> Request:
    first = options.pop("first", request_id)
    prompt = [(first * 7 + i) % 29 + 3 for i in range(num_tokens)]
    params = SamplingParams(n=n, max_tokens=40, ignore_eos=True, temperature=1.0)
    request = Request(request_id, "", prompt, params, seed=request_id, **options)
    engine.add(request)
    return request


def holders(found: Snapshot) -> Counter[int]:
    """How many tables hold each block, from the tables alone."""
    tables = [s["block_table"] for r in found["requests"] for s in r["sequences"]]
    return Counter(block for table in tables for block in table)


def test_every_block_has_the_state_and_the_count_that_tables_give_it() -> None:
    engine = engine_of(prefix_caching=True)
    add(engine, 0, 9, n=3)
    done = add(engine, 1, 8)
    for _ in range(3):
        engine.step()
    engine.abort(done)
    found = snapshot(engine)
    counted = holders(found)
    assert found["ref_counts"] == [counted[block] for block in range(16)]
    for block, letter in enumerate(found["states"]):
        expected = {0: "cf", 1: "h"}.get(counted[block], "s")
        assert letter in expected
    assert max(counted.values()) == 3


def test_counts_of_states_are_those_of_the_pool() -> None:
    engine = engine_of()
    done = add(engine, 0, 9)
    add(engine, 1, 6)
    engine.step()
    engine.abort(done)
    found = snapshot(engine)
    letters = Counter(found["states"])
    assert letters[STATES["free"]] == found["num_free"]
    assert letters[STATES["cached"]] == found["num_cached"] == 2
    assert letters[STATES["held"]] + letters[STATES["shared"]] == found["num_held"]
    assert sum(letters.values()) == found["num_blocks"] == 16


def test_a_request_has_its_tokens_and_tables() -> None:
    engine = engine_of()
    add(engine, 3, 6, priority=2, name="chatcmpl-3")
    engine.step()
    [request] = snapshot(engine)["requests"]
    assert request == {
        "id": 3,
        "name": "chatcmpl-3",
        "state": "running",
        "num_prompt_tokens": 6,
        "num_cached_tokens": 0,
        "num_tokens": 7,
        "max_tokens": 40,
        "priority": 2,
        "num_preemptions": 0,
        "sequences": [
            {
                "index": 0,
                "state": "running",
                "num_tokens": 7,
                "num_computed": 6,
                "block_table": [0, 1],
                "num_host_blocks": 0,
            }
        ],
    }


def test_a_request_that_ends_leaves_the_snapshot_with_its_blocks() -> None:
    engine = engine_of(prefix_caching=False)
    request = add(engine, 0, 9, n=2)
    engine.step()
    engine.step()
    assert set(snapshot(engine)["states"]) != {"f"}
    engine.abort(request)
    found = snapshot(engine)
    assert (found["requests"], set(found["states"]), set(found["ref_counts"])) == ([], {"f"}, {0})


def test_a_sample_that_ended_leaves_its_request() -> None:
    engine = engine_of()
    request = add(engine, 0, 6, n=3)
    engine.step()
    engine.scheduler.finish(request.sequences[1], FinishReason.STOP)
    [found] = snapshot(engine)["requests"]
    assert [sequence["index"] for sequence in found["sequences"]] == [0, 2]


def test_who_waits_holds_nothing() -> None:
    engine = engine_of(max_num_seqs=1)
    add(engine, 0, 5)
    add(engine, 1, 5)
    engine.step()
    running, waiting = snapshot(engine)["requests"]
    assert (running["state"], waiting["state"]) == ("running", "waiting")
    assert waiting["num_cached_tokens"] is None
    assert waiting["sequences"][0]["block_table"] == []


def pressed(preemption: str) -> Snapshot:
    """Two requests of which one had to give its blocks up."""
    engine = engine_of(6, preemption=preemption, num_host_blocks=6, prefix_caching=False)
    for request_id in (0, 1):
        add(engine, request_id, 8)
    while not engine.stats().num_preemptions_recompute + engine.stats().num_preemptions_swap:
        engine.step()
    return snapshot(engine)


@pytest.mark.parametrize(("preemption", "state"), [("recompute", "preempted"), ("swap", "swapped")])
def test_who_was_preempted_is_told_apart_from_who_never_ran(preemption: str, state: str) -> None:
    victim = pressed(preemption)["requests"][1]
    assert (victim["state"], victim["num_preemptions"]) == (state, 1)


def test_who_is_swapped_out_has_blocks_of_the_host_alone() -> None:
    found = pressed("swap")
    [sequence] = found["requests"][1]["sequences"]
    assert sequence["block_table"] == []
    assert sequence["num_host_blocks"] == found["num_host_blocks"] - found["num_free_host_blocks"]


def kinds(found: Snapshot) -> list[str]:
    return [event["kind"].partition(",")[0] for event in found["events"]]


def test_events_tell_of_preemptions_and_why() -> None:
    found = pressed("recompute")
    assert kinds(found)[:2] == ["admitted", "admitted"]
    event = next(e for e in found["events"] if e["kind"].startswith("preempted"))
    assert (event["request"], event["sequence"]) == (1, 0)
    assert "2 short" in event["detail"]


def test_events_tell_of_copies_with_their_blocks() -> None:
    engine = engine_of()
    add(engine, 0, 6, n=2)
    engine.step()
    engine.step()
    [event] = [e for e in snapshot(engine)["events"] if e["kind"] == "copied on write"]
    assert (event["step"], event["blocks"]) == (2, [1, 2])
    assert event["detail"] == "block 1 to block 2, 2 tokens"


def test_events_tell_of_evictions_by_step() -> None:
    engine = engine_of(8)
    for request_id in range(3):
        request = add(engine, request_id, 15, first=request_id * 3)
        engine.step()
        engine.abort(request)
    evictions = [e for e in snapshot(engine)["events"] if e["kind"] == "evicted"]
    assert [(e["step"], e["detail"]) for e in evictions] == [(3, "2 cached blocks made free")]


def test_the_newest_events_are_kept_in_their_order() -> None:
    engine = engine_of(64)
    for request_id in range(4):
        add(engine, request_id, 5)
    engine.step()
    found = snapshot(engine, num_events=2)["events"]
    assert [(event["request"], event["kind"]) for event in found] == [
        (2, "admitted"),
        (3, "admitted"),
    ]


def test_a_snapshot_changes_nothing() -> None:
    engine = engine_of()
    add(engine, 0, 9, n=2)
    engine.step()
    before = engine.manager.state_digest()
    assert snapshot(engine) == snapshot(engine)
    assert engine.manager.state_digest() == before


def test_a_snapshot_has_no_text_and_no_tokens() -> None:
    engine = engine_of()
    request = add(engine, 0, 9)
    request.prompt = "a secret"
    engine.step()
    assert "secret" not in json.dumps(snapshot(engine))


class Thread:
    """An engine without a thread, which counts how often it was asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.status = "ready"
        self.num_calls = 0

    async def call(self, function: Callable[[Engine], T]) -> T:
        self.num_calls += 1
        return function(self.engine)


def test_the_endpoint_answers_with_the_snapshot() -> None:
    engine = engine_of()
    add(engine, 0, 9)
    engine.step()
    live = LiveBlocks(Thread(engine))
    app = Starlette(routes=[Route("/debug/blocks", live.get)])
    answer = TestClient(app).get("/debug/blocks")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == snapshot(engine)


def test_watchers_share_a_snapshot_until_it_is_old() -> None:
    thread, now = Thread(engine_of()), [0.0]
    live = LiveBlocks(thread, interval=0.1, clock=lambda: now[0])

    async def watch() -> None:
        await asyncio.gather(*(live.latest() for _ in range(5)))
        assert thread.num_calls == 1
        now[0] = 0.1
        await live.latest()

    asyncio.run(watch())
    assert thread.num_calls == 2


def test_the_stream_speaks_when_something_changed_and_ends_with_the_engine() -> None:
    engine = engine_of()
    thread = Thread(engine)
    live = LiveBlocks(thread, interval=0.0)
    steps = iter([lambda: None, lambda: None, lambda: add(engine, 0, 9), engine.step])

    async def call(function: Callable[[Engine], Any]) -> Any:
        act: Callable[[], object] | None = next(steps, None)
        if act is None:
            thread.status = "stopped"
        else:
            act()
        return function(engine)

    thread.call = call  # type: ignore[method-assign]  # the engine moves on between two looks
    app = Starlette(routes=[Route("/stream", live.stream)])
    answer = TestClient(app).get("/stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    states = [[request["state"] for request in each["requests"]] for each in told]
    assert states == [[], ["waiting"], ["running"]]


def ended(thread: Thread) -> str:
    """What a stream says until it ends."""
    app = Starlette(routes=[Route("/stream", LiveBlocks(thread, interval=0.0).stream)])
    return TestClient(app).get("/stream").text


def test_the_stream_ends_when_the_last_request_has_drained() -> None:
    engine = engine_of()
    thread = Thread(engine)
    request = add(engine, 0, 9)
    thread.status = "draining"
    calls: list[Callable[[], object]] = [lambda: engine.abort(request), engine.step]

    async def call(function: Callable[[Engine], Any]) -> Any:
        if thread.num_calls > 1:
            calls.pop()()
        thread.num_calls += 1
        return function(engine)

    thread.call = call  # type: ignore[method-assign]  # the engine moves on
    assert ended(thread).count("data: ") == 3


def test_the_stream_ends_when_the_engine_is_gone() -> None:
    thread = Thread(engine_of())
    answers = iter([snapshot(thread.engine)])

    async def call(_: Callable[[Engine], Any]) -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise EngineUnavailable("the engine is stopped") from None

    thread.call = call  # type: ignore[method-assign,assignment]  # as one that is stopped
    assert ended(thread) == ""


def test_an_engine_that_is_not_there_yet_is_no_stream() -> None:
    thread = Thread(engine_of())

    async def call(_: Callable[[Engine], Any]) -> Any:
        raise EngineUnavailable("the engine is loading")

    thread.call = call  # type: ignore[method-assign,assignment]  # as one that loads
    with pytest.raises(EngineUnavailable):
        ended(thread)


def test_a_stream_without_news_says_that_it_lives() -> None:
    thread, ticks = Thread(engine_of()), iter(range(100))
    live = LiveBlocks(thread, interval=0.0, keep_alive=5, clock=lambda: float(next(ticks)))

    async def two() -> list[bytes]:
        changes = live._changes()
        return [await anext(changes), await anext(changes)]

    first, second = asyncio.run(two())
    assert first.startswith(b"data: ")
    assert second == b": nothing has changed\n\n"
