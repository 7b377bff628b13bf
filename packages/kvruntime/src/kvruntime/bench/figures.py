"""What the times of requests say: latencies, throughput, goodput.

Knows arithmetic on records. Does not know servers, clocks or terminals. Times are in seconds here;
people are shown milliseconds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from kvruntime.errors import InvalidRequest

__all__ = ["METRICS", "Distribution", "Outcome", "Record", "Summary", "parse_goodput", "summarize"]


class Outcome(StrEnum):
    """What became of a request: REJECTED is status 429, UNFINISHED what Ctrl-C cut off."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass(slots=True)
class Record:
    """When the parts of one answer came, and how many tokens the server says there were.

    `arrival` is when the request was due and `sent` when it went, later where requests had to wait for
    a seat. `chunk_times` has one entry for each event that carried output; an answer without any has
    the time of its end.
    """

    arrival: float
    sent: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    ended: float | None = None
    outcome: Outcome = Outcome.UNFINISHED
    http_status: int | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int | None = None

    def count_from(self, start: float) -> None:
        """Let the times of a clock count from `start`, as `arrival` does."""
        self.sent = None if self.sent is None else self.sent - start
        self.ended = None if self.ended is None else self.ended - start
        self.chunk_times = [time - start for time in self.chunk_times]

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came, and its tokens are known."""
        return self.outcome is Outcome.COMPLETED

    @property
    def waited(self) -> float | None:
        """Seconds between when it was due and when it was sent."""
        return None if self.sent is None else self.sent - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first event with output."""
        if self.sent is None or not self.chunk_times:
            return None
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: from sending to the last event with output."""
        return None if self.sent is None or self.ended is None else self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token: what follows the first token, shared among the tokens after it."""
        if self.e2el is None or self.ttft is None or (self.num_output_tokens or 0) < 2:
            return None
        return (self.e2el - self.ttft) / ((self.num_output_tokens or 0) - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between events, each of one token or more."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def normalized_latency(self) -> float | None:
        """End-to-end latency a generated token, the measure of the PagedAttention paper."""
        if self.e2el is None or not self.num_output_tokens:
            return None
        return self.e2el / self.num_output_tokens


def _one(value: float | None) -> list[float]:
    return [] if value is None else [value]


# In the order in which they are shown.
METRICS: Mapping[str, Callable[[Record], list[float]]] = {
    "ttft": lambda record: _one(record.ttft),
    "tpot": lambda record: _one(record.tpot),
    "itl": lambda record: record.itls,
    "e2el": lambda record: _one(record.e2el),
    "normalized_latency": lambda record: _one(record.normalized_latency),
    "waited": lambda record: _one(record.waited),
}
_LIMITED: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "e2el": lambda record: record.e2el,
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds of one kind; `percentiles` interpolates between neighbours, as NumPy does."""

    count: int
    mean: float
    maximum: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Iterable[float]) -> "Distribution | None":
        """The distribution of values, None if there are none."""
        if not values:
            return None
        found = {rank: float(np.percentile(values, rank)) for rank in percentiles}
        return cls(len(values), float(np.mean(values)), max(values), found)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load measured. Rates are a second; latencies are those of completed requests.

    `duration` runs from the first sending to the last end. `goodput` counts completed requests that
    keep every limit, None without limits. `errors` counts messages.
    """

    duration: float
    counts: Mapping[Outcome, int]
    num_not_sent: int
    errors: Mapping[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    latencies: Mapping[str, Distribution | None]
    limits: Mapping[str, float]
    num_within_limits: int

    @property
    def num_completed(self) -> int:
        """Requests that were answered whole."""
        return self.counts[Outcome.COMPLETED]

    @property
    def request_throughput(self) -> float:
        """Completed requests a second."""
        return self.rate(self.num_completed)

    @property
    def output_throughput(self) -> float:
        """Generated tokens a second."""
        return self.rate(self.num_output_tokens)

    @property
    def total_throughput(self) -> float:
        """Tokens of prompts and outputs a second."""
        return self.rate(self.num_prompt_tokens + self.num_output_tokens)

    @property
    def goodput(self) -> float | None:
        """Requests a second that keep every limit."""
        return self.rate(self.num_within_limits) if self.limits else None

    def rate(self, count: int) -> float:
        """So many a second."""
        return count / self.duration if self.duration else 0.0


def summarize(
    records: Sequence[Record],
    *,
    percentiles: Iterable[float] = (50, 90, 99),
    limits: Mapping[str, float] | None = None,
) -> Summary:
    """Turn the records of a load into figures; O(events).

    `limits` are seconds by the names `ttft`, `tpot` and `e2el`; an answer of one token keeps any
    `tpot`.
    """
    limits = limits or {}
    ranks = tuple(percentiles)
    sent = [record for record in records if record.sent is not None]
    completed = [record for record in sent if record.is_completed]
    counts = Counter(record.outcome for record in sent)
    begun = [record.sent for record in sent if record.sent is not None]
    ended = [record.ended for record in sent if record.ended is not None]
    return Summary(
        duration=max(ended) - min(begun) if ended else 0.0,
        counts={outcome: counts[outcome] for outcome in Outcome},
        num_not_sent=len(records) - len(sent),
        errors=dict(Counter(record.error for record in sent if record.error).most_common()),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in completed),
        num_cached_tokens=sum(record.num_cached_tokens for record in completed),
        num_output_tokens=sum(record.num_output_tokens or 0 for record in completed),
        latencies={
            name: Distribution.of([v for record in completed for v in values(record)], ranks)
            for name, values in METRICS.items()
        },
        limits=limits,
        num_within_limits=sum(_keeps(record, limits) for record in completed),
    )


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Limits in seconds from `NAME:MS` of `ttft`, `tpot` and `e2el`.

    >>> parse_goodput(["ttft:200 tpot:50"])
    {'ttft': 0.2, 'tpot': 0.05}

    Raises `InvalidRequest` for another form.
    """
    limits = {}
    for item in " ".join(texts).replace(",", " ").split():
        name, _, number = item.partition(":")
        try:
            milliseconds = float(number)
        except ValueError:
            milliseconds = 0.0
        if name not in _LIMITED or not milliseconds > 0:
            raise InvalidRequest(
                f"goodput must be NAME:MS with a name of {', '.join(_LIMITED)} and milliseconds "
                f"above 0, got {item!r}"
            )
        limits[name] = milliseconds / 1000
    return limits


def _keeps(record: Record, limits: Mapping[str, float]) -> bool:
    values = ((_LIMITED[name](record), limit) for name, limit in limits.items())
    return all(value is None or value <= limit for value, limit in values)
