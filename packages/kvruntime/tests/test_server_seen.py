"""What is seen of a running server: the page, /debug/blocks and /metrics, beside the engine itself."""

import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvruntime import LLM
from kvruntime.engine import Engine
from kvruntime.observer import Observer
from kvruntime.server import ServerSettings
from kvruntime.server.live import snapshot

from .chromium import Chromium, Page, needs_chromium
from .serving import LiveServer, live_server


class Slowly(Observer):
    """Lets nothing end while a test still looks at it."""

    def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002 -- the interface's
        """Wait."""
        time.sleep(0.01)


@pytest.fixture
def server(make_llm: Callable[..., LLM]) -> Iterator[LiveServer]:
    llm = make_llm(num_blocks=400, block_size=4)
    llm.engine._eos_token_ids = frozenset()  # answers of the page are as long as they may be
    with live_server(llm) as running:
        running.async_llm.observers.append(Slowly())
        yield running


def scrape(server: LiveServer, **headers: str) -> dict[str, float]:
    """Every sample as name{labels} -> value."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics", **headers).text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            name = sample.name.removeprefix("kvruntime:")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def complete(server: LiveServer, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True}
    return server.post("/v1/completions", {**body, **fields})


# ── without a browser ────────────────────────────────────────────────────────────────────────


def test_debug_blocks_is_the_snapshot_of_the_engine(server: LiveServer) -> None:
    complete(server)
    server.wait_until(lambda engine: not engine.has_work)
    assert server.get("/debug/blocks").json() == server.ask(snapshot)


def test_latencies_of_a_request_are_in_the_metrics(server: LiveServer) -> None:
    complete(server, n=2)
    found = scrape(server)
    for name, count in {
        "request_queue_time_seconds": 1,
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 2 * 3,
        "e2e_request_latency_seconds": 1,
        "request_prompt_tokens": 1,
        "engine_step_seconds": 4,
    }.items():
        assert found[f"{name}_count"] == count, name
    assert found["request_success_total{finished_reason=length}"] == 1
    assert found["request_generation_tokens_sum"] == 8
    assert found["generation_tokens_total"] == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": -1}, "invalid_field"),
        ({"model": "other"}, "model_not_found"),
        ({"prompt": [1] * 2000}, "invalid_request"),
    ],
)
def test_what_is_refused_is_in_the_metrics(
    server: LiveServer, fields: dict[str, object], reason: str
) -> None:
    assert complete(server, **fields).status_code >= 400
    assert scrape(server)[f"rejected_requests_total{{reason={reason}}}"] == 1


def test_a_path_that_does_not_exist_is_no_refused_request(server: LiveServer) -> None:
    assert server.get("/favicon.ico").status_code == 404
    assert not any(name.startswith("rejected_requests_total") for name in scrape(server))


def test_with_keys_the_page_is_open_and_what_it_shows_is_not(
    make_llm: Callable[..., LLM],
) -> None:
    settings = ServerSettings(model_names=("tiny",), api_keys={"sesame": None})
    with live_server(make_llm(), settings) as running:
        for path in ("/", "/page/main.js"):
            assert running.get(path).status_code == 200
        for path in ("/debug/blocks", "/debug/blocks/stream", "/metrics", "/grafana.json"):
            assert running.get(path).status_code == 401
        assert running.get("/debug/blocks", Authorization="Bearer sesame").status_code == 200


def test_an_engine_that_is_loading_has_metrics_and_no_blocks(
    make_llm: Callable[..., LLM],
) -> None:
    is_wanted = [False]

    def load() -> LLM:
        while not is_wanted[0]:
            time.sleep(0.01)
        return make_llm()

    with live_server(load) as running:
        try:
            assert scrape(running)["engine_status{status=loading}"] == 1
            for path in ("/debug/blocks", "/debug/blocks/stream"):
                assert running.get(path).status_code == 503
        finally:
            is_wanted[0] = True


def test_a_client_that_leaves_a_stream_is_no_error(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    server.wait_until(lambda engine: not engine.has_work)
    assert scrape(server)["request_success_total{finished_reason=abort}"] == 1
    assert caplog.records == []


def test_a_client_that_leaves_is_told_of_in_the_events(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    server.wait_until(lambda engine: not engine.has_work)
    assert server.ask(snapshot)["events"][-1]["kind"] == "aborted"


# ── the page ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Chromium, server: LiveServer) -> Iterator[Page]:
    opened = chromium.open(f"{server.url}/")
    opened.wait_for("document.getElementById('connection').dataset.state === 'live'")
    yield opened
    opened.close()


def say(page: Page, text: str, max_tokens: int = 300) -> None:
    page.evaluate(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.evaluate("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")


@needs_chromium
def test_a_stopped_request_leaves_the_page_the_engine_and_the_metrics(
    page: Page, server: LiveServer
) -> None:
    say(page, "What is a page table?")
    page.wait_for("document.querySelector('#requests canvas')")
    page.wait_for("document.querySelector('.answer .text').textContent")
    during = scrape(server)
    assert during["num_requests_running"] == 1
    assert during["kv_cache_usage_perc"] > 0
    page.click("#stop")
    page.wait_for("!document.querySelector('#requests > li')")
    page.wait_for("document.querySelector('#key-list').innerText.startsWith('held by one 0')")
    after = scrape(server)
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)
    assert after["request_success_total{finished_reason=abort}"] == 1
    assert server.ask(lambda engine: engine.stats().num_leaked_blocks) == 0
    assert page.complaints == []


@needs_chromium
def test_a_request_that_ends_leaves_the_page(page: Page) -> None:
    say(page, "What is a page table?", max_tokens=12)
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    page.wait_for("!document.querySelector('#requests > li')")
    page.wait_for("document.querySelector('#events').innerText.includes('finished: length')")
    assert "cut off at the longest answer" in page.text(".answer .facts")
    assert page.complaints == []


@needs_chromium
def test_samples_share_their_prompt_and_copy_on_write(page: Page) -> None:
    page.evaluate("document.getElementById('samples').value = 3")
    say(page, "What is a page table?")
    page.wait_for("document.querySelectorAll('#requests canvas').length === 3")
    page.wait_for("document.querySelector('#events').innerText.includes('copied on write')")
    shared = page.evaluate(
        "[...document.querySelectorAll('#requests canvas')].map((e) => e.ariaLabel.split('; ')[1])"
    )
    assert len(set(shared)) == 1
    assert shared[0] != "0 shared"
    # The answers learn which request they are of from their own stream.
    page.wait_for("document.querySelectorAll('.answer:is(.c0, .c1, .c2)').length === 3")


@needs_chromium
def test_the_same_prompt_four_times_is_computed_once(page: Page, server: LiveServer) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 400")
    page.evaluate("document.getElementById('message').focus()")
    page.type("What is a page table?")
    page.click("#send-four")
    page.wait_for(
        "[...document.querySelectorAll('#requests .facts')]"
        ".filter((each) => each.textContent.includes('found cached')).length === 3"
    )
    assert max(server.ask(snapshot)["ref_counts"]) == 4
    page.click("#stop")
    page.wait_for("!document.querySelector('#requests > li')")


@needs_chromium
def test_the_page_says_who_holds_what_as_the_engine_does(page: Page, server: LiveServer) -> None:
    say(page, "What is a page table?", max_tokens=8)
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    found = server.ask(snapshot)
    page.wait_for(
        f"document.querySelector('#key-list').innerText.includes('cached {found['num_cached']}')"
    )
    assert f"free {found['num_free']}" in page.text("#key-list")
