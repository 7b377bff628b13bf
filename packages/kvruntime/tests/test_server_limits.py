"""What one request, or all of them together, may cost: bodies, queues, log-probabilities, crowds."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvruntime import LLM
from kvruntime.server import ServerSettings
from kvruntime.server.errors import as_api_error
from kvruntime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvruntime.server.service import MAX_NUM_LOGPROBS_IN_ALL

from .serving import LiveServer, live_server

MakeLLM = Callable[..., LLM]

ENDLESS = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
MESSAGE = {"role": "user", "content": "the"}
MANY = 5000


def rejections(server: LiveServer) -> dict[str, str]:
    """How many were refused, by why."""
    prefix = "kvruntime:rejected_requests_total{reason="
    lines = server.get("/metrics").text.splitlines()
    found = [line.removeprefix(prefix).split("} ") for line in lines if line.startswith(prefix)]
    return {reason.strip('"'): number for reason, number in found}


class TestABodyThatIsWrongManyTimes:
    """Is refused for the first thing, and not looked at much further."""

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": [{**MESSAGE, "content": [1] * MANY}]}, "messages[0].content"),
            ({"messages": [{**MESSAGE, "content": [{}] * MANY}]}, "messages[0].content"),
            ({"messages": [1] * MANY}, "messages[0]"),
            ({"messages": [{**MESSAGE, "tool_calls": [1] * MANY}]}, "messages[0].tool_calls[0]"),
            ({"tools": [1] * MANY}, "tools[0]"),
            ({"modalities": ["audio"] * MANY}, "modalities[0]"),
            ({"stop": [1] * MANY}, "stop"),
            ({"stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
            ({"logit_bias": {str(one): "a" for one in range(MANY)}}, "logit_bias"),
            (
                {"structured_outputs": {"choice": [1] * MANY}},
                "structured_outputs.choice[0]",
            ),
            ({f"field_{one}": 1 for one in range(MANY)}, "field_0"),
            (
                {"messages": [{**MESSAGE, **{f"field_{one}": 1 for one in range(MANY)}}]},
                "messages[0].field_0",
            ),
        ],
    )
    def test_in_a_chat(self, fields: dict[str, Any], param: str) -> None:
        body = {"model": "tiny", "messages": [MESSAGE], **fields}
        with pytest.raises(ValidationError) as caught:
            ChatCompletionRequest.model_validate_json(json.dumps(body))
        assert caught.value.error_count() <= 4
        error = as_api_error(caught.value)
        assert error.param is not None
        assert error.param.startswith(param)

    @pytest.mark.parametrize(
        "prompt", [["a"] * MANY, [1.5] * MANY, [["a"] * MANY] * 200, ["a"] * 200 + [1] * MANY]
    )
    def test_in_a_prompt(self, prompt: list[Any]) -> None:
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate_json(json.dumps({"model": "tiny", "prompt": prompt}))
        assert caught.value.error_count() <= 4

    def test_says_how_many_biases_there_may_be(self) -> None:
        body = {
            "model": "tiny",
            "prompt": "a",
            "logit_bias": dict.fromkeys(map(str, range(1025)), 1),
        }
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate_json(json.dumps(body))
        expected = "logit_bias: there may be at most 1024 biases, got 1025"
        assert as_api_error(caught.value).message == expected


def test_long_bodies_are_checked_beside_the_event_loop(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    check = CompletionRequest.model_validate_json

    def noting(body: bytes) -> CompletionRequest:
        threads.append(threading.get_ident())
        return check(body)

    async def loop_thread() -> int:
        return threading.get_ident()

    monkeypatch.setattr(CompletionRequest, "model_validate_json", noting)
    with live_server(make_llm()) as server:
        for num_bytes in (10, 100_000):
            assert server.post("/v1/completions", {**SHORT, "user": "a" * num_bytes}).is_success
        short, long = threads
        assert short == server.run(loop_thread()) != long


class TestPromptsOfOneRequest:
    """Wait together, or not at all."""

    def test_that_can_never_wait_together_are_not_told_to_come_again(
        self, make_llm: MakeLLM
    ) -> None:
        with live_server(make_llm(max_num_waiting_tokens=50)) as server:
            response = server.post("/v1/completions", {**SHORT, "prompt": [[5] * 20] * 3})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["message"] == (
                "the prompts of a request may have at most 50 tokens together, as many as may "
                "wait, got 60 in 3 prompts"
            )
            assert (error["param"], error["code"]) == ("prompt", "invalid_request")
            assert server.ask(lambda engine: engine.stats().num_steps) == 0

    @pytest.mark.parametrize("prompt", [[[5] * 25] * 2, [5] * 60], ids=["as many", "one alone"])
    def test_that_fit_are_served(self, make_llm: MakeLLM, prompt: list[Any]) -> None:
        with live_server(make_llm(max_num_waiting_tokens=50)) as server:
            assert server.post("/v1/completions", {**SHORT, "prompt": prompt}).status_code == 200


class TestARequestThatArrives:
    """Has its room in the queue before it is submitted."""

    @pytest.mark.parametrize(
        ("path", "fields"),
        [("completions", {"prompt": "the"}), ("chat/completions", {"messages": [MESSAGE]})],
    )
    def test_leaves_the_others_none(
        self,
        make_llm: MakeLLM,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        fields: dict[str, Any],
    ) -> None:
        llm = make_llm(max_num_waiting=2)
        encode = llm.encode
        has_begun, may_end = threading.Event(), threading.Event()

        def waiting(*arguments: Any, **settings: Any) -> list[int]:
            has_begun.set()
            assert may_end.wait(timeout=60)
            return encode(*arguments, **settings)

        monkeypatch.setattr(llm, "encode", waiting)
        body = {"model": "tiny", "max_tokens": 2, "n": 2, "seed": 0, **fields}
        with live_server(llm) as server, ThreadPoolExecutor() as pool:
            first = pool.submit(server.post, f"/v1/{path}", body)
            try:
                assert has_begun.wait(timeout=60)
                refused = server.post("/v1/completions", SHORT)
            finally:
                may_end.set()
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == (
                "at most 2 answers may wait, got 1 more than the 2 that wait already"
            )
            assert first.result().status_code == 200
            assert server.post("/v1/completions", SHORT).status_code == 200

    def test_gives_its_room_back_if_it_is_refused(self, make_llm: MakeLLM) -> None:
        with live_server(make_llm(max_num_waiting=2)) as server:
            for _ in range(3):
                wrong = {**SHORT, "n": 2, "prompt": [400]}
                assert server.post("/v1/completions", wrong).status_code == 400
            assert server.post("/v1/completions", {**SHORT, "n": 2}).status_code == 200


class TestLogProbabilities:
    """Are bounded in all, beside the bounds of each number that they are a product of."""

    @pytest.mark.parametrize(
        ("fields", "num_logprobs"),
        [
            ({"prompt": [[5]] * 4, "n": 128}, 4 * 128 * 400 * 21),
            ({"prompt": [[5]] * 4, "best_of": 128}, 4 * 128 * 400 * 21),
            ({"prompt": [[5] * 100] * 100, "n": 5, "echo": True}, 100 * (100 + 5 * 400) * 21),
        ],
        ids=["n", "best_of", "echo"],
    )
    def test_too_many_are_refused_with_the_numbers(
        self, make_llm: MakeLLM, fields: dict[str, Any], num_logprobs: int
    ) -> None:
        with live_server(make_llm(max_num_seqs=128)) as server:
            body = {"model": "tiny", "max_tokens": 400, "logprobs": 20, **fields}
            response = server.post("/v1/completions", body)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            f"a request may have at most {MAX_NUM_LOGPROBS_IN_ALL} log-probabilities (answers * "
            f"tokens * (top + 1)), got {num_logprobs}"
        )

    def test_without_them_as_much_is_served(self, make_llm: MakeLLM) -> None:
        with live_server(make_llm(max_num_seqs=128)) as server:
            body = {**SHORT, "prompt": [[5]] * 4, "n": 128, "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200


class TestACrowd:
    """Beyond so many open requests, others are refused in the API's shape; probes never are."""

    def test_is_bounded(self, make_llm: MakeLLM) -> None:
        settings = ServerSettings(model_names=("tiny",), max_num_open=2)
        with live_server(make_llm(), settings, step_seconds=0.05) as server:
            with (
                closing(server.send("/v1/completions", ENDLESS)),
                closing(server.send("/v1/completions", {**ENDLESS, "stream": True})),
            ):
                server.wait_until(lambda engine: len(engine.scheduler.running) == 2)
                refused = server.post("/v1/completions", SHORT)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"] == {
                    "message": "at most 2 requests may be open, and as many are",
                    "type": "service_unavailable_error",
                    "param": None,
                    "code": "too_many_requests",
                }
                assert server.get("/v1/models").status_code == 503
                for path in ("/health", "/ready", "/metrics"):
                    assert server.get(path).status_code == 200
                assert rejections(server) == {"too_many_requests": "2.0"}
            server.wait_until(lambda engine: not engine.has_work)
            while server.get("/v1/models").status_code == 503:
                pass


class TestWhatCountsAsRefused:
    """Who is turned away at the door, and not what ends otherwise after it was let in."""

    def test_a_wrong_key_and_a_wrong_host_do(self, make_llm: MakeLLM) -> None:
        settings = ServerSettings(
            model_names=("tiny",), api_keys={"key": None}, allowed_hosts=("127.0.0.1",)
        )
        with live_server(make_llm(), settings) as server:
            assert server.post("/v1/completions", SHORT).status_code == 401
            assert server.get("/v1/models", Host="evil.example").status_code == 421
            metrics = server.get("/metrics", Authorization="Bearer key").text
        for reason in ("invalid_api_key", "wrong_host"):
            assert f'rejected_requests_total{{reason="{reason}"}} 1.0' in metrics

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_timeout_does_not(self, make_llm: MakeLLM, stream: bool) -> None:  # noqa: FBT001 -- parametrized
        settings = ServerSettings(model_names=("tiny",), request_seconds=0.2)
        with live_server(make_llm(), settings, step_seconds=0.01) as server:
            response = server.post("/v1/completions", {**ENDLESS, "stream": stream})
            assert isinstance(response, httpx.Response)
            assert '"timeout"' in response.text
            assert rejections(server) == {}
