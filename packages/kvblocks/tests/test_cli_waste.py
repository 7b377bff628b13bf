"""`kvblocks simulate --waste`: what it prints, and what it says of mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvblocks.baselines import NAMES, make_baseline
from kvblocks.cli import main
from kvblocks.waste import measure_waste, sharegpt_like

Capture = pytest.CaptureFixture[str]

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02},{prompt},{answer}\n"
    for second, (prompt, answer) in enumerate([(40, 10), (500, 100), (60, 0), (900, 30)])
)
SHORT = ("--steps", "200")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(CSV, "utf-8")
    return str(path)


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(["simulate", "--waste", *arguments]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return found


def test_json_has_the_shares_of_every_way(capsys: Capture) -> None:
    found = as_json(capsys, *SHORT)
    assert found["requests"] == {"source": "sharegpt-like", "seed": 0}
    assert (found["num_slots"], found["block_size"], found["max_length"]) == (16_384, 16, 2048)
    assert [each["baseline"] for each in found["results"]] == list(NAMES)
    states = ("tokens", "reserved", "over_allocated", "rounding", "external", "idle")
    for each in found["results"]:
        assert sum(each[state] for state in states) == pytest.approx(1)
        assert each["moved_bytes"] is None


def test_figures_are_those_of_the_function(capsys: Capture) -> None:
    options = ("--baseline", "grow", "--seed", "3", "--max-length", "512", "--growth", "64")
    memory = ("--capacity", "100", "--block-size", "32", "--bytes-per-token", "2KiB")
    (found,) = as_json(capsys, *SHORT, *options, *memory)["results"]
    baseline = make_baseline("grow", 3200, max_length=512, step=64)
    waste = measure_waste(baseline, sharegpt_like(3, 512), max_steps=200)
    assert found["tokens"] == waste.tokens
    assert found["mean_batch"] == waste.mean_batch
    assert found["num_moved_tokens"] == waste.num_moved_tokens
    assert found["moved_bytes"] == 2048 * waste.num_moved_tokens


def test_the_table_shows_shares_and_batch_sizes(capsys: Capture) -> None:
    text = printed(capsys, *SHORT)
    assert "ShareGPT-like lengths, seed 0, at most 2,048 tokens\n" in text
    assert "16,384 slots (8 of the longest requests), paged in blocks of 16\n" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["baseline"][1:8] == [
        *("tokens", "reserved", "over-allocated", "rounding", "external", "idle"),
        "at",
    ]
    assert rows["reserve-max"][7] == "8.0"
    assert rows["paged"][5] == "0.0"
    assert rows["paged"][-2:] == ["0", "tokens"]


def test_the_report_has_bars_of_every_way_and_the_tables(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "waste.html"
    found = as_json(capsys, *SHORT, "--html", str(path))["results"]
    page = path.read_text("utf-8")
    states = ("tokens", "reserved", "over_allocated", "rounding", "external", "idle")
    num_parts = sum(each[state] > 0 for each in found for state in states)
    assert page.count("<rect ") == num_parts + len(found)
    for each in found:
        name, shares = each["baseline"], [f"{100 * each[state]:.1f}" for state in states]
        assert f'data-tip="{name}\ntokens: {shares[0]} %"' in page
        assert f'data-tip="{name}\nrequests at once: {each["mean_batch"]:.1f}"' in page
        cells = "".join(f"<td>{share}</td>" for share in shares)
        assert f'<th scope="row">{name}</th>{cells}</tr>' in page
    assert "ShareGPT-like lengths, seed 0" in page
    assert "no ratios of throughput" in page


def test_bytes_are_shown_where_a_token_has_some(capsys: Capture) -> None:
    text = printed(capsys, *SHORT, "--bytes-per-token", "128KiB", "--baseline", "grow")
    assert "2 GiB: 16,384 slots" in text
    assert text.splitlines()[6].split()[-1] == "MiB"


def test_lengths_come_from_a_trace(trace: str, capsys: Capture) -> None:
    found = as_json(capsys, trace, *SHORT)
    assert found["requests"] == {
        "source": "azure",
        "requests": 4,
        "longer_requests_left_out": 0,
        "malformed_rows": [],
    }
    assert found["max_length"] == 930
    assert found["num_slots"] == 8 * 1024
    assert "(azure), 4 requests in a circle\n" in printed(capsys, trace, *SHORT)


def test_short_requests_grow_by_less(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "output_length": 6}\n', "utf-8")
    found = as_json(capsys, str(path), *SHORT)
    assert found["num_slots"] == 8 * 16
    assert "grow" in {each["baseline"] for each in found["results"]}


def test_blocks_of_memory_are_not_those_of_the_trace(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}
    path.write_text(json.dumps(row), "utf-8")
    assert as_json(capsys, str(path), *SHORT, "--block-size", "32")["block_size"] == 32


def test_requests_that_are_too_long_are_left_out_and_counted(trace: str, capsys: Capture) -> None:
    text = printed(capsys, trace, *SHORT, "--max-length", "600")
    assert "3 requests in a circle, 1 left out as longer than 600 tokens\n" in text


def test_malformed_rows_are_named_and_counted(trace: str, capsys: Capture) -> None:
    with Path(trace).open("a", encoding="utf-8") as file:
        file.write("2023-11-16 18:18:00,many,1\n")
    assert main(["simulate", "--waste", trace, *SHORT, "--json"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["requests"]["malformed_rows"]) == 1
    assert "left out line 6" in shown.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "fifo"], "--policy says nothing beside --waste"),
        (["--measure-last", "0.5"], "--measure-last says nothing beside --waste"),
        (["--prefill-rate", "5"], "--prefill-rate says nothing beside --waste"),
        (["--capacity", "1,2"], "--waste takes one --capacity"),
        (["--capacity", "0"], "--capacity must be in [1, 2**63 - 1], got 0"),
        (["--capacity", "10"], "reserve-max needs 2,048 slots for a request of max_length"),
        (["--steps", "0"], "--steps must be in [1, 2**63 - 1], got 0"),
        (["--growth", "0"], "--growth must be in"),
        (["--max-length", "4"], "max_length must be in [8, 2**63 - 1], got 4"),
        (["--baseline", "slab"], "a baseline must be one of reserve-max, "),
        (["TRACE", "--seed", "1"], "--seed is for lengths that are drawn"),
        (["TRACE", "--max-length", "9"], "no request of the trace is within --max-length 9"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(
    arguments: list[str], sentence: str, trace: str, capsys: Capture
) -> None:
    named = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(["simulate", "--waste", *named]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvblocks: {sentence}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a TRACE is needed"),
        (["--seed", "1"], "--seed belongs to --waste"),
        (["--bytes-per-token", "1KiB"], "--bytes-per-token belongs to --waste"),
    ],
)
def test_what_belongs_to_waste_needs_it(
    arguments: list[str], sentence: str, capsys: Capture
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"kvblocks: {sentence}")
