"""`kvruntime serve` as a process: what it says, how it is asked, and how signals end it."""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

TIMEOUT = 120  # seconds; only a hang reaches it
LONG = {"model": "tiny", "prompt": [5, 6, 7], "n": 16, "seed": 0, "ignore_eos": True}


@dataclass
class Process:
    """A server in a process of its own, and what it has said."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        """Collect what it says until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until a line says so."""

        def found() -> re.Match[str] | None:
            matches = (re.fullmatch(pattern, line) for line in self.lines)
            return next((match for match in matches if match), None)

        with self._news:
            assert self._news.wait_for(lambda: found() is not None, TIMEOUT), self.lines
            match = found()
        assert match is not None
        return match

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.wait_for(r"listening on (http://127\.0\.0\.1:\d+)")[1]

    def end(self, *signals: signal.Signals) -> int:
        """Send signals and wait for the end; its exit code."""
        for one in signals:
            self.process.send_signal(one)
        return self.process.wait(TIMEOUT)


def serving(folder: Path, *options: str, **variables: str) -> AbstractContextManager[Process]:
    command = ["-m", "kvruntime", "serve", "--model", str(folder), "--port", "0"]
    return started([*command, "--served-model-name", "tiny", *options], **variables)


@contextmanager
def started(arguments: list[str], **variables: str) -> Iterator[Process]:
    """A process of Python that serves."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **variables},
    ) as process:
        server = Process(process)
        listener = threading.Thread(target=server.listen)
        listener.start()
        try:
            yield server
        finally:
            process.kill()
            listener.join()


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("llama")


def wait_until_running(url: str, num_requests: int) -> None:
    while len(httpx.get(f"{url}/debug/blocks", timeout=TIMEOUT).json()["requests"]) < num_requests:
        pass


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvruntime", "serve", "--model", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "LANG": "C.UTF-8"},
        check=False,
    )


def test_it_says_what_it_does_and_a_signal_ends_what_runs_first(folder: Path) -> None:
    """And while what runs is finished, others are told that they are too late."""
    with serving(folder, "--num-blocks", "600") as server:
        url = server.url
        server.wait_for(r"ready after \d+\.\d s: 600 blocks of 16 tokens, 512 tokens a request .*")
        assert server.lines[0].startswith("kvruntime 0.")
        assert not [line for line in server.lines if "anybody" in line]
        # A page elsewhere that has its name resolved to this machine does not get in.
        for host, status in (("localhost:1", 200), ("evil.example", 421)):
            answer = httpx.get(f"{url}/health", headers={"Host": host}, timeout=TIMEOUT)
            assert answer.status_code == status
        body: dict[str, Any] = {**LONG, "max_tokens": 400, "stream": True}
        with (
            httpx.Client(timeout=TIMEOUT) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as response,
        ):
            received = response.iter_lines()
            next(received)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("SIGTERM: what runs is finished first; once more aborts it")
            refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=TIMEOUT)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            text = "\n".join(received)
        assert text.count('"finish_reason":"length"') == 16
        assert text.rstrip().endswith("data: [DONE]")
        assert server.end() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""


def test_a_second_signal_aborts_what_runs(folder: Path) -> None:
    body: dict[str, Any] = {**LONG, "max_tokens": 500, "n": 32}
    with serving(folder, "--num-blocks", "2100") as server, ThreadPoolExecutor() as pool:
        url = server.url
        server.wait_for("ready after .*")
        streamed, whole = (
            pool.submit(
                httpx.post,
                f"{url}/v1/completions",
                json={**body, "stream": stream},
                timeout=TIMEOUT,
            )
            for stream in (True, False)
        )
        wait_until_running(url, 2)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("SIGINT: what runs is finished first; once more aborts it")
        assert server.end(signal.SIGINT) == 1
        assert "SIGINT: what runs is aborted" in server.lines
        assert '"code": "unavailable"' in streamed.result().text.splitlines()[-2]
        assert whole.result().status_code == 503


def test_a_drain_has_an_end(folder: Path) -> None:
    body: dict[str, Any] = {**LONG, "max_tokens": 500, "n": 64}
    options = ("--num-blocks", "2100", "--drain-seconds", "0.1")
    with serving(folder, *options) as server, ThreadPoolExecutor() as pool:
        url = server.url
        server.wait_for("ready after .*")
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=TIMEOUT)
        wait_until_running(url, 1)
        assert server.end(signal.SIGTERM) == 1
        assert asked.result().status_code == 503


