"""What is refused: with which status, naming what, and with nothing left behind."""

import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from kvruntime import LLM, InvalidRequest
from kvruntime.server import ServerSettings
from kvruntime.server.overload import Throughput

from .serving import LiveServer, live_server

MakeLLM = Callable[..., LLM]

MESSAGES = [{"role": "user", "content": "the cache keeps"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": "the", "max_tokens": 2}
KEYS = {"sk-one": "acme", "sk-two": "acme", "sk-three": "other", "sk-four": None}


@pytest.fixture(scope="module")
def server(make_llm: MakeLLM) -> Iterator[LiveServer]:
    settings = ServerSettings(model_names=("tiny",), max_body_bytes=20_000, body_seconds=0.5)
    with live_server(make_llm(max_num_seqs=8), settings) as one:
        yield one


@pytest.fixture(scope="module")
def guarded(make_llm: MakeLLM) -> Iterator[LiveServer]:
    settings = ServerSettings(
        model_names=("tiny",),
        api_keys=KEYS,
        allowed_hosts=("127.0.0.1", "Models.Example:8000", "::1"),
    )
    with live_server(make_llm(), settings) as one:
        yield one


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("chat/completions", {**CHAT, "frobnicate": 1}, "frobnicate", "unsupported_field"),
        ("chat/completions", {**CHAT, "store": True}, "store", "invalid_field"),
        ("completions", {**TEXT, "suffix": "x"}, "suffix", "unsupported_field"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "a", "mood": "good"}]},
            "messages[0].mood",
            "unsupported_field",
        ),
        (
            "chat/completions",
            {**CHAT, "stream": True, "stream_options": {"chatty": True}},
            "stream_options.chatty",
            "unsupported_field",
        ),
        ("chat/completions", {"model": "tiny"}, "messages", "missing_field"),
        ("completions", {"model": "tiny"}, "prompt", "missing_field"),
        ("completions", {"prompt": "a"}, "model", "missing_field"),
        ("completions", {**TEXT, "n": 0}, "n", "invalid_field"),
        ("completions", {**TEXT, "n": "2"}, "n", "invalid_field"),
        ("completions", {**TEXT, "n": 129}, "n", "invalid_field"),
        ("completions", {**TEXT, "n": 9}, "n", "invalid_request"),
        ("completions", {**TEXT, "temperature": -1}, "temperature", "invalid_field"),
        ("completions", {**TEXT, "prompt": 5}, "prompt", "invalid_field"),
        ("completions", {**TEXT, "prompt": []}, "prompt", "invalid_field"),
        ("completions", {**TEXT, "prompt": [[1], "a"]}, "prompt", "invalid_field"),
        ("completions", {**TEXT, "logprobs": 21}, "logprobs", "invalid_field"),
        ("completions", {**TEXT, "stop": ["a"] * 17}, "stop", "invalid_field"),
        ("completions", {**TEXT, "stop": "a" * 257}, "stop", "invalid_field"),
        ("completions", {**TEXT, "stop": ""}, "stop", "invalid_field"),
        ("completions", {**TEXT, "logit_bias": {"the": 1}}, "logit_bias", "invalid_request"),
        ("completions", {**TEXT, "min_tokens": 3}, "min_tokens", "invalid_request"),
        ("completions", {**TEXT, "best_of": 1, "n": 2}, "best_of", "invalid_request"),
        ("completions", {**TEXT, "priority": 1}, "priority", "invalid_request"),
        ("chat/completions", {**CHAT, "messages": []}, "messages", "invalid_field"),
        ("chat/completions", [], None, "invalid_field"),
        ("completions", b"{", None, "invalid_json"),
        ("completions", b"", None, "invalid_json"),
        ("completions", b'{"model": "tiny", "prompt": "\\ud800"}', None, "invalid_json"),
        ("completions", b'{"model": "tiny", "prompt": "\xff"}', None, "invalid_json"),
        ("completions", b"[" * 10_000, None, "invalid_json"),
        ("completions", {**TEXT, "temperature": float("nan")}, "temperature", "invalid_field"),
    ],
)
def test_a_mistake_is_refused_by_the_name_of_its_field(
    server: LiveServer, path: str, body: Any, param: str | None, code: str
) -> None:
    error = error_of(server.post(f"/v1/{path}", body), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**TEXT, "prompt": ""}, "the prompt is empty: it must have at least one token"),
        (
            {**TEXT, "prompt": [5] * 600},
            "the prompt has 600 tokens, but the model's context holds 512, which must leave room for at least one generated token",
        ),
        ({**TEXT, "prompt": [5, 400]}, "token ids must be in [0, 400), got 400"),
        ({**TEXT, "n": 9}, "n must be at most max_num_seqs, got 9 and 8"),
        ({**TEXT, "min_tokens": 3}, "min_tokens must be in [0, max_tokens], got 3 and 2"),
    ],
)
def test_the_impossible_is_refused_with_the_numbers(
    server: LiveServer, body: dict[str, Any], message: str
) -> None:
    assert error_of(server.post("/v1/completions", body), 400)["message"] == message


def test_one_impossible_prompt_refuses_them_all(server: LiveServer) -> None:
    body = {**TEXT, "prompt": [[5], [6], [5] * 600], "max_tokens": 300, "ignore_eos": True}
    error_of(server.post("/v1/completions", body), 400)
    assert not server.ask(lambda engine: engine.has_work)


