"""Requests that nobody would think of, against a live server, as many as asked for.

    nox -s fuzz -- server --seed 1 --cases 2000

Schemathesis makes them of `/openapi.json`: some that fit it, and some that do not, in one thing or
another. Beside them stand bodies that are no JSON, or long, or said to be something else. No answer
may be a fault of the server, all must be what the description says, and the pool is whole in the end.

Knows what may be asked and must hold. Does not know how requests are served.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from kvruntime import LLM, EngineConfig
from kvruntime.server import ServerSettings

from .conftest import save_checkpoint
from .serving import LiveServer, live_server
from .tool_templates import TEMPLATES

__all__ = ["fuzz", "small_server"]

MAX_BODY_BYTES = 50_000
_TOO_LARGE = 413
POSTS = ("/v1/completions", "/v1/chat/completions")
PATHS = (
    *POSTS,
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/ready",
    "/metrics",
    "/debug/blocks",
    "/openapi.json",
)
CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@contextmanager
def small_server() -> Iterator[LiveServer]:
    """Serve a tiny model that knows tools, whose longest answers are short."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
        config = EngineConfig(num_blocks=48, block_size=8, max_model_len=128, max_num_seqs=8)
        settings = ServerSettings(model_names=("tiny",), max_body_bytes=MAX_BODY_BYTES)
        with live_server(LLM(folder, config), settings) as server:
            yield server


def fuzz(server: LiveServer, *, seed: int, num_cases: int) -> Counter[str]:
    """Send so many requests, and count the statuses of the answers; a fault is an AssertionError."""
    statuses = Counter[str]()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    assert set(schema) == set(PATHS)
    # Most for what has a body, which is where there is something to get wrong.
    num_each = -(-num_cases // (len(POSTS) * 3))
    num_others = -(-num_each // 10)
    for path in PATHS:
        is_post = path in POSTS
        operation = schema[path]["POST" if is_post else "GET"]
        for mode in GenerationMode if is_post else [GenerationMode.POSITIVE]:
            cases = operation.as_strategy(generation_mode=mode)
            num = num_each if is_post else num_others
            _each(cases, seed, num, partial(_send, server, statuses))
    for path in POSTS:
        check = partial(_post, server, path, statuses)
        _each(_bodies(), seed, num_each, check)
    server.wait_until(lambda engine: not engine.has_work)
    stats = server.ask(lambda engine: engine.stats())
    assert stats.num_leaked_blocks == 0
    assert server.get("/ready").status_code == 200
    return statuses


def _each(
    strategy: st.SearchStrategy[Any], seed: int, num_cases: int, check: Callable[[Any], None]
) -> None:
    """Check so many examples, which follow from the seed."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


def _send(server: LiveServer, statuses: Counter[str], case: Case[Any]) -> None:
    response = case.call(base_url=server.url, timeout=60)
    statuses[f"{case.operation.path} {response.status_code}"] += 1
    # A long body is refused whatever it says.
    excluded: list[Any] = (
        [checks.negative_data_rejection] if response.status_code == _TOO_LARGE else []
    )
    case.validate_response(response, checks=CHECKS, excluded_checks=excluded)


def _bodies() -> st.SearchStrategy[tuple[bytes, str]]:
    """Bodies that are no request, and what they are said to be."""
    valid = json.dumps({"model": "tiny", "prompt": "x", "messages": [{"role": "user"}]}).encode()
    cut = st.integers(0, len(valid) - 1).map(lambda end: valid[:end])
    flipped = st.tuples(st.integers(0, len(valid) - 1), st.integers(1, 255)).map(
        lambda at: valid[: at[0]] + bytes([valid[at[0]] ^ at[1]]) + valid[at[0] + 1 :]
    )
    deep = st.integers(1, 20_000).map(lambda depth: b"[" * depth)
    nested = st.integers(1, 5_000).map(
        lambda depth: b'{"model": "tiny", "prompt": ' + b"[" * depth + b"]" * depth + b"}"
    )
    long = st.integers(0, 3 * MAX_BODY_BYTES).map(
        lambda length: b'{"model": "' + b"x" * length + b'", "prompt": "x", "messages": []}'
    )
    number = st.integers(1, 10_000).map(
        lambda length: b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * length + b"}"
    )
    body = st.one_of(st.binary(), cut, flipped, deep, nested, long, number)
    kinds = ["application/json", "application/json; charset=utf-16", "text/plain", "", "a/b/c"]
    return st.tuples(body, st.sampled_from(kinds))


def _post(
    server: LiveServer, path: str, statuses: Counter[str], message: tuple[bytes, str]
) -> None:
    body, content_type = message
    headers = {"Content-Type": content_type}
    response = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=60)
    statuses[f"{path} {response.status_code}"] += 1
    assert response.status_code in {200, 400, 404, 413, 415}, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def main(arguments: list[str] | None = None) -> int:
    """Send requests, and print the statuses that came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}, {options.cases} cases", flush=True)
    with small_server() as server:
        statuses = fuzz(server, seed=options.seed, num_cases=options.cases)
    for name in sorted(statuses):
        print(f"{statuses[name]:>8,}  {name}")
    print(f"{statuses.total():>8,}  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