# Loads when it is told to, by a line on its standard input.
LOADS_LATER = """
import os, sys
from kvruntime import LLM, EngineConfig
from kvruntime.server.run import run
from kvruntime.server.settings import ServerSettings

def load():
    os.read(0, 1)
    return LLM(sys.argv[1], EngineConfig(num_blocks=16))

options = {"host": "127.0.0.1", "port": 0, "drain_seconds": 60, "access_log": False}
sys.exit(not run(load, ServerSettings(), **options))
"""


def test_a_server_at_rest_needs_no_time_to_drain(folder: Path) -> None:
    with serving(folder, "--drain-seconds", "0") as server:
        server.wait_for("ready after .*")
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("is_loaded_then", [False, True])
def test_a_signal_while_the_model_loads_ends_it(folder: Path, *, is_loaded_then: bool) -> None:
    """Even if the model is there in the meantime, which is too late to be told."""
    with started(["-c", LOADS_LATER, str(folder)]) as server:
        answer = httpx.get(f"{server.url}/health", timeout=TIMEOUT)  # so that it takes signals
        assert answer.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: what runs is finished first; .*")
        if is_loaded_then:
            assert server.process.stdin is not None
            server.process.stdin.write("\n")
            server.process.stdin.flush()
        assert server.end() == 0
    assert not [line for line in server.lines if line.startswith("ready")]


def test_keys_come_from_three_places_and_neither_they_nor_prompts_are_logged(
    folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# staging\nsk-file acme\n\n  # sk-old\nsk-plain\n")
    options = ("--api-key", "sk-option", "--api-key-file", str(keys), "--access-log")
    with serving(folder, *options, KVRUNTIME_API_KEY="sk-environment") as server:
        url = server.url

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT).status_code

        for key in ("sk-option", "sk-environment", "sk-file", "sk-plain"):
            assert status(key) == 200
        for key in ("acme", "#", "sk-old"):
            assert status(key) == 401
        server.wait_for(r'.* "GET /v1/models HTTP/1.1" 401')
        server.wait_for("ready after .*")
        body = {"model": "tiny", "prompt": "a secret", "max_tokens": 1}
        headers = {"Authorization": "Bearer sk-file"}
        for fields, expected in (({}, 200), ({"n": "a secret"}, 400)):
            answer = httpx.post(
                f"{url}/v1/completions", json={**body, **fields}, headers=headers, timeout=TIMEOUT
            )
            assert answer.status_code == expected
        server.wait_for(r'.* "POST /v1/completions HTTP/1.1" 400.*')
        assert server.end(signal.SIGTERM) == 0
    assert not [line for line in server.lines if "sk-" in line or "secret" in line]


@pytest.mark.skipif(
    sys.platform != "linux", reason="limits of a process are read as Linux tells them"
)
def test_it_may_have_as_many_files_as_requests(folder: Path) -> None:
    with_few = (
        "import resource as r, runpy\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "runpy.run_module('kvruntime', run_name='__main__')"
    )
    with started(["-c", with_few, "serve", "--model", str(folder), "--port", "0"]) as server:
        server.wait_for("ready after .*")
        limits = Path(f"/proc/{server.process.pid}/limits").read_text("utf-8")
    assert int(re.findall(r"Max open files +(\d+)", limits)[0]) >= 1000


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(folder, "--port", str(port))
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", "--port", "0")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("kvruntime: ")
    assert "nothing" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-num-waiting", "0"), "max_num_waiting must be an integer of at least 1, got 0"),
        (("--policy", "fair"), 'policy must be "fcfs" or "priority", got \'fair\''),
        (("--api-key", ""), "an API key must be printable ASCII and not empty"),
        (("--drain-seconds", "nan"), "drain_seconds must not be negative, got nan"),
        (("--request-seconds", "-1"), "request_seconds must not be negative, got -1.0"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    folder: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(folder, *options)
    assert result.returncode == 2
    assert result.stderr == f"kvruntime: {message}\n"


def test_a_file_of_keys_that_is_no_such_file_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one acme and others\n")
    result = run(folder, "--api-key-file", str(keys))
    assert result.returncode == 2
    assert "line 1: a line must be a key, or a key and a tenant, got 4 words" in result.stderr
    keys.write_bytes(b"sk-\xff\n")
    result = run(folder, "--api-key-file", str(keys))
    assert result.returncode == 2
    assert result.stderr == f"kvruntime: {keys} must be a text in UTF-8: invalid start byte\n"
    keys.write_text("\n# none\n")
    assert "must have at least one key, got none" in run(folder, "--api-key-file", str(keys)).stderr
