"""Clients that leave, wait or read slowly, and an engine that is not there: what the server does."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from kvruntime import LLM, AnswerStream, Engine, EngineFailed
from kvruntime.server import ServerSettings
from kvruntime.server.answers import Answers
from kvruntime.server.errors import stream_error
from kvruntime.server.sse import EventStreamResponse
from kvruntime.steps import SchedulerOutput

from .serving import LiveServer, events, live_server

MakeLLM = Callable[..., LLM]
Holds = Callable[[Engine], bool]

ENDLESS = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


def is_decoding(engine: Engine) -> bool:
    return engine.stats().num_generated_tokens > 4


def is_in_its_prompt(engine: Engine) -> bool:
    return 0 < engine.stats().num_prefill_tokens < 200


def is_swapped(engine: Engine) -> bool:
    return engine.manager.stats().num_held_host_blocks > 0


def is_queued(engine: Engine) -> bool:
    return engine.scheduler.num_waiting_sequences > 0 and is_decoding(engine)


def assert_at_rest(server: LiveServer) -> None:
    """Nothing runs, every block is free or cached, and others are served."""
    assert_is_free(server)
    assert server.post("/v1/completions", SHORT).status_code == 200


def assert_is_free(server: LiveServer) -> None:
    """Nothing runs, and every block is free or cached."""
    server.wait_until(lambda engine: not engine.has_work)
    pool = server.ask(lambda engine: engine.manager.stats())
    assert pool.num_free_blocks + pool.num_cached_blocks == pool.num_blocks
    assert pool.num_held_host_blocks == 0
    server.ask(lambda engine: engine.manager.check())


class TestAClientThatLeaves:
    """Its blocks are free within one step, whether it streams or not, wherever its request stands."""

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    @pytest.mark.parametrize(
        ("fields", "config", "holds"),
        [
            ({}, {}, is_decoding),
            ({"n": 4, "seed": 0}, {}, is_decoding),
            ({"use_beam_search": True, "num_beams": 4}, {}, is_decoding),
            ({"prompt": [[5, 6], [7, 8, 9]]}, {}, is_decoding),
            ({"prompt": list(range(5, 255))}, {"max_num_batched_tokens": 4}, is_in_its_prompt),
            ({"prompt": [[5, 6], [7, 8, 9]]}, {"max_num_seqs": 1}, is_queued),
            (
                {"prompt": [[i, 6, 7] for i in range(5, 9)], "max_tokens": 40},
                {
                    "num_blocks": 12,
                    "block_size": 4,
                    "preemption": "swap",
                    "prefix_caching": False,
                },
                is_swapped,
            ),
        ],
        ids=["decode", "n", "beams", "prompts", "prefill", "queued", "swapped"],
    )
    def test_frees_its_blocks(
        self,
        make_llm: MakeLLM,
        fields: dict[str, Any],
        config: dict[str, Any],
        holds: Holds,
        stream: bool,  # noqa: FBT001 -- parametrized
    ) -> None:
        with live_server(make_llm(**config), step_seconds=0.005) as server:
            connection = server.send("/v1/completions", {**ENDLESS, **fields, "stream": stream})
            server.wait_until(holds)
            connection.close()
            assert_at_rest(server)
            num_answers = 4 if holds is is_swapped else 1
            longest = num_answers * fields.get("max_tokens", 400)
            assert server.ask(lambda e: e.stats()).num_generated_tokens < longest

    def test_while_others_go_on(self, make_llm: MakeLLM) -> None:
        with live_server(make_llm(), step_seconds=0.002) as server:
            body = {**ENDLESS, "max_tokens": 100, "temperature": 0}
            alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
            with ThreadPoolExecutor() as pool:
                staying = pool.submit(server.post, "/v1/completions", body)
                leaving = [
                    server.send("/v1/completions", {**ENDLESS, "stream": i % 2 == 0, "seed": i})
                    for i in range(8)
                ]
                server.wait_until(lambda engine: len(engine.scheduler.running) >= 5)
                for connection in leaving:
                    connection.close()
                assert staying.result().json()["choices"][0]["text"] == alone
            assert_at_rest(server)


class TestASlowReader:
    """Holds up nobody, and finds what came meanwhile put together."""

    def test_is_not_waited_for(self, make_llm: MakeLLM) -> None:
        with live_server(make_llm(num_blocks=600), send_buffer=4096) as server:
            body = {**ENDLESS, "n": 16, "seed": 0, "stream": True, "stream_options": None}
            connection = server.send("/v1/completions", body, receive_buffer=4096)
            server.wait_until(is_decoding)
            server.wait_until(lambda engine: not engine.has_work)
            assert server.ask(lambda e: e.manager.stats()).num_held_blocks == 0
            with connection, connection.makefile("rb") as reader:
                received = reader.read()
            chunks = [
                json.loads(line.removeprefix(b"data: "))["choices"][0]
                for line in received.splitlines()
                if line.startswith(b"data: {")
            ]
            whole = server.post("/v1/completions", {**body, "stream": False}).json()["choices"]
        assert b"[DONE]" in received[-40:]
        for index, choice in enumerate(whole):
            parts = [one for one in chunks if one["index"] == index]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert parts[-1]["finish_reason"] == "length"
        assert len(chunks) < 16 * 300

    def test_that_never_reads_is_left_in_the_end(self, make_llm: MakeLLM) -> None:
        settings = ServerSettings(model_names=("tiny",), request_seconds=1, max_num_open=1)
        with live_server(make_llm(num_blocks=600), settings, send_buffer=4096) as server:
            # What is said of so long a prompt is more than all buffers on the way hold.
            prompt = {"prompt": [5] * 300, "max_tokens": 200, "echo": True, "logprobs": 20}
            body = {**ENDLESS, **prompt, "n": 16, "seed": 0, "stream": True}
            with server.send("/v1/completions", body, receive_buffer=4096):
                server.wait_until(lambda engine: engine.stats().num_steps > 0)
                while server.post("/v1/completions", SHORT).status_code == 503:
                    pass  # it is open still
                assert_at_rest(server)

    def test_that_takes_nothing_frees_its_blocks_and_loses_its_connection(self) -> None:
        done: list[str] = []

        async def events() -> AsyncGenerator[bytes]:
            yield b"data: 1\n\n"

        async def serve() -> None:
            is_gone = asyncio.Event()

            async def receive() -> Any:
                await is_gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                done.append(message["type"])
                if message["type"] == "http.response.body":
                    await asyncio.Event().wait()  # for a reader that does not come

            def drop() -> None:
                done.append("dropped")
                is_gone.set()

            response = EventStreamResponse(
                events(), close=lambda: done.append("closed"), seconds=0.01, tell=stream_error
            )
            await response({"type": "http", "kvruntime.drop_connection": drop}, receive, send)

        asyncio.run(serve())
        start, *middle, last = done
        assert start == "http.response.start"
        assert middle == ["http.response.body", "closed", "http.response.body", "dropped"]
        assert last == "closed"


class TestAFullQueue:
    """A bounded number of answers and tokens wait; the others are told when to come again."""

    def test_ten_clients_at_a_queue_of_four_are_all_answered_in_the_end(
        self, make_llm: MakeLLM
    ) -> None:
        llm = make_llm(max_num_seqs=1, max_num_waiting=4)
        with live_server(llm, step_seconds=0.02) as server:
            refused: list[float] = []

            def note(response: httpx.Response) -> None:
                if response.status_code == 429:
                    refused.append(float(response.headers["retry-after"]))

            def ask(seed: int) -> str:
                hooks = {"response": [note]}
                with httpx.Client(event_hooks=hooks, timeout=60) as transport:
                    client = server.client(max_retries=12, http_client=transport)
                    answer = client.completions.create(
                        model="tiny", prompt="the", max_tokens=10, seed=seed
                    )
                    return answer.choices[0].text

            with ThreadPoolExecutor(10) as pool:
                answers = list(pool.map(ask, range(10)))
            assert len(answers) == 10
            assert refused
            assert all(1 <= seconds <= 60 for seconds in refused)
            assert server.ask(lambda e: e.stats()).num_rejections >= len(refused)
            assert_at_rest(server)

    def test_without_retries_a_client_sees_the_refusal(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=1, max_num_waiting=1)
        with live_server(llm, step_seconds=0.005) as server:
            connections = [server.send("/v1/completions", ENDLESS)]
            server.wait_until(is_decoding)
            connections.append(server.send("/v1/completions", ENDLESS))
            server.wait_until(is_queued)
            with pytest.raises(openai.RateLimitError, match="at most 1 answers may wait") as caught:
                server.client().completions.create(model="tiny", prompt="the")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code == "queue_full"
            for connection in connections:
                connection.close()
            assert_at_rest(server)

    def test_n_counts_n_and_every_prompt_counts(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=4, max_num_waiting=4)
        with live_server(llm, step_seconds=0.005) as server:
            running = server.send("/v1/completions", {**ENDLESS, "n": 4, "seed": 0})
            server.wait_until(is_decoding)
            waiting = server.send("/v1/completions", {**ENDLESS, "n": 2, "seed": 0})
            server.wait_until(is_queued)
            for fields in ({"n": 3}, {"prompt": [[5], [6], [7]]}):
                response = server.post("/v1/completions", {**ENDLESS, **fields})
                assert response.status_code == 429
            server.ask(lambda engine: engine.scheduler.num_waiting_sequences == 2)
            for connection in (running, waiting):
                connection.close()
            assert_at_rest(server)

    def test_what_can_never_wait_is_not_told_to_come_again(self, make_llm: MakeLLM) -> None:
        with live_server(make_llm(max_num_waiting=4)) as server:
            prompts = [[5], [6], [7], [8], [9]]
            for fields, numbers in (({"n": 5}, "1 * 5"), ({"prompt": prompts}, "5 * 1")):
                response = server.post("/v1/completions", {**ENDLESS, **fields})
                assert response.status_code == 400
                assert response.json()["error"]["message"] == (
                    f"a request may have at most 4 answers, as many as may wait, got {numbers}"
                )

    def test_tokens_are_bounded_too(self, make_llm: MakeLLM) -> None:
        llm = make_llm(max_num_seqs=1, max_num_waiting_tokens=50)
        with live_server(llm, step_seconds=0.005) as server:
            connections = [server.send("/v1/completions", ENDLESS)]
            server.wait_until(is_decoding)
            # One that is longer than all that may wait may wait alone.
            long = {**ENDLESS, "prompt": list(range(10, 110))}
            connections.append(server.send("/v1/completions", long))
            server.wait_until(is_queued)
            response = server.post("/v1/completions", ENDLESS)
            assert response.status_code == 429
            assert response.json()["error"]["message"] == (
                "prompts of at most 50 tokens may wait, got a prompt beside the 100 tokens that "
                "wait already"
            )
            for connection in connections:
                connection.close()
            assert_at_rest(server)


class TestARequestThatTakesTooLong:
    """Is aborted, and its client told not to try the same again."""

    def test_is_answered_with_an_error(self, make_llm: MakeLLM) -> None:
        settings = ServerSettings(model_names=("tiny",), request_seconds=0.2)
        with live_server(make_llm(), settings, step_seconds=0.01) as server:
            response = server.post("/v1/completions", ENDLESS)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "timeout"
            assert response.headers["x-should-retry"] == "false"
            assert_at_rest(server)

    def test_ends_its_stream_with_an_error(self, make_llm: MakeLLM) -> None:
        settings = ServerSettings(model_names=("tiny",), request_seconds=0.2)
        with live_server(make_llm(), settings, step_seconds=0.01) as server:
            *chunks, error = events(server.post("/v1/completions", {**ENDLESS, "stream": True}))
            assert chunks
            assert error["error"]["code"] == "timeout"
            with pytest.raises(openai.APIError, match="longer than this server lets"):
                list(
                    server.client().completions.create(
                        model="tiny",
                        prompt="the",
                        max_tokens=400,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                )
            assert_at_rest(server)


def test_an_engine_that_fails_is_told_to_everybody_and_its_log(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(max_num_seqs=2)
    execute = llm.engine.runner.execute
    may_fail = threading.Event()

    def fails(output: SchedulerOutput) -> Any:
        if may_fail.is_set():
            raise ValueError("no such layer")
        return execute(output)

    monkeypatch.setattr(llm.engine.runner, "execute", fails)
    with live_server(llm, step_seconds=0.005) as server, ThreadPoolExecutor() as pool:
        streamed = pool.submit(server.post, "/v1/completions", {**ENDLESS, "stream": True})
        server.wait_until(is_decoding)
        others = [pool.submit(server.post, "/v1/completions", ENDLESS) for _ in range(2)]
        server.wait_until(lambda e: (len(e.scheduler.running), len(e.scheduler.waiting)) == (2, 1))
        may_fail.set()
        *chunks, error = events(streamed.result())
        assert chunks
        assert error["error"]["code"] == "engine_failed"
        assert error["error"]["type"] == "server_error"
        for other in others:
            assert other.result().status_code == 500
            assert "no such layer" in other.result().json()["error"]["message"]
        refused = server.post("/v1/completions", SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        for path in ("/health", "/ready"):
            state = server.get(path)
            assert state.status_code == 503
            assert state.json() == {"status": "failed", "error": "ValueError"}
    [failure] = [record for record in caplog.records if record.message == "the engine failed"]
    assert failure.exc_text is not None
    assert failure.exc_text.endswith("ValueError: no such layer")


def test_nothing_goes_on_reading_beside_a_stream_that_failed() -> None:
    async def read() -> set[asyncio.Task[Any]]:
        streams = [AnswerStream(str(one), 1, lambda _: None) for one in range(3)]
        streams[1].fail(EngineFailed("no such layer"))
        with pytest.raises(EngineFailed):
            async for _ in Answers(streams, 1).deltas():
                pass
        return {one for one in asyncio.all_tasks() if one is not asyncio.current_task()}

    assert not asyncio.run(read())


def test_a_stream_that_fails_as_nobody_expected_says_on_the_log_why(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise LookupError("no such place")

    monkeypatch.setattr(Answers, "deltas", broken)
    with live_server(make_llm()) as server:
        [error] = events(server.post("/v1/completions", {**SHORT, "stream": True}))
        assert "no such place" not in error["error"]["message"]
        assert_is_free(server)
    [failure] = [record for record in caplog.records if record.message == "a stream failed"]
    assert failure.exc_text is not None
    assert failure.exc_text.endswith("LookupError: no such place")


def test_a_server_answers_while_its_model_loads(make_llm: MakeLLM) -> None:
    gate = threading.Event()

    def load() -> LLM:
        gate.wait(timeout=60)
        return make_llm()

    with live_server(load) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        assert server.get("/v1/models").json()["data"][0]["id"] == "tiny"
        refused = server.post("/v1/completions", SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        with ThreadPoolExecutor() as pool:
            client = server.client(max_retries=3)
            answer = pool.submit(client.completions.create, model="tiny", prompt="the")
            time.sleep(0.1)
            gate.set()
            assert answer.result().choices


def test_a_server_that_drains_ends_what_runs_and_refuses_what_is_new(make_llm: MakeLLM) -> None:
    with live_server(make_llm(), step_seconds=0.002) as server, ThreadPoolExecutor() as pool:
        body = {**ENDLESS, "max_tokens": 100}
        running = pool.submit(server.post, "/v1/completions", body)
        server.wait_until(is_decoding)
        draining = pool.submit(server.run, server.async_llm.drain())
        while server.async_llm.status != "draining":
            pass
        refused = server.post("/v1/completions", SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/ready").json() == {"status": "draining"}
        assert server.get("/health").status_code == 200
        assert running.result().json()["usage"]["completion_tokens"] == 100
        assert draining.result()
