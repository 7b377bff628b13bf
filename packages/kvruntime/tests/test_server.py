"""The endpoints against a live server, through the official client."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from kvruntime import LLM, SamplingParams

from .serving import LiveServer, events, live_server

MakeLLM = Callable[..., LLM]

MESSAGES: list[Any] = [{"role": "user", "content": "the cache keeps"}]


@pytest.fixture(scope="module")
def server(make_llm: MakeLLM) -> Iterator[LiveServer]:
    with live_server(make_llm()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def llm(make_llm: MakeLLM) -> LLM:
    """Return the same model without a server: the oracle."""
    return make_llm()


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvruntime"


def test_a_chat_is_answered_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0
    )
    [expected] = llm.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0))
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_completion_is_answered_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the cache", max_tokens=12, n=3, seed=5, temperature=0.9, top_p=0.9
    )
    params = SamplingParams(max_tokens=12, n=3, seed=5, temperature=0.9, top_p=0.9)
    [expected] = llm.generate("the cache", params)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_a_streamed_chat_is_the_whole_one_in_parts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 20,
        "n": 2,
        "seed": 3,
    }
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_streamed_completion_is_the_whole_one_in_parts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 20, "seed": 3}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_the_chunks_of_a_chat_have_the_shape_of_openai(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 3,
        "seed": 0,
        "max_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = events(server.post("/v1/chat/completions", body))
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    assert {chunk["object"] for chunk in (*chunks, usage)} == {"chat.completion.chunk"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    for index in range(3):
        choices = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in {"stop", "length"}
        assert choices[-1]["delta"] == {}
        assert all(one["delta"].keys() == {"content"} for one in choices[1:-1])


def test_the_chunks_of_a_completion_have_the_shape_of_openai(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "prompt": ["the", "cache"],
        "n": 2,
        "seed": 0,
        "max_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = events(server.post("/v1/completions", body))
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in (*chunks, usage)} == {"text_completion"}
    assert usage["choices"] == []
    for index in range(4):
        choices = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in {"stop", "length"}


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_server_that_takes_requests_says_so(server: LiveServer, path: str) -> None:
    response = server.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ready"})
