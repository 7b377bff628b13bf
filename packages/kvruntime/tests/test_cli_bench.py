"""`kvruntime bench` on the command line, against a small server on this machine."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvruntime.cli import main

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.applications import Starlette  # noqa: E402 -- an extra that may be missing
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, Response, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

TIMEOUT = 60  # seconds; only a hang reaches it


@dataclass
class Server:
    """What the server was asked, and how it answers: full for every third, or never."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_full: Callable[[int], bool] = lambda _: False
    is_stuck: Callable[[int], bool] = lambda _: False

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        if self.is_full(number):
            return JSONResponse({"error": {"message": "the queue is full"}}, 429)
        return StreamingResponse(
            self._events(body["max_tokens"], number), media_type="text/event-stream"
        )

    async def _events(self, num_tokens: int, number: int) -> AsyncIterator[str]:
        for index in range(num_tokens):
            reason = "length" if index == num_tokens - 1 else None
            choice = {"index": 0, "text": "a", "delta": {"content": "a"}, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            await asyncio.sleep(TIMEOUT if self.is_stuck(number) else 0)
        usage = {"prompt_tokens": 8, "completion_tokens": num_tokens}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server that runs in a thread of its own."""
    scripted = Server()
    routes = [
        Route("/v1/models", scripted.models),
        Route("/v1/completions", scripted.complete, methods=["POST"]),
        Route("/v1/chat/completions", scripted.complete, methods=["POST"]),
    ]
    listening = socket.create_server(("127.0.0.1", 0))
    scripted.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(
        Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    yield scripted
    running.should_exit = True
    thread.join(TIMEOUT)
    listening.close()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function from arguments to the exit code and what was printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvruntime", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_json_has_the_figures_of_a_load(server: Server, run: Run) -> None:
    arguments = ["--num-prompts", "6", "--output-len", "3", "--request-rate", "inf", "--json"]
    code, out, err = run("bench", "serve", "--url", server.url, *arguments)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["requests"] == {
        "completed": 6,
        "rejected": 0,
        "failed": 0,
        "unfinished": 0,
        "not_sent": 0,
    }
    assert told["tokens"] == {"prompt": 48, "cached": 0, "output": 18}
    assert told["server"] == {
        "url": f"{server.url}/v1",
        "model": "scripted",
        "endpoint": "completions",
    }
    assert told["load"]["request_rate"] == "inf"
    assert len(told["records"]) == 6


def test_the_warm_up_is_asked_and_not_counted(server: Server, run: Run) -> None:
    arguments = ["--num-prompts", "2", "--output-len", "3", "--warmup", "3", "--json"]
    code, out, _ = run("bench", "serve", "--url", server.url, *arguments)
    assert code == 0
    assert [body["max_tokens"] for body in server.bodies] == [2, 2, 2, 3, 3]
    assert json.loads(out)["requests"]["completed"] == 2


def test_refusals_are_counted_apart(server: Server, run: Run) -> None:
    server.is_full = lambda number: number % 3 == 0
    arguments = ["--num-prompts", "6", "--output-len", "3", "--max-concurrency", "1"]
    code, out, _ = run("bench", "serve", "--url", server.url, *arguments)
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert " 4 " in rows["completed"]
    assert " 2 " in rows["rejected"]
    assert "2x 429: the queue is full" in out


def test_where_nothing_is_answered_the_exit_code_says_so(server: Server, run: Run) -> None:
    server.is_full = lambda _: True
    code, out, _ = run("bench", "serve", "--url", server.url, "--num-prompts", "2", "--warmup", "0")
    assert code == 1
    assert "2x 429: the queue is full" in out


def test_chat_sends_words(server: Server, run: Run) -> None:
    arguments = ["--num-prompts", "1", "--input-len", "5", "--endpoint", "chat", "--json"]
    code, _, _ = run("bench", "serve", "--url", server.url, *arguments)
    assert code == 0
    [message] = server.bodies[-1]["messages"]
    assert len(message["content"].split()) == 5


def test_fields_of_the_request_can_be_given(server: Server, run: Run) -> None:
    arguments = ["--num-prompts", "1", "--extra", '{"top_k": 7}', "--ignore-eos", "--json"]
    run("bench", "serve", "--url", server.url, *arguments)
    body = server.bodies[-1]
    assert (body["top_k"], body["ignore_eos"]) == (7, True)
    assert "temperature" not in body


def test_a_plot_is_a_picture(server: Server, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    server.is_full = lambda number: number % 3 == 0
    path = tmp_path / "load.png"
    arguments = ["--num-prompts", "6", "--goodput", "ttft:50", "--plot", str(path)]
    code, _, _ = run("bench", "serve", "--url", server.url, *arguments)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--endpoint", "embeddings"], "endpoint must be one of completions, chat, got 'embeddi"),
        (["--extra", "[]"], "--extra must be a JSON object, got '[]'"),
        (["--percentiles", "50,x"], "percentiles must be numbers from 0 to 100, got '50,x'"),
        (["--goodput", "ttft"], "goodput must be NAME:MS"),
        (["--request-rate", "0"], "the request rate must be above 0"),
        (["--trace", "no/such/file"], "No such file"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1"),
        (["--url", "http://127.0.0.1:99999"], "url must be the address of a server"),
        (["--timeout", "nan"], "timeout must be above 0, got nan"),
        (["--api-key", "sk-é"], "an API key must be printable ASCII"),
        (["--url", "nonsense"], "no server answers at nonsense/v1"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, server: Server, run: Run
) -> None:
    code, out, err = run("bench", "serve", "--url", server.url, "--num-prompts", "1", *arguments)
    assert (code in {1, 2}, out) == (True, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_plot_of_no_format_is_refused_before_anything_is_sent(server: Server, run: Run) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = run("bench", "serve", "--url", server.url, "--plot", "load.doc")
    assert code == 2
    assert "a plot is one of" in err
    assert server.bodies == []


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("httpx", []), ("matplotlib.figure", ["--plot", "load.png"])],
)
def test_a_missing_extra_is_one_sentence(
    module: str, arguments: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("client", "plot"):
        monkeypatch.delitem(sys.modules, f"kvruntime.bench.{name}", raising=False)
        monkeypatch.delattr(f"kvruntime.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = run("bench", "serve", "--num-prompts", "1", *arguments)
    assert code == 2
    assert err.endswith("which is not installed: pip install 'kvruntime[bench]'\n")


def test_ctrl_c_shows_what_was_measured(server: Server) -> None:
    server.is_stuck = lambda number: number > 3
    command = [sys.executable, "-m", "kvruntime", "bench", "serve", "--url", server.url, "--json"]
    arguments = ["--num-prompts", "5", "--warmup", "0", "--output-len", "2"]
    arguments += ["--max-concurrency", "1"]  # so that three are over when the fourth is asked
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT
    while len(server.bodies) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    counts = json.loads(out)["requests"]
    assert (counts["completed"], counts["unfinished"], counts["not_sent"]) == (3, 1, 1)


def test_throughput_counts_the_tokens_of_a_batch(
    tiny_checkpoint: Callable[[str], Path], run: Run
) -> None:
    arguments = [
        "--num-prompts",
        "3",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--prefix-len",
        "32",
    ]
    code, out, _ = run(
        "bench", "throughput", "--model", str(tiny_checkpoint("llama")), *arguments, "--json"
    )
    assert code == 0
    told = json.loads(out)
    assert (told["num_requests"], told["num_prompt_tokens"], told["num_output_tokens"]) == (
        3,
        120,
        12,
    )
    assert told["stats"]["num_leaked_blocks"] == 0


def test_throughput_is_a_table_for_people(tiny_checkpoint: Callable[[str], Path], run: Run) -> None:
    arguments = ["--num-prompts", "2", "--output-len", "2"]
    code, out, _ = run("bench", "throughput", "--model", str(tiny_checkpoint("llama")), *arguments)
    assert code == 0
    assert "output tokens a second" in out


def test_throughput_takes_no_messages(
    tiny_checkpoint: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    model = str(tiny_checkpoint("llama"))
    code, _, err = run("bench", "throughput", "--model", model, "--prompts", str(path))
    assert code == 2
    assert "with texts or token ids, not with messages" in err
