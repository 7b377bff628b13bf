"""The command line: exit codes, streams, and what a stranger types."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvkernels
from kvkernels import selftest
from kvkernels.cli import main, parser
from kvkernels.cpu import compiled, threads


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "kvkernels: the following arguments are required: COMMAND (see kvkernels --help)"),
        (["inform"], "kvkernels: argument COMMAND: invalid choice: 'inform'"),
        (["info", "--yaml"], "kvkernels info: unrecognized arguments: --yaml"),
        (["bench", "--dtypes", "int4"], "kvkernels bench: argument --dtypes: must be among float32,"),
        (["bench", "--rounds", "0"], "kvkernels bench: argument --rounds: must be a positive integer"),
        (["selftest", "--seed", "x"], "kvkernels selftest: argument --seed: invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("info",), ("selftest",), ("bench",)])
def test_help_ends_with_an_example(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    assert re.search(r"\nExample:\n  kvkernels \w+[^\n]*\n$", capsys.readouterr().out)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kvkernels.__version__}\n"


def test_info_as_json_is_alone_on_standard_output() -> None:
    command = [sys.executable, "-m", "kvkernels", "info", "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert found["kvkernels"] == kvkernels.__version__
    assert found["num_threads"] >= 1
    assert found["vector_bits"] in {256, 512}


def test_info_lists_what_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    kvkernels.warmup(["float32"])
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {kernel["file"].split("-")[1] for kernel in found["compiled"]}
    assert names >= {"attend", "check", "cut", "merge", "read", "write"}
    assert all(kernel["bytes"] > 0 for kernel in found["compiled"])
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"{len(found['compiled'])} kernels" in shown
    assert found["compiled"][0]["file"] in shown


def test_info_says_when_nothing_can_be_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compiled, "_KernelCache", refuse)
    assert main(["info"]) == 0
    assert "nothing is kept: no folder can be written to" in capsys.readouterr().out


def test_selftest_finds_every_feature_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--json", "--seed", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"]
    assert [one["feature"] for one in found["features"]] == [f.name for f in selftest.features()]
    assert all(one["is_good"] and one["num_checks"] for one in found["features"])


@pytest.mark.parametrize("error", [3e-6, float("nan"), float("inf")])
def test_selftest_says_what_is_beyond_its_tolerance_and_fails(
    error: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = selftest.Feature("window", 2e-6, lambda _: iter([1e-7, error]))
    good = selftest.Feature("sinks", 2e-6, lambda _: iter([1e-7]))
    monkeypatch.setattr(selftest, "features", lambda: [wrong, good])
    assert main(["selftest"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"^window +2 .* WRONG$", shown.out, re.MULTILINE)
    assert re.search(r"^sinks +1 +1\.0e-07 +2e-06 +ok$", shown.out, re.MULTILINE)
    assert shown.err == "kvkernels: beyond tolerance: window\n"
    assert main(["selftest", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["is_good"] for one in found["features"]] == [False, True]


def test_a_bench_beyond_all_memory_is_one_sentence() -> None:
    size = ["--batch", "100000000", "--context", "100000000", "--dtypes", "float32"]
    command = [sys.executable, "-m", "kvkernels", "bench", *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvkernels: ")


def test_bench_prints_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    before = kvkernels.get_num_threads()
    arguments = ["bench", "--dtypes", "float32,int8", "--block-sizes", "16,24", "--threads", "1,2"]
    arguments += ["--batch", "1", "--context", "100", "--rounds", "1"]
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["fraction_of_in_order"] == pytest.approx(
            row["attention_gb_per_s"] / row["in_order_gb_per_s"]
        )
        assert row["tail_waste"] == (row["block_size"] - 1) / 200
    assert found["machine"]["packages"]["numpy"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("\n") == 10
    assert kvkernels.get_num_threads() == before


def test_interruptions_and_full_disks_have_their_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code, sentence in (
        (KeyboardInterrupt(), 130, "kvkernels: interrupted\n"),
        (OSError(28, "No space left on device"), 1, "kvkernels: [Errno 28] No space left"),
        (MemoryError(), 1, "kvkernels: there is not enough memory\n"),
        (kvkernels.ArgumentError("a rule, got 3"), 2, "kvkernels: a rule, got 3\n"),
    ):
        monkeypatch.setattr("kvkernels.cli._drop_output", lambda: None)
        monkeypatch.setattr("kvkernels.cli.info.gather", lambda error=error: _raise(error))
        assert main(["info"]) == code
        assert capsys.readouterr().err.startswith(sentence)


def _raise(error: BaseException) -> None:
    raise error


def test_a_closed_standard_output_is_one_sentence_and_code_1() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "kvkernels", "info"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvkernels: standard output is closed\n"


def test_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(parser) == doctest.TestResults(failed=0, attempted=1)


def test_progress_is_shown_on_a_terminal_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal:
        write = staticmethod(written.append)

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = parser.Progress()
    progress(0, 2, "attention")
    progress(2, 2, "")
    assert written == ["\rattention (1/2)\rattention (1/2)", f"\r{' ' * 15}\r"]


def test_modules_without_kernels_compile_nothing() -> None:
    folder = Path(threads.__file__).parent
    for name in compiled.WITHOUT_KERNELS:
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"@(compiled|inlined|allocating|intrinsic|njit)", text), name
        assert "import numba" not in text
        assert "from numba" not in text
