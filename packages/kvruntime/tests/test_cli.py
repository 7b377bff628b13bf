"""The command line as a person or a script meets it, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 120  # seconds; only a hang reaches it


def kvruntime(
    *arguments: str, cache: Path | None = None, stdout: Any = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "LANG": "C.UTF-8", **variables}
    if searched := os.environ.get("PYTHONPATH"):
        environment["PYTHONPATH"] = searched
    if cache:
        environment["KVRUNTIME_CACHE"] = str(cache)
    return subprocess.run(
        [sys.executable, "-m", "kvruntime", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        env=environment,
        check=False,
    )


@pytest.fixture
def folder(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("llama"))


def generate(folder: str, *arguments: str) -> dict[str, Any]:
    result = kvruntime("generate", "--model", folder, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_json_has_every_sample_and_the_statistics(folder: str) -> None:
    prompts = ["--prompt", "The cache", "--prompt", "keeps blocks"]
    answer = generate(folder, *prompts, "--n", "2", "--max-tokens", "4", "--seed", "3")
    assert answer.keys() == {"outputs", "stats"}
    assert [(o["prompt"], o["index"]) for o in answer["outputs"]] == [
        ("The cache", 0),
        ("The cache", 1),
        ("keeps blocks", 0),
        ("keeps blocks", 1),
    ]
    assert answer["outputs"][0].keys() == {
        "prompt",
        "index",
        "text",
        "token_ids",
        "num_prompt_tokens",
        "num_cached_tokens",
        "finish_reason",
    }
    assert answer["stats"].keys() >= {
        "num_prefill_tokens",
        "num_cached_tokens",
        "num_generated_tokens",
        "peak_blocks",
        "num_forks",
        "num_copies",
        "tail_waste_slots",
        "contiguous_slots",
        "num_leaked_blocks",
        "seconds",
    }
    assert answer["stats"]["num_forks"] == 2
    assert answer["stats"]["num_leaked_blocks"] == 0


def test_equal_seeds_give_equal_samples(folder: str) -> None:
    arguments = ["--prompt", "The cache", "--n", "2", "--max-tokens", "6", "--seed", "4"]
    first, second = generate(folder, *arguments), generate(folder, *arguments)
    assert first["outputs"] == second["outputs"]


def test_raw_leaves_the_chat_template_out(folder: str) -> None:
    arguments = ["--prompt", "The cache", "--max-tokens", "1"]
    raw, chat = generate(folder, "--raw", *arguments), generate(folder, *arguments)
    assert raw["outputs"][0]["num_prompt_tokens"] < chat["outputs"][0]["num_prompt_tokens"]


def test_a_person_sees_the_text_and_a_table(folder: str) -> None:
    result = kvruntime("generate", "--model", folder, "--prompt", "The cache", "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert "The cache" in result.stdout
    for label in ("prompt tokens computed", "copies on write", "peak blocks", "blocks leaked"):
        assert label in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "x " * 600], "but the model's context holds 512"),
        (["--prompt", "The cache", "--num-blocks", "1"], "but the pool holds 16"),
        (["--prompt", "x", "--num-blocks", str(10**15)], "the pool must fit into memory"),
        (["--prompt", "\udcff"], "a prompt must be valid Unicode"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be 0"),
        (
            ["--prompt", "x", "--block-size", "0"],
            "block_size must be an integer of at least 1, got 0",
        ),
        (["--prompt", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["--prompt", "x", "--n", "two"], "Invalid value for '--n'"),
        ([], "Missing option '--prompt'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    folder: str, arguments: list[str], sentence: str
) -> None:
    result = kvruntime("generate", "--model", folder, *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("output", [[], ["--json"]], ids=["tables", "json"])
def test_a_full_disk_is_one_sentence_and_exit_code_1(folder: str, output: list[str]) -> None:
    arguments = ["generate", "--model", folder, "--prompt", "x", "--max-tokens", "2"]
    with Path("/dev/full").open("w") as full:
        result = kvruntime(*arguments, *output, stdout=full)
    assert result.returncode == 1
    assert result.stderr == "kvruntime: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("output", [[], ["--json"]], ids=["tables", "json"])
def test_a_terminal_that_lacks_characters_is_no_mistake(folder: str, output: list[str]) -> None:
    text = "Größe 日本語"
    arguments = ["generate", "--model", folder, "--prompt", text, "--max-tokens", "2", *output]
    result = kvruntime(*arguments, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    if output:
        assert json.loads(result.stdout)["outputs"][0]["prompt"] == text


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a checkpoint" * 100])
def test_a_file_that_is_no_checkpoint_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(content)
    result = kvruntime("generate", "--model", str(path), "--prompt", "x", cache=cache)
    assert result.returncode == 2
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(cache.glob("*"))


def test_a_path_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = kvruntime("generate", "--model", str(tmp_path / "none"), "--prompt", "x")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


def test_help_has_an_example_and_version_is_the_packages() -> None:
    from kvruntime import __version__

    assert "Example: kvruntime demo" in kvruntime("--help").stdout
    assert "Example: kvruntime generate" in kvruntime("generate", "--help").stdout
    assert kvruntime("--version").stdout.strip() == __version__


@pytest.mark.smollm2
def test_the_demo_shares_prefixes_and_forks(smollm2_cache: Path) -> None:
    result = kvruntime("demo", "--json", cache=smollm2_cache)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [o["num_cached_tokens"] for o in answer["outputs"]] == [0, 32, 32, 32, 32, 0, 0, 0, 0]
    assert answer["outputs"][0]["text"] == "The capital of France is Paris."
    stats = answer["stats"]
    assert (stats["num_forks"], stats["num_copies"], stats["num_leaked_blocks"]) == (3, 3, 0)
    assert len({o["text"] for o in answer["outputs"][-4:]}) == 4
