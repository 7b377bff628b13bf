"""The command line as a whole: exit codes, streams, and what a stranger types."""

import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import kvblocks
from kvblocks.cli import main
from kvblocks.cli.parser import terminal_width

PLAN = ("plan", "--bytes-per-token", "128KiB", "--lengths", "17,31,32,33")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "kvblocks: the following arguments are required: COMMAND (see kvblocks --help)"),
        (
            ["plan"],
            "kvblocks: the cache of a token is needed: --bytes-per-token, or --config, or all of",
        ),
        (
            ["plan", "--pool", "3XB"],
            "kvblocks plan: argument --pool: the unit of a size must be B, kB, MB, GB, TB, PB,",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("plan",), ("simulate",)])
def test_help_ends_with_an_example(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    assert re.search(r"\nExamples?:\n  kvblocks ", capsys.readouterr().out)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kvblocks.__version__}\n"


def test_json_is_alone_on_standard_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvblocks", *PLAN, "--json"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["useful_tokens"] == 113


def test_ctrl_c_ends_with_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvblocks.cli._run", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == "kvblocks: interrupted\n"


def test_a_reader_that_leaves_is_no_error_to_speak_of() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvblocks", *PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_that_is_no_text_file_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["--version"]) == 0
    assert shown.getvalue().strip() == kvblocks.__version__


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "kvblocks: interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (OSError("disk full"), 1, "kvblocks: disk full\n"),
    ],
)
def test_what_the_system_raises_becomes_an_exit_code(
    raised: BaseException,
    code: int,
    said: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(_options: object) -> None:
        raise raised

    monkeypatch.setattr("kvblocks.cli.plan.run", fail)
    with (tmp_path / "out").open("w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["plan"]) == code
        out.write("what comes too late goes nowhere")
        if not isinstance(raised, KeyboardInterrupt):
            out.flush()
            assert (tmp_path / "out").read_text("utf-8") == ""
    assert capsys.readouterr().err == said


def test_a_closed_standard_output_is_one_sentence_and_code_1() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "kvblocks", *PLAN]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvblocks: standard output is closed\n"


def test_a_missing_standard_output_is_one_sentence_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(PLAN) == 1
    assert capsys.readouterr().err == "kvblocks: standard output is closed\n"


def test_the_package_runs_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvblocks", "--version"])
    monkeypatch.delitem(sys.modules, "kvblocks.__main__", raising=False)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("kvblocks", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == kvblocks.__version__


def test_a_page_is_written_into_a_folder_that_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = str(tmp_path / "missing" / "page.html")
    assert main(["replay", "log.jsonl", "--html", page]) == 2
    assert "must be a file in a folder that is there" in capsys.readouterr().err


def test_tables_are_as_wide_as_the_terminal_and_as_they_like_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert terminal_width() == 77
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal_width() is None
