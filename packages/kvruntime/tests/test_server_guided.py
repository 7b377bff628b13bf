"""Structured outputs and tools against a live server, through the official client."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pydantic
import pytest

from kvruntime import LLM, EngineConfig, StructuredOutputsParams
from kvruntime.guidance import Guidance
from kvruntime.server.protocol import ChatCompletionRequest

from .serving import LiveServer, events, live_server
from .tool_templates import TEMPLATES

MESSAGES: list[Any] = [{"role": "user", "content": "the cache keeps"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "description": "Now.", "parameters": PERSON}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Person(pydantic.BaseModel):
    """What the client parses answers into."""

    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def server(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tools") / "llama"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    config = json.loads((folder / "config.json").read_text())
    longer = {**config, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(longer))
    with live_server(LLM(folder, EngineConfig(num_blocks=256))) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one


def chat(client: openai.OpenAI, **settings: Any) -> Any:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 1, **settings}
    if "use_beam_search" in asked.get("extra_body", {}):
        del asked["seed"]
    return client.chat.completions.create(**asked)


def refusal(client: openai.OpenAI, **settings: Any) -> str:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **settings)
    return str(refused.value.body["message"])  # type: ignore[index]  # an error of ours has one


# ── structured outputs ───────────────────────────────────────────────────────────────────────


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": PERSON},
    }
    answer = chat(client, n=8, response_format=schema)
    stopped = [one.message.content for one in answer.choices if one.finish_reason == "stop"]
    assert len(stopped) >= 4
    for text in stopped:
        assert jsonschema_rs.is_valid(PERSON, json.loads(text)), text


def test_the_client_parses_an_answer_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, seed=seed, response_format=Person, max_tokens=400
        )
        assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_json_object_is_answered(client: openai.OpenAI) -> None:
    answer = chat(client, n=8, response_format={"type": "json_object"}, logit_bias={"93": 5})
    stopped = [one.message.content for one in answer.choices if one.finish_reason == "stop"]
    assert stopped
    assert all(isinstance(json.loads(text), dict) for text in stopped)


def test_any_text_is_answered_where_text_is_asked_for(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=20)
    text = chat(client, max_tokens=20, response_format={"type": "text"})
    assert text.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" start | "b"'}, "a*b"),
        ({"json": {"const": {"a": 1}}, "disable_any_whitespace": True}, r'\{"a":1\}'),
        ({"json": '{"const": 5}'}, "5"),
    ],
)
def test_completions_and_chats_take_the_extras_of_vllm(
    client: openai.OpenAI, constraint: dict[str, Any], pattern: str
) -> None:
    extra = {"structured_outputs": constraint}
    asked: Any = {"model": "tiny", "max_tokens": 200, "seed": 2, "extra_body": extra}
    completion = client.completions.create(prompt=["the", "cache"], **asked)
    texts = [choice.text for choice in completion.choices]
    texts.append(chat(client, extra_body=extra).choices[0].message.content)
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_completion_takes_a_response_format(server: LiveServer) -> None:
    schema = {"name": "x", "schema": {"enum": ["only this"]}}
    body = {
        "model": "tiny",
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == '"only this"'


def test_a_guided_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    asked: Any = {"n": 2, "extra_body": {"structured_outputs": {"json": PERSON}}}
    whole = [one.message.content for one in chat(client, **asked).choices]
    texts = ["", ""]
    for chunk in chat(client, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format: .*'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}},
                }
            },
            "name: String should match pattern",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
            "response_format.json_schema.schema: Input should be an object",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "foo"}},
                }
            },
            "the json schema cannot be followed: Invalid type: foo",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"use_beam_search": True}},
            "response_format cannot go with use_beam_search",
        ),
        ({"extra_body": {"structured_outputs": {}}}, "exactly one of json, regex"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "the regex cannot be followed"),
        ({"extra_body": {"structured_outputs": {"xml": "a"}}}, "structured_outputs.xml is not sup"),
        ({"extra_body": {"structured_outputs": {"regex": "a" * 70_000}}}, "at most 65536 bytes"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}, "ignore_eos": True}},
            "ignore_eos must be False",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "extra_body": {"structured_outputs": {"regex": "a"}},
            },
            "structured_outputs cannot go with response_format",
        ),
    ],
)
def test_a_constraint_that_cannot_be_is_refused_with_the_reason(
    client: openai.OpenAI, settings: dict[str, Any], message: str
) -> None:
    assert re.search(message, refusal(client, **settings))


def test_constraints_are_compiled_beside_the_engine(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = Guidance._compile
    threads = []

    def note(guidance: Guidance, params: StructuredOutputsParams) -> Any:
        threads.append(threading.current_thread().name)
        return compile_(guidance, params)

    monkeypatch.setattr(Guidance, "_compile", note)
    for schema in ({"const": "beside"}, {"const": "beside"}, {"const": "again"}):
        chat(client, extra_body={"structured_outputs": {"json": schema}})
    assert len(threads) == 2
    assert "kvruntime-engine" not in threads


def test_a_constraint_that_becomes_too_complex_is_the_clients_fault(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 400,
        "logit_bias": {"2": -100},
        "structured_outputs": {"grammar": 'start: s\ns: s s s | s s | "a"'},
    }
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400
    assert "Current row has" in answer.json()["error"]["message"]
    server.wait_until(lambda engine: not engine.has_work)
    assert server.ask(lambda engine: engine.stats().num_leaked_blocks) == 0
    counted = server.get("/metrics").text
    assert re.search(r'kvruntime:request_success_total\{finished_reason="error"\} 1', counted)


# ── tools ────────────────────────────────────────────────────────────────────────────────────


def check_call(call: Any) -> None:
    schema = {"weather": WEATHER, "time": PERSON}[call.function.name]
    assert jsonschema_rs.is_valid(schema, json.loads(call.function.arguments))
    assert call.type == "function"
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)


def test_a_required_tool_is_called(client: openai.OpenAI) -> None:
    answer = chat(
        client, n=4, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        check_call(call)


def test_a_named_tool_is_called_and_is_no_reason_to_finish(client: openai.OpenAI) -> None:
    answer = chat(client, n=4, tools=TOOLS, tool_choice=NAMED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        [call] = choice.message.tool_calls
        check_call(call)
        assert call.function.name == "weather"


def test_calls_come_whole_in_a_stream(client: openai.OpenAI) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "seed": 4}
    whole = chat(client, **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(whole.message.tool_calls)))
    for call, other in zip(calls, whole.message.tool_calls, strict=True):
        check_call(call)
        assert call.function.model_dump() == other.function.model_dump()
    assert chunks[-1].finish_reason == whole.finish_reason


def test_an_answer_and_its_result_can_be_sent_back(client: openai.OpenAI) -> None:
    message = chat(client, tools=TOOLS, tool_choice=NAMED).choices[0].message
    result: Any = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": "Rain.",
    }
    answer = chat(client, messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=5)
    assert answer.usage.prompt_tokens > chat(client, tools=TOOLS, max_tokens=5).usage.prompt_tokens


def test_text_is_text_where_tools_may_be_called(client: openai.OpenAI) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    for tools in (TOOLS, strict):
        asked: Any = {"tools": tools, "max_tokens": 30, "logprobs": True}
        whole = chat(client, **asked).choices[0]
        chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
        noted = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or ()]
        assert [one.token for one in noted] == [one.token for one in whole.logprobs.content]
        assert whole.message.tool_calls is None


def test_tools_that_must_not_be_called_are_not_shown(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=20)
    hidden = chat(client, max_tokens=20, tools=TOOLS, tool_choice="none")
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens
    assert hidden.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "is_enforced"),
    [
        ({}, False),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": NAMED}, True),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tools": [{**NAMED, "function": {"name": "weather", "strict": True}}]}, True),
    ],
)
def test_calls_are_enforced_where_that_is_asked_for(
    fields: dict[str, Any],
    is_enforced: bool,  # noqa: FBT001 -- pytest's
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    asked = ChatCompletionRequest.model_validate_json(json.dumps(body))
    assert asked.enforces_tools is is_enforced


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice: "),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice names 'other', which tools do not have",
        ),
        ({"tools": TOOLS[:1] * 2}, "tools must have names of their own"),
        ({"tools": [{"type": "retrieval"}]}, "tools.*type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name: String should"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format cannot go with tools that may be called",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "extra_body": {"use_beam_search": True}},
            "tools cannot be enforced with use_beam_search",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "time", "arguments": "no"},
                            }
                        ],
                    }
                ]
            },
            "the arguments of a tool call must be a JSON object, got 'no'",
        ),
    ],
)
def test_tools_that_do_not_go_together_are_refused(
    client: openai.OpenAI, settings: dict[str, Any], message: str
) -> None:
    assert re.search(message, refusal(client, **settings))


def test_a_model_whose_template_knows_no_tools_refuses_them(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    with live_server(LLM(tiny_checkpoint("llama"), EngineConfig(num_blocks=64))) as server:
        body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("tools need a chat template")
        assert answer.json()["error"]["param"] == "tools"


def test_chunks_of_calls_have_the_shape_of_openai(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "stream": True,
        "seed": 1,
        "max_tokens": 200,
    }
    first, *rest, last, done = events(server.post("/v1/chat/completions", body))
    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    [call] = [one["choices"][0]["delta"]["tool_calls"][0] for one in rest]
    assert call.keys() == {"index", "id", "type", "function"}
    assert call["function"].keys() == {"name", "arguments"}
    assert last["choices"][0]["delta"] == {}
