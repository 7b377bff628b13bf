"""Measured speeds of block sizes: which readings of a file are compared, and what they change."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from kvblocks import readings
from kvblocks.cli import main
from kvblocks.errors import InvalidReadings
from kvblocks.planning import plan_blocks, recommend
from kvblocks.readings import choose, parse, read_readings

Capture = pytest.CaptureFixture[str]
SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "float16")


def row(block_size: int, share: float, **more: Any) -> dict[str, Any]:
    return {
        "dtype": "float16",
        "block_size": block_size,
        "batch": 8,
        "context": 4096,
        "num_threads": 1,
        "fraction_of_linear": share,
        "attention_gb_per_s": 40 * share,
    } | more


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    rows = [row(8, 0.5), row(16, 0.68), row(32, 0.7), row(64, 0.6)]
    path.write_text(json.dumps({"rows": rows}), "utf-8")
    return path


def test_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(readings).failed == 0


def test_most_threads_and_then_the_largest_step_are_taken() -> None:
    rows = [row(16, 0.1), row(16, 0.2, num_threads=2, batch=1, context=512)]
    rows += [row(16, 0.3, num_threads=2), row(32, 0.4, num_threads=2), row(8, 0.9)]
    found = choose(rows)
    assert (found.num_threads, found.batch, found.context) == (2, 8, 4096)
    assert found.shares == {16: 0.3, 32: 0.4}


def test_only_readings_of_the_dtype_are_taken() -> None:
    rows = [row(16, 0.1, dtype="float32"), row(16, 0.2)]
    assert choose(rows, "float16").shares == {16: 0.2}
    with pytest.raises(InvalidReadings, match=r"^there must be readings of int8, got float32, flo"):
        choose(rows, "int8")
    with pytest.raises(InvalidReadings, match=r"^a dtype must be known to choose among float32, "):
        choose(rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "readings are an object with a list of rows, got none"),
        ({"rows": []}, "readings are an object with a list of rows, got none"),
        ({"rows": [3]}, "each row must be an object with a dtype, got 3"),
        ({"rows": [{}]}, "each row must be an object with a dtype, got {}"),
        ({"rows": [row(16, 0)]}, "fraction_of_linear must be a positive number, got 0"),
        ({"rows": [row(True, 1)]}, "block_size must be a positive number, got True"),
        ({"rows": [row(16, 1, batch=None)]}, "batch must be a positive number, got None"),
        (
            {"rows": [row(16, float("inf"))]},
            "fraction_of_linear must be a positive number, got inf",
        ),
    ],
)
def test_what_is_no_readings_is_refused(content: Any, message: str) -> None:
    with pytest.raises(InvalidReadings) as caught:
        parse(content)
    assert str(caught.value) == message


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("rows", "utf-8")
    with pytest.raises(InvalidReadings, match=r"bench\.json is no JSON: "):
        read_readings(str(path))
    path.write_text("[]", "utf-8")
    with pytest.raises(InvalidReadings, match=r"bench\.json: readings are an object"):
        read_readings(str(path))


@pytest.mark.parametrize(
    ("speeds", "size"),
    [
        # 128 leaves more than 4 % empty, so its speed does not count.
        ({8: 0.5, 16: 0.6, 32: 0.62, 64: 0.5, 128: 0.9}, 16),
        ({8: 0.5, 16: 0.5, 32: 0.7, 64: 0.71}, 32),
        ({8: 0.5}, 8),
        # Nothing is known of those that waste little: as without readings.
        ({128: 0.9}, 64),
    ],
)
def test_the_smallest_of_the_fastest_that_waste_little_is_recommended(
    speeds: dict[int, float], size: int
) -> None:
    plans = [plan_blocks([1085], b, bytes_per_token=1) for b in (8, 16, 32, 64, 128)]
    assert [plan.tail_waste_ratio <= 0.04 for plan in plans] == [True] * 4 + [False]
    assert recommend(plans, speeds).block_size == size


def test_plan_shows_readings_beside_waste_and_goes_by_them(capsys: Capture, bench: Path) -> None:
    arguments = ["plan", *SHAPE, "--lengths", "1085", "--bench", str(bench)]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "block size tail waste, % of the read, % GB/s" in text
    assert "128 5.82 not measured" in text
    assert "Measured with 8 sequences of 4,096 tokens in float16 on 1 thread" in text
    assert "Recommended: blocks of 16, the smallest that leaves at most 4 % of its slots" in text
    assert "Not known here: what sequences share" in text
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"]["block_size"] == 16
    assert found["readings"]["block_sizes"][0] == {
        "block_size": 8,
        "share": 0.5,
        "gb_per_s": 20.0,
    }


def test_plan_says_when_what_it_recommends_was_not_measured(capsys: Capture, bench: Path) -> None:
    bench.write_text(json.dumps({"rows": [row(512, 0.5, num_threads=2)]}), "utf-8")
    assert main(["plan", *SHAPE, "--lengths", "4000", "--bench", str(bench)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on 2 threads" in text
    assert "Not known here: how fast a kernel reads blocks of this size" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bench", "{}"], "--bench needs --lengths: the sequences that a choice is for"),
        (["--lengths", "7", "--bench", "{}x"], "x cannot be read: No such file"),
    ],
)
def test_mistakes_are_answered_with_one_sentence(
    arguments: list[str], sentence: str, capsys: Capture, bench: Path
) -> None:
    assert main(["plan", *SHAPE, *(text.format(bench) for text in arguments)]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
