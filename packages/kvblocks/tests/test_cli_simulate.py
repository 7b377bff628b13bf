"""`kvblocks simulate`: what it prints, and what it says of mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvblocks.cli import main
from kvblocks.cli.progress import ProgressLine

ROWS = [
    {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [0, 2]},
    {"timestamp": 2000, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_json_lists_an_outcome_for_each_policy_and_capacity(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, trace, "--capacity", "2,3", "--policy", "lru,belady", "--json")
    results = json.loads(out)["results"]
    assert [(found["policy"], found["capacity"]) for found in results] == [
        ("lru", 2),
        ("lru", 3),
        ("belady", 2),
        ("belady", 3),
    ]
    assert results[0] == {
        "policy": "lru",
        "semantics": "index",
        "capacity": 2,
        "hit_blocks": 2,
        "total_blocks": 6,
        "hit_tokens": 1024,
        "total_tokens": 2424,
        "evictions": 2,
        "refused_requests": 0,
    }


def test_json_tells_the_trace_and_its_ceiling(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, trace, "--json"))
    assert found["trace"]["requests"] == 3
    assert found["ceiling"]["hit_tokens"] == 512 + 700
    assert found["ceiling"]["blocks_for_95_percent"] == 3


def test_the_table_names_the_semantics_of_every_figure(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, trace, "--capacity", "3", "--semantics", "engine", "--outputs", "hold")
    assert out.splitlines()[-1].split()[:5] == ["lru", "engine", "3", "42.244", "%"]
    assert "(index)" in out


def test_without_a_capacity_the_whole_range_is_shown(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = printed(capsys, trace).splitlines()[-3:]
    assert [row.split()[2] for row in rows] == ["1", "2", "3"]


def test_malformed_rows_are_named_and_counted_beside_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n7" * 7, "utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["trace"]["malformed_rows"]) == 7
    lines = shown.err.splitlines()
    assert lines[0] == "kvblocks: left out line 2: a row must be a JSON object, got 7"
    assert lines[-1] == "kvblocks: 7 malformed rows left out, 1 read"
    assert len(lines) == 6


def test_what_looks_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"input_length": 33, "hash_ids": [0, 1, 2]}), "utf-8")
    assert main(["simulate", str(path)]) == 0
    assert "kvblocks: warning: " in capsys.readouterr().err


def test_requests_that_do_not_fit_are_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, trace, "--capacity", "1", "--semantics", "engine")
    assert "3 measured requests do not fit the smallest pool" in out


def test_overlapping_requests_show_their_load(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--semantics", "engine", "--arrivals", "timestamps", "--prefill-rate", "100")
    out = printed(capsys, trace, "--capacity", "2", *options)
    assert "requests at once" in out
    assert out.splitlines()[-1].split()[:4] == ["2", "1", "2", "2"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "best"], "policy must be one of"),
        (["--capacity", "0"], "capacity must be at least 1, got 0"),
        (["--measure-last", "0"], "measure_last must be above 0 and at most 1, got 0.0"),
        (["--arrivals", "timestamps"], "requests overlap in an engine: --arrivals needs"),
        (["--decode-rate", "5"], "rates are for requests that overlap: --arrivals timestamps"),
        (["--policy", "belady", "--semantics", "engine"], "belady knows the future"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(
    arguments: list[str], sentence: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvblocks: {sentence}")
    assert shown.err.count("\n") == 1


def test_lengths_only_need_the_engine_and_a_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,40,10\n", "utf-8")
    assert main(["simulate", str(path)]) == 2
    assert "lengths only needs a --capacity" in capsys.readouterr().err
    assert main(["simulate", str(path), "--capacity", "9"]) == 2
    assert "the format azure has lengths only" in capsys.readouterr().err
    options = ("--capacity", "9", "--semantics", "engine", "--json")
    (found,) = json.loads(printed(capsys, str(path), *options))["results"]
    assert (found["hit_blocks"], found["total_blocks"]) == (0, 3)


class Terminal:
    """A stream that says it is one."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_shown_on_a_terminal_and_goes_away() -> None:
    terminal = Terminal(is_terminal=True)
    with ProgressLine(terminal) as progress:  # type: ignore[arg-type]  # all that is used of one
        progress.begin("lru", 4)
        progress(2)
    assert terminal.text == "\rlru 50 %\rlru 50 %" + "\r        \r"


