"""A whole load in virtual time: a scripted server, and the exact figures that follow from it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from kvruntime.bench.client import Client, Endpoint
from kvruntime.bench.figures import Outcome, Record, summarize
from kvruntime.bench.load import run_load
from kvruntime.bench.prompts import Asked
from kvruntime.errors import ServerError

from .virtual_time import run

# What a server does: seconds to wait, then an event to send; None closes the stream.
Script = Sequence[tuple[float, Any]]


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


# Two tokens come in the second event: tokens are those of the usage.
ANSWER: Script = [
    (0.5, chunk("a")),
    (0.25, chunk("bc")),
    (0.25, chunk("d", "stop")),
    (0.0, usage(7, 5, cached=3)),
    (0.0, "[DONE]"),
]


class Stream(httpx.AsyncByteStream):
    """The events of a script, each after its delay."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, event in self._script:
            await asyncio.sleep(delay)
            if isinstance(event, Exception):
                raise event
            text = event if isinstance(event, str) else json.dumps(event)
            # Servers end lines in either way, and send comments to keep a connection open.
            yield f": still here\r\n\r\ndata: {text}\r\n\r\n".encode()


class Server(httpx.AsyncBaseTransport):
    """Answers each request by the next script, and keeps their bodies."""

    def __init__(self, *scripts: Script | httpx.Response | Exception) -> None:
        self._scripts = list(scripts)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_open = 0
        self.most_open = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(await request.aread()))
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        if isinstance(script, Exception):
            raise script
        if isinstance(script, httpx.Response):
            return script
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return httpx.Response(200, stream=self._stream(script))

    def _stream(self, script: Script) -> httpx.AsyncByteStream:
        server = self

        class Counted(Stream):
            async def aclose(self) -> None:
                server.num_open -= 1

        return Counted(script)


def load(
    server: Server,
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    after: float | None = None,
    **settings: Any,
) -> list[Record]:
    """The records of a load; `after` so many seconds it is cancelled."""

    async def main() -> list[Record]:
        async with Client("http://server", transport=server, **settings) as client:
            asked = [Asked([5, 6, 7], 5)] * len(arrivals)
            task = asyncio.create_task(
                run_load(client.send, asked, arrivals, max_concurrency=max_concurrency)
            )
            if after is not None:
                await asyncio.sleep(after)
                task.cancel()
            return await task

    return run(main())


def test_latencies_are_those_of_the_script() -> None:
    [record] = load(Server(ANSWER), [0.0])
    assert record.outcome is Outcome.COMPLETED
    assert record.ttft == 0.5
    assert record.e2el == 1.0
    assert record.itls == [0.25, 0.25]
    assert record.tpot == (1.0 - 0.5) / (5 - 1)
    assert record.normalized_latency == 1.0 / 5


def test_tokens_are_those_of_the_usage_and_not_the_number_of_events() -> None:
    [record] = load(Server(ANSWER), [0.0])
    assert len(record.chunk_times) == 3
    assert record.num_output_tokens == 5
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (7, 3)


def test_each_request_is_sent_when_it_is_due() -> None:
    records = load(Server(ANSWER), [0.0, 0.1, 5.0])
    assert [record.sent for record in records] == pytest.approx([0.0, 0.1, 5.0])
    assert [record.waited for record in records] == pytest.approx([0.0, 0.0, 0.0])


def test_no_more_requests_are_in_flight_than_seats_and_the_others_wait() -> None:
    server = Server(ANSWER)
    records = load(server, [0.0] * 5, max_concurrency=2)
    assert server.most_open == 2
    assert [record.sent for record in records] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert [record.waited for record in records] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert {record.e2el for record in records} == {1.0}


def test_the_figures_of_a_load_are_exact() -> None:
    full = httpx.Response(429, json={"error": {"message": "queue is full"}})
    summary = summarize(
        load(Server(ANSWER, full, ANSWER), [0.0, 1.0, 3.0]), limits={"ttft": 0.5, "tpot": 0.2}
    )
    assert summary.duration == 4.0
    assert summary.counts == {
        Outcome.COMPLETED: 2,
        Outcome.REJECTED: 1,
        Outcome.FAILED: 0,
        Outcome.UNFINISHED: 0,
    }
    assert summary.errors == {"429: queue is full": 1}
    assert summary.request_throughput == 2 / 4
    assert summary.output_throughput == 10 / 4
    assert summary.total_throughput == 24 / 4
    assert summary.goodput == 2 / 4


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (httpx.Response(500, text="<h1>no</h1>"), "500: <h1>no</h1>"),
        (httpx.Response(503, json={"detail": "loading"}), "503: loading"),
        ([(0.1, chunk("a")), (0.0, "[DONE]")], "the stream ended before the answer did"),
        ([(0.1, chunk("a", "stop"))], "the server told no usage: no tokens known"),
        ([(0.1, {"error": {"message": "out of memory"}})], "in the stream: out of memory"),
        ([(0.1, "{")], "in the stream: an event is no JSON object: {"),
        ([(0.1, httpx.ReadError("reset"))], "ReadError: reset"),
        (httpx.ConnectTimeout(""), "ConnectTimeout"),
    ],
)
def test_what_goes_wrong_is_noted_in_one_line(
    script: Script | httpx.Response | Exception, error: str
) -> None:
    [record] = load(Server(script), [0.0])
    assert record.outcome is Outcome.FAILED
    assert record.error == error


