"""Arrivals, prompts and figures by their definitions."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvruntime.bench.arrivals import arrival_times
from kvruntime.bench.figures import Distribution, Outcome, Record, parse_goodput, summarize
from kvruntime.bench.prompts import Asked, Shape, as_text, random_prompts
from kvruntime.bench.report import show_summary, to_json
from kvruntime.bench.workload import Workload
from kvruntime.errors import InvalidRequest
from kvruntime.report import console


def record(*times: float, sent: float = 0.0, tokens: int | None = None) -> Record:
    return Record(
        arrival=sent,
        sent=sent,
        chunk_times=list(times),
        ended=times[-1],
        outcome=Outcome.COMPLETED,
        num_output_tokens=len(times) if tokens is None else tokens,
    )


# ── arrivals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variance_of_their_gamma_distribution(
    burstiness: float,
) -> None:
    gaps = np.diff(arrival_times(40_000, 5.0, burstiness=burstiness, seed=2))
    assert np.mean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    # The coefficient of variation of a gamma distribution is the inverse root of its shape.
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(4, math.inf) == [0.0] * 4


def test_one_seed_is_one_pattern() -> None:
    assert arrival_times(9, 2.0, seed=1) == arrival_times(9, 2.0, seed=1)
    assert arrival_times(9, 2.0, seed=1) != arrival_times(9, 2.0, seed=2)


@pytest.mark.parametrize(
    ("rate", "burstiness", "message"),
    [
        (0.0, 1.0, "the request rate must be above 0, or inf, got 0.0"),
        (math.nan, 1.0, "the request rate must be above 0"),
        (1.0, 0.0, "burstiness must be a number above 0, got 0.0"),
        (1.0, math.inf, "burstiness must be a number above 0, got inf"),
    ],
)
def test_a_rate_that_is_none_is_refused(rate: float, burstiness: float, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        arrival_times(3, rate, burstiness=burstiness)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def ids(asked: Asked) -> list[Any]:
    assert isinstance(asked.prompt, list)
    return asked.prompt


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return len(list(pairs))


def test_lengths_are_drawn_around_those_that_were_given() -> None:
    shape = Shape(input_len=100, output_len=10, range_ratio=0.5)
    asked = random_prompts(400, shape)
    lengths = {len(ids(one)) for one in asked}
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {one.max_tokens for one in asked} == set(range(5, 16))


def test_prompts_share_their_prefix_in_turn_and_nothing_else() -> None:
    shape = Shape(input_len=20, prefix_len=30, num_prefixes=2)
    first, second, third = (ids(one) for one in random_prompts(3, shape))
    assert common(first, third) == 30
    assert common(first, second) == 0


def test_ids_are_below_the_vocabulary_and_above_control_tokens() -> None:
    found = {i for one in random_prompts(50, Shape(vocab_size=300)) for i in ids(one)}
    assert 256 <= min(found) < max(found) < 300


def test_equal_ids_become_equal_words() -> None:
    first, second = random_prompts(2, Shape(input_len=20, prefix_len=30))
    words = [str(as_text(one).prompt).split() for one in (first, second)]
    assert [len(one) for one in words] == [50, 50]
    assert words[0][:30] == words[1][:30] != words[0][20:]


MOONCAKE = [
    {"timestamp": 9000, "input_length": 1200, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 10500, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 9]},
    {"timestamp": 11000, "input_length": 600, "output_length": 0, "hash_ids": [5, 1]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:50.7500000,396,109
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in MOONCAKE))
    return path


def test_a_trace_says_lengths_times_and_which_blocks_are_shared(mooncake: Path) -> None:
    workload = Workload(trace=mooncake)
    asked = workload.asked()
    assert [len(ids(one)) for one in asked] == [1200, 1100, 600]
    assert [one.max_tokens for one in asked] == [40, 8, 1]
    assert workload.arrivals(asked) == [0.0, 1.5, 2.0]
    assert common(ids(asked[0]), ids(asked[1])) == 1024
    # The same name behind another block is other content.
    assert common(ids(asked[0]), ids(asked[2])) == 0


def test_a_trace_can_be_scaled_in_length_and_time(mooncake: Path) -> None:
    workload = Workload(trace=mooncake, length_scale=1 / 64, speed=3, num_prompts=2)
    asked = workload.asked()
    assert [len(ids(one)) for one in asked] == [19, 17]
    assert common(ids(asked[0]), ids(asked[1])) == 16
    assert workload.arrivals(asked) == [0.0, 0.5]


def test_a_rate_comes_before_the_times_of_a_trace(mooncake: Path) -> None:
    workload = Workload(trace=mooncake, request_rate=math.inf)
    assert workload.arrivals(workload.asked()) == [0.0] * 3


def test_an_azure_trace_has_lengths_and_times_only(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    workload = Workload(trace=path)
    asked = workload.asked()
    assert [(len(ids(one)), one.max_tokens) for one in asked] == [(374, 44), (396, 109)]
    assert workload.arrivals(asked) == [0.0, 4.25]
    assert common(ids(asked[0]), ids(asked[1])) == 0


def test_a_file_of_prompts_is_read_line_by_line_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    rows: list[dict[str, Any]] = [
        {"prompt": [1, 2], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    path.write_text("a text\n\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
    asked = Workload(prompts=path, num_prompts=4, shape=Shape(output_len=7)).asked()
    assert [one.prompt for one in asked] == ["a text", [1, 2], rows[1]["messages"], "a text"]
    assert [one.max_tokens for one in asked] == [7, 3, 7, 7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold at least one prompt"),
        ("{", "line 1: not JSON"),
        ("x\n" + "[" * 9 + "\n{}", "line 3: an object must have a prompt"),
        ('{"prompt": []}', "line 1: an object must have a prompt"),
        ('{"prompt": "a", "messages": [{}]}', "line 1: an object must have a prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be a positive integer, got"),
        ("\udcff", "must be UTF-8"),
    ],
)
def test_a_bad_file_of_prompts_is_refused_by_line(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(InvalidRequest, match=message):
        Workload(prompts=path).asked()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"trace": Path("a"), "prompts": Path("b")}, "of a trace or of a file, not of both"),
        ({"speed": 0}, "speed must be above 0, got 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Workload(**settings)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match="its format must be one of"):
        Workload(trace=path).asked()


@pytest.mark.parametrize("name", ["input_len", "output_len", "num_prefixes", "vocab_size"])
def test_a_shape_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least"):
        Shape(**{name: 0})


# ── figures ──────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_those_of_numpy() -> None:
    values = [4.0, 1.0, 2.0, 8.0]
    found = Distribution.of(values, (0, 50, 90, 100))
    assert found is not None
    assert found.percentiles == {0: 1.0, 50: 3.0, 90: pytest.approx(6.8), 100: 8.0}
    assert (found.count, found.mean, found.maximum) == (4, 3.75, 8.0)


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    one = record(2.0)
    assert (one.ttft, one.tpot, one.itls, one.normalized_latency) == (2.0, None, [], 2.0)


def test_latencies_count_from_sending() -> None:
    late = record(5.0, 6.0, sent=4.0)
    late.arrival = 1.0
    assert (late.ttft, late.e2el, late.waited) == (1.0, 2.0, 3.0)


def test_only_completed_requests_count_in_latencies() -> None:
    failed = record(9.0, 9.5)
    failed.outcome = Outcome.FAILED
    summary = summarize([record(1.0, 2.0), failed])
    ttft = summary.latencies["ttft"]
    assert ttft is not None
    assert (ttft.count, ttft.maximum) == (1, 1.0)
    assert summary.num_output_tokens == 2


def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    records = [record(1.0, 1.1), record(1.0, 3.0), record(2.0, 2.1), record(0.5)]
    # The second is slow after its first token, the third before; one token has no time between.
    summary = summarize(records, limits={"ttft": 1.0, "tpot": 0.5})
    assert summary.num_within_limits == 2
    assert summary.goodput == 2 / 3.0


def test_without_limits_there_is_no_goodput() -> None:
    assert summarize([record(1.0)]).goodput is None


def test_nothing_measured_is_no_division_by_zero() -> None:
    summary = summarize([Record(arrival=0.0)])
    assert (summary.request_throughput, summary.duration, summary.num_not_sent) == (0.0, 0.0, 1)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "ttft:0", "ttft:-1", "ttft:nan"])
def test_a_limit_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="goodput must be NAME:MS with a name of ttft, tpot"):
        parse_goodput([text])


def test_json_says_what_the_schema_says() -> None:
    summary = summarize([record(0.5, 1.0)], percentiles=(50, 99.9), limits={"ttft": 1.0})
    told = to_json(summary, [record(0.5, 1.0)], server={"url": "u"}, load={"seed": 0})
    told = json.loads(json.dumps(told, allow_nan=False))
    assert told.keys() == {
        "schema",
        "server",
        "load",
        "duration",
        "requests",
        "errors",
        "tokens",
        "throughput",
        "goodput",
        "latencies",
        "records",
    }
    assert told["latencies"]["ttft"] == {
        "count": 1,
        "mean": 0.5,
        "max": 0.5,
        "p50": 0.5,
        "p99.9": 0.5,
    }
    assert told["goodput"] == {"limits": {"ttft": 1.0}, "requests": 1, "rate": 1.0}
    assert told["records"][0].keys() >= {"arrival", "sent", "outcome", "ttft", "num_chunks"}


def test_a_table_shows_counts_rates_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Record(0.0, sent=0.0, outcome=Outcome.REJECTED, error="429: full")
    cut_off = Record(0.0, sent=0.0)
    summary = summarize([record(0.5, 1.0), refused, cut_off, Record(0.0)], limits={"ttft": 1.0})
    show_summary(summary, console(), title="load")
    shown = capsys.readouterr().out
    for text in ("completed", "rejected", "unfinished", "not sent", "1x 429: full", "goodput"):
        assert text in shown