def test_progress_goes_away_when_interrupted() -> None:
    terminal = Terminal(is_terminal=True)

    def run() -> None:
        with ProgressLine(terminal) as progress:  # type: ignore[arg-type]  # likewise
            progress.begin("lru", 4)
            progress(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert terminal.text.endswith("\r        \r")


def test_progress_is_silent_elsewhere() -> None:
    stream = Terminal(is_terminal=False)
    with ProgressLine(stream) as progress:  # type: ignore[arg-type]  # likewise
        progress.begin("lru", 4)
        progress(2)
    assert stream.text == ""


def test_a_report_is_written_beside_the_data(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    options = ("--capacity", "2,3", "--policy", "lru,belady", "--html", str(page), "--json")
    assert len(json.loads(printed(capsys, trace, *options))["results"]) == 4
    assert "belady (index)" in page.read_text("utf-8")


@pytest.mark.parametrize("command", ["simulate", "replay"])
@pytest.mark.parametrize("name", ["no/report.html", ""])
def test_a_report_that_cannot_be_written_is_said_before_anything_is_read(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "missing"), "--html", str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert "--html: must be a file in a folder that is there, got" in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [["replay"], ["simulate"], ["simulate", "--waste"]])
@pytest.mark.parametrize("written", ["trace.jsonl", "link.jsonl", "hard.jsonl"])
def test_a_report_is_not_written_over_what_is_read(
    command: list[str],
    written: str,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "link.jsonl").symlink_to(trace)
    (tmp_path / "hard.jsonl").hardlink_to(trace)
    before = Path(trace).read_bytes()
    page = str(tmp_path / written)
    assert main([*command, trace, "--html", page]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"kvblocks: --html must not be a file that is read, got {page!r}\n"
    assert Path(trace).read_bytes() == before


def test_a_report_is_not_written_over_a_file_of_a_folder_that_is_read(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    row = Path(trace).rename(folder / "rows.jsonl")
    assert main(["simulate", str(folder), "--html", str(row)]) == 2
    assert "--html must not be a file that is read" in capsys.readouterr().err
    (folder / "gone.jsonl").symlink_to("nowhere")
    page = tmp_path / "report.html"
    page.touch()
    printed(capsys, str(folder), "--html", str(page), "--json")
    assert page.read_text("utf-8")


def test_a_disk_that_is_full_is_one_sentence(trace: str) -> None:
    command = [sys.executable, "-m", "kvblocks", "simulate", trace, "--html", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_outputs_that_an_index_cannot_hold_are_said(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, "--outputs", "hold", "--json"]) == 0
    assert capsys.readouterr().err == "kvblocks: warning: no outputs are held in index semantics\n"


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_at_which_nothing_ends_is_refused(
    rate: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--semantics", "engine", "--arrivals", "timestamps", f"--decode-rate={rate}"]
    assert main(["simulate", trace, *options]) == 2
    assert "kvblocks: decode_rate must be above 0 tokens a second, got" in capsys.readouterr().err


def test_lengths_alone_have_no_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.0,48,10\n",
        "utf-8",
    )
    out = printed(
        capsys, str(path), "--capacity", "9", "--semantics", "engine", "--measure-last", "0.5"
    )
    assert "measured from request 2 on" in out
    assert "ceiling" not in out


@pytest.mark.parametrize(
    ("row", "block_size"),
    [
        ({"tokens": [1, 2, 3]}, 16),
        ({"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": []}, 512),
    ],
)
def test_prompts_that_fill_no_block_are_said(
    row: dict[str, object], block_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    assert main(["simulate", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"kvblocks: no prompt fills a block of {block_size} tokens: "
        "nothing can be found at any capacity\n"
    )
    assert "0.000 %" in printed(capsys, str(path), "--capacity", "5")


def test_json_has_the_load_where_requests_overlap(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--capacity", "9", "--semantics", "engine", "--arrivals", "timestamps", "--json"]
    (found,) = json.loads(printed(capsys, trace, *options))["results"]
    assert found["load"]["peak_running_requests"] >= 1