def test_a_failure_leaves_the_others_alone() -> None:
    records = load(Server(httpx.ConnectError("no"), ANSWER), [0.0, 0.0])
    assert [record.outcome for record in records] == [Outcome.FAILED, Outcome.COMPLETED]


def test_a_cancelled_load_tells_what_was_measured() -> None:
    records = load(Server(ANSWER), [0.0, 1.0, 9.0], after=1.6)
    summary = summarize(records)
    assert summary.counts[Outcome.COMPLETED] == 1
    assert summary.counts[Outcome.UNFINISHED] == 1
    assert summary.num_not_sent == 1
    assert records[1].ttft == pytest.approx(0.5)


@pytest.mark.parametrize("character", ["\N{LINE SEPARATOR}", "\N{PARAGRAPH SEPARATOR}", "\x85"])
def test_an_answer_may_have_any_character(character: str) -> None:
    event = json.dumps(chunk(f"a{character}b", "stop"), ensure_ascii=False)
    [record] = load(Server([(0.5, event), (0.0, usage(7, 1))]), [0.0])
    assert (record.outcome, record.error) == (Outcome.COMPLETED, "")


def delta(content: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of a chat."""
    return {"choices": [{"delta": dict(content), "finish_reason": finish_reason}]}


def test_an_end_without_output_is_no_token() -> None:
    """And the answer ends with it."""
    script: Script = [
        (0.5, delta({"content": "a"})),
        (0.25, delta({"content": "b"})),
        (0.125, delta({}, "stop")),
        (0.0, usage(7, 2)),
    ]
    [record] = load(Server(script), [0.0], endpoint=Endpoint.CHAT)
    assert (record.ttft, record.itls, record.e2el) == (0.5, [0.25], 0.875)


def test_the_end_of_an_answer_without_any_output_is_its_first_token() -> None:
    script: Script = [(0.5, delta({}, "stop")), (0.0, usage(7, 1))]
    [record] = load(Server(script), [0.0], endpoint=Endpoint.CHAT)
    assert (record.ttft, record.itls, record.e2el) == (0.5, [], 0.5)


def test_the_first_event_of_a_chat_names_a_role_and_is_no_token() -> None:
    script: Script = [
        (0.1, delta({"role": "assistant", "content": ""})),
        (0.4, delta({"content": "a"})),
        (0.5, delta({}, "stop")),
        (0.0, usage(7, 2)),
    ]
    server = Server(script)
    [record] = load(server, [0.0], endpoint=Endpoint.CHAT)
    assert (record.ttft, record.e2el) == (0.5, 1.0)
    assert server.paths == ["/v1/models", "/v1/chat/completions"]


def test_a_request_asks_for_usage_and_has_the_fields_that_were_given() -> None:
    server = Server(ANSWER)
    load(server, [0.0], extra={"temperature": 0, "top_k": 3}, model="mine")
    assert server.paths == ["/v1/completions"]
    assert server.bodies == [
        {
            "model": "mine",
            "prompt": [5, 6, 7],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "top_k": 3,
        }
    ]


def test_a_chat_of_a_text_is_one_message() -> None:
    async def main(server: Server) -> None:
        async with Client("http://server/v1/", endpoint=Endpoint.CHAT, transport=server) as client:
            await client.send(Asked("hello", 4), Record(0.0))

    server = Server(ANSWER)
    run(main(server))
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0]["model"] == "tiny"


def test_a_warm_up_that_fails_ends_the_load_before_it_begins() -> None:
    async def main() -> None:
        full = httpx.Response(404, json={"error": {"message": "no model 'b'"}})
        async with Client("http://server", model="b", transport=Server(full)) as client:
            await client.warm_up([Asked("hello", 4)])

    with pytest.raises(ServerError, match=r"http://server/v1 does not answer .*404: no model 'b'"):
        run(main())


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    class Nowhere(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused", request=request)

    async def main() -> None:
        async with Client("http://server", transport=Nowhere()):
            raise AssertionError("it is never entered")

    with pytest.raises(ServerError, match="no server answers at http://server/v1"):
        run(main())


@pytest.mark.parametrize("answer", [{}, {"data": []}, [], {"data": [{}]}])
def test_a_server_without_models_is_one_sentence(answer: Any) -> None:
    class Empty(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=answer, request=request)

    async def main() -> None:
        async with Client("http://server", transport=Empty()):
            raise AssertionError("it is never entered")

    with pytest.raises(ServerError, match="lists no model; name one by --model"):
        run(main())
