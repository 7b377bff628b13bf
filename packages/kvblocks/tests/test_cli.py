"""The command line as a whole: exit codes, streams, and what a stranger types."""

import json
import re
import subprocess
import sys

import pytest

import kvblocks
from kvblocks.cli import main

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
