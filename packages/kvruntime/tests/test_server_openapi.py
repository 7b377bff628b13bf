"""What the server says of itself, and requests that schemathesis makes of it."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from kvruntime import LLM
from kvruntime.server import ServerSettings, routes
from kvruntime.server.openapi import describe

from .fuzz_server import fuzz, small_server
from .serving import live_server


def test_every_path_of_the_api_is_described() -> None:
    paths = {route.path.replace(":path", "") for route in routes if isinstance(route, Route)}
    assert paths <= set(describe(ServerSettings())["paths"])


def test_a_server_describes_itself_and_its_models(make_llm: Callable[..., LLM]) -> None:
    settings = ServerSettings(model_names=("tiny", "alias"))
    with live_server(make_llm(), settings) as server:
        described = server.get("/openapi.json").json()
    assert described == json.loads(json.dumps(describe(settings)))
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        fields = described["components"]["schemas"][name]["properties"]
        assert fields["model"]["enum"] == ["tiny", "alias"]
    assert "security" not in described


def test_keys_and_hosts_are_described_where_they_are_asked_for() -> None:
    settings = ServerSettings(api_keys={"key": None}, allowed_hosts=("localhost",))
    described = describe(settings)
    assert described["security"] == [{"key": []}]
    assert "key" in described["components"]["securitySchemes"]
    assert {"401", "421"} <= described["paths"]["/v1/completions"]["post"]["responses"].keys()
    plain = describe(ServerSettings())["paths"]["/v1/completions"]["post"]["responses"]
    assert not {"401", "421"} & plain.keys()


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        ({"model": "kvruntime", "prompt": "x"}, True),
        ({"model": "kvruntime", "prompt": "x", "n": None, "seed": None}, True),
        ({"model": "kvruntime", "prompt": [1, 2]}, True),
        ({"model": "other", "prompt": "x"}, False),
        ({"model": "kvruntime"}, False),
        ({"model": "kvruntime", "prompt": None}, False),
        ({"model": "kvruntime", "prompt": "x", "temperature": -1}, False),
        ({"model": "kvruntime", "prompt": "x", "unknown": 1}, False),
        ({"model": "kvruntime", "prompt": "x", "response_format": {"type": "xml"}}, False),
    ],
)
def test_the_schema_of_a_body_says_what_is_taken(body: dict[str, Any], is_valid: bool) -> None:  # noqa: FBT001 -- pytest's
    described = describe(ServerSettings())
    schema = {"$ref": "#/components/schemas/CompletionRequest", **described}
    assert jsonschema_rs.is_valid(schema, body) is is_valid


def test_no_request_is_answered_by_a_fault_of_the_server() -> None:
    with small_server() as server:
        statuses = fuzz(server, seed=3, num_cases=100)
    assert {name.rsplit(" ", 1)[1] for name in statuses} >= {"200", "400", "404", "415"}
