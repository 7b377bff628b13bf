"""`/metrics`: what it reads off an engine, and what it observes of requests."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from kvruntime.engine import Engine
from kvruntime.errors import InvalidRequest
from kvruntime.server.metrics import PREFIX, ServerMetrics, dashboard, read_engine

from .test_server_live import Thread, add, engine_of

T = TypeVar("T")


def scrape(metrics: ServerMetrics) -> dict[str, float]:
    """Every sample as name{label} -> value, as a Prometheus would read it."""
    app = Starlette(routes=[Route("/metrics", metrics.get)])
    text = TestClient(app).get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            name = sample.name.removeprefix("kvruntime:")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def metrics_of(engine: Engine) -> dict[str, float]:
    return scrape(ServerMetrics(Thread(engine)))


def test_requests_count_once_by_where_they_stand() -> None:
    engine = engine_of(max_num_seqs=3)
    add(engine, 0, 6, n=3)
    add(engine, 1, 6)
    add(engine, 2, 6)
    engine.step()
    found = metrics_of(engine)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 2)


def pressed(preemption: str) -> Engine:
    """An engine in which a request had to give its blocks up."""
    engine = engine_of(6, preemption=preemption, num_host_blocks=6, prefix_caching=False)
    add(engine, 0, 8)
    add(engine, 1, 8)
    while not engine.stats().num_preemptions_recompute + engine.stats().num_preemptions_swap:
        engine.step()
    return engine


def test_who_is_swapped_out_does_not_count_as_waiting() -> None:
    found = metrics_of(pressed("swap"))
    assert [found[f"num_requests_{state}"] for state in ("running", "waiting", "swapped")] == [
        1,
        0,
        1,
    ]


@pytest.mark.parametrize(("mode", "other"), [("recompute", "swap"), ("swap", "recompute")])
def test_preemptions_are_told_apart_by_mode(mode: str, other: str) -> None:
    found = metrics_of(pressed(mode))
    assert found[f"num_preemptions_total{{mode={mode}}}"] == 1
    assert found[f"num_preemptions_total{{mode={other}}}"] == 0


def test_cached_blocks_do_not_count_as_used() -> None:
    engine = engine_of(16)
    done = add(engine, 0, 8)
    add(engine, 1, 6)
    engine.step()
    engine.abort(done)
    found = metrics_of(engine)
    assert found["kv_cache_usage_perc"] == 2 / 16
    assert found["num_blocks{state=cached}"] == 2
    assert found["num_blocks{state=free}"] == 12


def test_a_request_that_ends_gives_its_blocks_back_in_the_metrics() -> None:
    engine = engine_of()
    request = add(engine, 0, 9, n=2)
    engine.step()
    before = metrics_of(engine)
    engine.abort(request)
    after = metrics_of(engine)
    assert before["num_requests_running"], before["kv_cache_usage_perc"] > 0
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)


def test_the_prefix_cache_counts_tokens() -> None:
    engine = engine_of(32)
    add(engine, 0, 9)
    engine.step()
    add(engine, 1, 9, first=0)
    engine.step()
    found = metrics_of(engine)
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (18, 8)
    assert (found["prompt_tokens_total"], found["prompt_tokens_cached_total"]) == (18, 8)


def test_policies_are_counted() -> None:
    engine = engine_of(8)
    add(engine, 0, 14, n=2)
    engine.step()
    engine.step()
    add(engine, 1, 26)
    engine.step()
    found = metrics_of(engine)
    assert found["deferred_admissions_total"] == 1
    assert found["copy_on_write_copies_total"] == found["forks_total"] == 1
    assert found["engine_steps_total"] == 3


def test_evictions_are_counted() -> None:
    engine = engine_of(8)
    for request_id in range(3):
        request = add(engine, request_id, 15, first=request_id * 3)
        engine.step()
        engine.abort(request)
    assert metrics_of(engine)["evicted_blocks_total"] == 2


def test_latencies_are_observed() -> None:
    engine = engine_of()
    metrics = ServerMetrics(Thread(engine))
    metrics.stepped(engine, 0.25)
    metrics.admitted(0.02)
    metrics.first_token(0.3)
    metrics.next_token(0.04)
    metrics.next_token(0.06)
    metrics.ended(1.7, "length", 9, 4)
    found = scrape(metrics)
    for name, total, count in (
        ("request_queue_time_seconds", 0.02, 1),
        ("time_to_first_token_seconds", 0.3, 1),
        ("inter_token_latency_seconds", 0.1, 2),
        ("engine_step_seconds", 0.25, 1),
        ("e2e_request_latency_seconds", 1.7, 1),
        ("request_prompt_tokens", 9, 1),
        ("request_generation_tokens", 4, 1),
    ):
        assert found[f"{name}_sum"] == pytest.approx(total)
        assert found[f"{name}_count"] == count
    assert found["request_success_total{finished_reason=length}"] == 1


def test_a_latency_falls_into_its_bucket() -> None:
    metrics = ServerMetrics(Thread(engine_of()))
    metrics.first_token(0.3)
    found = scrape(metrics)
    assert found["time_to_first_token_seconds_bucket{le=0.25}"] == 0
    assert found["time_to_first_token_seconds_bucket{le=0.5}"] == 1


def test_what_a_server_refuses_is_counted_by_reason() -> None:
    metrics = ServerMetrics(Thread(engine_of()))
    metrics.rejected("queue full")
    assert scrape(metrics)["rejected_requests_total{reason=queue full}"] == 1


def test_an_engine_that_cannot_be_read_leaves_its_last_counters() -> None:
    engine = engine_of()
    thread = Thread(engine)
    metrics = ServerMetrics(thread)
    add(engine, 0, 6)
    engine.step()
    scrape(metrics)

    async def call(_: Callable[[Engine], Any]) -> Any:
        raise InvalidRequest("the engine is gone")

    thread.call = call  # type: ignore[method-assign,assignment]  # as an engine that failed
    thread.status = "failed"
    found = scrape(metrics)
    assert found["engine_steps_total"] == 1
    assert found["engine_status{status=failed}"] == 1
    assert found["engine_status{status=ready}"] == 0


def test_two_servers_do_not_share_their_metrics() -> None:
    one, other = ServerMetrics(Thread(engine_of())), ServerMetrics(Thread(engine_of()))
    one.rejected("queue full")
    assert "rejected_requests_total{reason=queue full}" not in scrape(other)


# What Prometheus 2 and 3 say that they take.
ACCEPTS = [
    (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "*/*",
]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_names_keep_their_colon_whatever_is_asked_for(accept: str) -> None:
    app = Starlette(routes=[Route("/metrics", everything().get)])
    answer = TestClient(app).get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert {line.startswith(PREFIX) for line in samples} == {True}


def test_reading_changes_nothing() -> None:
    engine = engine_of()
    add(engine, 0, 6)
    engine.step()
    assert read_engine(engine) == read_engine(engine)


# ── the dashboard ────────────────────────────────────────────────────────────────────────────


def everything() -> ServerMetrics:
    """Metrics of which each has been observed."""
    engine = engine_of()
    metrics = ServerMetrics(Thread(engine))
    metrics.admitted(1)
    metrics.rejected("queue_full")
    metrics.ended(1, "stop", 1, 1)
    return metrics


def exposed() -> dict[str, set[str]]:
    """The names of all samples, each with its labels."""
    app = Starlette(routes=[Route("/metrics", everything().get)])
    text = TestClient(app).get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    app = Starlette(routes=[Route("/grafana.json", dashboard)])
    board = TestClient(app).get("/grafana.json").json()
    variables = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]] + variables


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_of_the_dashboard_exists(expression: str) -> None:
    names = re.findall(rf"{PREFIX}\w+", expression)
    assert names
    known = exposed()
    assert set(names) <= set(known)
    grouped = {label for found in re.findall(r"by \((\w+)\)", expression) for label in [found]}
    assert grouped <= set().union(*(known[name] for name in names))


def test_the_dashboard_shows_all_there_is() -> None:
    shown = set(re.findall(rf"{PREFIX}\w+", " ".join(expressions())))
    unshown = {
        name
        for name in exposed()
        if not name.endswith(("_created", "_sum", "_count")) and name not in shown
    }
    # How long prompts and answers are says nothing of the server.
    assert unshown == {f"{PREFIX}request_{kind}_tokens_bucket" for kind in ("prompt", "generation")}


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    app = Starlette(routes=[Route("/grafana.json", dashboard)])
    taken: set[tuple[int, int]] = set()
    for panel in TestClient(app).get("/grafana.json").json()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