def test_another_models_name_is_not_found(server: LiveServer) -> None:
    error = error_of(server.post("/v1/completions", {**TEXT, "model": "gpt-4"}), 404)
    assert error["code"] == "model_not_found"
    assert error["message"] == "the model 'gpt-4' does not exist; there is tiny"
    assert error_of(server.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"


def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(server: LiveServer) -> None:
    assert error_of(server.get("/v2/models"), 404)["message"] == "Not Found"
    assert error_of(server.get("/v1/completions"), 405)["message"] == "Method Not Allowed"


def test_what_is_not_json_is_not_read(server: LiveServer) -> None:
    response = server.post("/v1/completions", TEXT, **{"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error_of(response, 415)["message"]


def test_a_body_that_is_too_long_is_refused(server: LiveServer) -> None:
    response = server.post("/v1/completions", {**TEXT, "prompt": "a" * 20_000})
    assert error_of(response, 413)["message"] == "the body must have at most 20000 bytes"


def test_a_body_that_does_not_come_is_not_waited_for(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"model":')
    response = connection.getresponse()
    assert response.status == 408
    assert json.loads(response.read())["error"]["code"] == "slow_body"
    connection.close()


def test_a_client_that_leaves_while_it_sends_harms_nobody(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert server.post("/v1/completions", TEXT).status_code == 200
    assert not caplog.records


def test_what_nobody_expected_is_an_error_of_the_server_and_tells_no_prompt(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, prompt: object) -> int:  # noqa: ARG001 -- as what it stands for
        raise LookupError("no such place")

    monkeypatch.setattr("kvruntime.server.service.Service.num_tokens_left", broken)
    with caplog.at_level(logging.INFO), live_server(make_llm(), logs_errors=True) as server:
        error = error_of(server.post("/v1/chat/completions", CHAT), 500)
    assert error["type"] == "server_error"
    assert "no such place" not in error["message"]
    assert "POST /v1/chat/completions failed: LookupError" in caplog.text
    assert "the cache keeps" not in caplog.text


class TestKeys:
    """Who may ask, and whose cached blocks they find."""

    def test_a_key_is_needed_for_all_but_the_health(self, guarded: LiveServer) -> None:
        for headers in ({}, {"Authorization": "Bearer sk-no"}, {"Authorization": "Basic sk-one"}):
            response = guarded.get("/v1/models", **headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert guarded.get("/health").status_code == 200
        assert guarded.get("/ready").status_code == 200

    def test_the_official_client_sends_it(self, guarded: LiveServer) -> None:
        assert guarded.client(api_key="sk-four").models.list().data
        with pytest.raises(openai.AuthenticationError):
            guarded.client(api_key="sk-five").models.list()

    def test_a_key_that_is_no_ascii_is_only_wrong(self, guarded: LiveServer) -> None:
        header = "Bearer sk-öne".encode()
        host, port = guarded.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.putrequest("GET", "/v1/models")
        connection.putheader("Authorization", header)
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()

    def test_tenants_share_no_cached_blocks(self, guarded: LiveServer) -> None:
        def cached(key: str, prompt: int, **fields: Any) -> int:
            body = {**TEXT, "prompt": list(range(prompt, prompt + 40)), **fields}
            answer = guarded.post("/v1/completions", body, Authorization=f"Bearer {key}")
            details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
            return details["cached_tokens"]

        assert cached("sk-one", 20) == 0
        assert cached("sk-two", 20) == 32  # the same tenant
        assert cached("sk-three", 20) == 0
        assert cached("sk-four", 20) == 0
        # Nor by choosing the salt that stands for another tenant.
        assert cached("sk-four", 20, cache_salt="acme") == 0
        assert cached("sk-one", 20, cache_salt="acme") == 0

    def test_settings_never_show_a_key(self) -> None:
        assert "sk-one" not in repr(ServerSettings(api_keys=KEYS))

    @pytest.mark.parametrize("key", ["", "sk öne", "a\n"])
    def test_what_no_header_can_hold_is_no_key(self, key: str) -> None:
        with pytest.raises(InvalidRequest, match="an API key must be printable ASCII"):
            ServerSettings(api_keys={key: None})


def test_only_hosts_that_are_named_are_answered(guarded: LiveServer) -> None:
    response = guarded.get("/health", Host="evil.example")
    assert error_of(response, 421)["code"] == "wrong_host"
    for host in ("models.example:80", "MODELS.example", "[::1]:8000"):
        assert guarded.get("/health", Host=host).status_code == 200


class TestHowLongToWait:
    """`Retry-After`: the answers that wait, by those that end a second while the engine works."""

    def test_nothing_is_known_at_first(self) -> None:
        assert Throughput().seconds_for(100) == 1

    def test_it_is_the_backlog_by_the_throughput(self, make_llm: MakeLLM) -> None:
        throughput = Throughput()
        for _ in range(10):  # a request each two seconds of work
            throughput.stepped(make_llm().engine, 2.0)
            throughput.ended(1.0, "stop", 1, 1)
        assert throughput.seconds_for(1) == 2
        assert throughput.seconds_for(5) in {9, 10}
        assert throughput.seconds_for(1000) == 60

    def test_what_was_long_ago_counts_little(self, make_llm: MakeLLM) -> None:
        throughput = Throughput()
        engine = make_llm().engine
        for _ in range(100):
            throughput.stepped(engine, 1.0)
            throughput.ended(1.0, "stop", 1, 1)
        for _ in range(300):
            throughput.stepped(engine, 1.0)
            for _ in range(10):
                throughput.ended(1.0, "stop", 1, 1)
        assert throughput.seconds_for(50) in {5, 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes must be above 0, got 0"),
        ({"request_seconds": -1}, "request_seconds must be above 0, got -1"),
        ({"max_num_open": 0}, "max_num_open must be above 0, got 0"),
        ({"model_names": ()}, "a model must have a name, got ()"),
        ({"model_names": ("",)}, "a model must have a name"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ServerSettings(**settings)
    assert message in str(caught.value)
