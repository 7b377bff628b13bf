"""`/metrics`: an engine's counters and the latencies of requests, in the format of Prometheus.

Names are those of vLLM with another prefix, where it has one for the same thing. Counters are read
off the engine when they are asked for; latencies are observed as they happen.

Knows names, units and buckets. Does not count anything itself, nor know HTTP beyond its one answer.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvblocks import Stats
from kvruntime.engine import Engine
from kvruntime.errors import KVRuntimeError
from kvruntime.observer import Observer
from kvruntime.server.live import EngineThread
from kvruntime.stats import EngineStats

__all__ = [
    "PREFIX",
    "EngineReading",
    "ServerMetrics",
    "dashboard",
    "engine_metrics",
    "read_engine",
]

PREFIX = "kvruntime:"
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
STATUSES = ("loading", "ready", "draining", "stopped", "failed")
# Seconds. A token takes a millisecond on a fast GPU, and half a second on a slow CPU.
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0),
)
_FIRST_TOKEN_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0),
)
_REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
_LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine counts, and who is in it, at one moment."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int
    counters: EngineStats
    pool: Stats


def read_engine(engine: Engine) -> EngineReading:
    """Read an engine, on its own thread and between two steps. O(samples).

    A request counts once: as running if one of its samples does, else as swapped, else as waiting.
    """
    scheduler = engine.scheduler
    running = {sequence.request for sequence in scheduler.running}
    swapped = {s.request for s in scheduler.waiting if s.is_swapped} - running
    waiting = {sequence.request for sequence in scheduler.waiting} - running - swapped
    return EngineReading(
        num_requests_running=len(running),
        num_requests_waiting=len(waiting),
        num_requests_swapped=len(swapped),
        counters=engine.stats(),
        pool=engine.manager.stats(),
    )


class ServerMetrics(Observer):
    """All metrics of one server, in a registry of its own; it observes the requests of `thread`.

    `rejected` is for what a server refuses before the engine hears of it.
    """

    def __init__(self, thread: EngineThread) -> None:
        self.registry = CollectorRegistry()
        self._thread = thread
        self._engine = _EngineCollector(thread)
        self.registry.register(self._engine)

        def seconds(name: str, what: str, buckets: Iterable[float]) -> Histogram:
            name = f"{PREFIX}{name}_seconds"
            return Histogram(name, what, registry=self.registry, buckets=tuple(buckets))

        def tokens(name: str, what: str) -> Histogram:
            return Histogram(
                f"{PREFIX}{name}", what, registry=self.registry, buckets=_LENGTH_BUCKETS
            )

        self._queue_time = seconds(
            "request_queue_time", "From submission to the first blocks.", _REQUEST_BUCKETS
        )
        self._first_token = seconds(
            "time_to_first_token", "From submission to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._next_token = seconds(
            "inter_token_latency", "Between two tokens of one answer.", _TOKEN_BUCKETS
        )
        self._whole = seconds(
            "e2e_request_latency", "From submission to the end of all answers.", _REQUEST_BUCKETS
        )
        self._step_time = seconds("engine_step", "One step of the engine.", _TOKEN_BUCKETS)
        self._prompt_tokens = tokens("request_prompt_tokens", "Tokens of a request's prompt.")
        self._output_tokens = tokens(
            "request_generation_tokens", "Tokens generated for a request, in all its answers."
        )
        self._ended = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by why: stop, length, abort or error.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._rejected = Counter(
            f"{PREFIX}rejected_requests",
            "Requests that the server refused, by why.",
            ["reason"],
            registry=self.registry,
        )

    def admitted(self, seconds: float) -> None:
        """A request was given its first blocks, so long after it was submitted."""
        self._queue_time.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it was submitted."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An answer has another token, so long after the one before it."""
        self._next_token.observe(seconds)

    def ended(self, seconds: float, reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """A request ended, so long after it was submitted: stop, length, abort or error."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)
        self._prompt_tokens.observe(num_prompt_tokens)
        self._output_tokens.observe(num_tokens)

    def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002 -- the interface's
        """The engine took a step, which lasted so long."""
        self._step_time.observe(seconds)

    def rejected(self, reason: str) -> None:
        """A request was refused, for a reason of a few fixed words."""
        self._rejected.labels(reason).inc()

    async def get(self, _: HTTPRequest) -> Response:
        """`GET /metrics`. Answers with the last known counters where the engine cannot be read.

        Always in the text format: prometheus-client writes colons as underscores in OpenMetrics,
        which Prometheus asks for first, and no dashboard would find the names.
        """
        # Dashboards want to see a server that is loading, and one that has failed.
        with suppress(KVRuntimeError):
            self._engine.reading = await self._thread.call(read_engine)
        return Response(generate_latest(self.registry), headers={"Content-Type": _TEXT_FORMAT})


async def dashboard(_: HTTPRequest) -> Response:
    """`GET /grafana.json`: a dashboard of these metrics, to be imported into Grafana."""
    content = files("kvruntime.server").joinpath("grafana.json").read_bytes()
    return Response(content, media_type="application/json")


class _EngineCollector(Collector):
    """The metrics that are read off an engine; none but the status before the first reading."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.reading: EngineReading | None = None

    def collect(self) -> Iterator[Metric]:
        status = GaugeMetricFamily(
            f"{PREFIX}engine_status", "1 for what the engine is, 0 for the rest.", labels=["status"]
        )
        for name in STATUSES:
            status.add_metric([name], float(name == self._thread.status))
        yield status
        if self.reading is not None:
            yield from engine_metrics(self.reading)


def engine_metrics(reading: EngineReading) -> Iterator[Metric]:
    """The metrics of one reading of an engine."""
    yield from _gauges(reading)
    yield from _counters(reading)


def _gauges(reading: EngineReading) -> Iterator[Metric]:
    pool = reading.pool
    for name, what, value in (
        ("num_requests_running", "Requests that run.", reading.num_requests_running),
        ("num_requests_waiting", "Requests that wait for blocks.", reading.num_requests_waiting),
        ("num_requests_swapped", "Requests in host memory.", reading.num_requests_swapped),
        (
            "kv_cache_usage_perc",
            "The share of blocks that are in use: 1 is all of them. Cached ones can be had.",
            (pool.num_held_blocks + pool.num_fenced_blocks) / pool.num_blocks,
        ),
    ):
        yield GaugeMetricFamily(f"{PREFIX}{name}", what, value)
    for name, what, states in (
        (
            "num_blocks",
            "Blocks of the pool by what they are.",
            {
                "free": pool.num_free_blocks,
                "cached": pool.num_cached_blocks,
                "held": pool.num_held_blocks,
                "fenced": pool.num_fenced_blocks,
            },
        ),
        (
            "num_host_blocks",
            "Blocks of host memory by what they are.",
            {
                "free": pool.num_free_host_blocks,
                "held": pool.num_held_host_blocks,
                "fenced": pool.num_fenced_host_blocks,
            },
        ),
    ):
        family = GaugeMetricFamily(f"{PREFIX}{name}", what, labels=["state"])
        for state, value in states.items():
            family.add_metric([state], value)
        yield family


def _counters(reading: EngineReading) -> Iterator[Metric]:
    counted, pool = reading.counters, reading.pool
    for name, what, value in (
        (
            "prompt_tokens",
            "Tokens of prompts that were computed or found in the cache.",
            counted.num_prefill_tokens + counted.num_cached_tokens,
        ),
        ("prompt_tokens_cached", "Tokens of prompts that were found.", counted.num_cached_tokens),
        ("generation_tokens", "Tokens that were generated.", counted.num_generated_tokens),
        ("prefix_cache_queries", "Tokens looked up in the cache.", pool.num_queried_tokens),
        ("prefix_cache_hits", "Tokens found in the cache.", pool.num_cached_tokens),
        ("engine_steps", "Steps of the engine.", counted.num_steps),
        (
            "deferred_admissions",
            "Requests that had to wait for blocks, once each until they ran.",
            counted.num_deferrals,
        ),
        (
            "admission_bypasses",
            "How often a later request was admitted before a deferred one.",
            counted.num_bypasses,
        ),
        ("forks", "Samples and beams that began with another's blocks.", pool.num_forks),
        ("copy_on_write_copies", "Blocks copied before a write.", pool.num_copies),
        ("evicted_blocks", "Cached blocks whose content was given up.", pool.num_evicted_blocks),
        (
            "swap_fallbacks",
            "Samples that were recomputed for want of host blocks.",
            counted.num_swap_fallbacks,
        ),
    ):
        yield CounterMetricFamily(f"{PREFIX}{name}", what, value)
    for name, what, label, values in (
        (
            "num_preemptions",
            "Samples that had to give their blocks up, by what became of these.",
            "mode",
            {
                "recompute": counted.num_preemptions_recompute,
                "swap": counted.num_preemptions_swap,
            },
        ),
        (
            "swapped_blocks",
            "Blocks copied between the pool and the host.",
            "direction",
            {"out": counted.num_swapped_out_blocks, "in": counted.num_swapped_in_blocks},
        ),
    ):
        family = CounterMetricFamily(f"{PREFIX}{name}", what, labels=[label])
        for labelled, value in values.items():
            family.add_metric([labelled], value)
        yield family
