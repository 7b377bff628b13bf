"""`kvblocks replay`: what it prints and draws, and what it says of mistakes."""

import json
from pathlib import Path

import pytest

from kvblocks.cli import main

from .test_replay import random_log
from .test_report import Elements, browse, needs_chromium


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "operations.jsonl"
    path.write_text(random_log(1, 600), "utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["replay", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_calls_and_what_became_of_the_pool_are_printed(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, log, "--check")
    assert (code, err) == (0, "")
    assert "24 blocks of 2 tokens, lru" in out
    assert "as recorded" in out
    assert "batch.append" in out


def test_json_has_the_counters_and_the_state(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, log, "--json")[1])
    assert found["num_calls"] == sum(call["made"] for call in found["calls"])
    last = json.loads(log.read_text("utf-8").splitlines()[-1])
    assert found["state_digest"] == last["digest"]
    assert found["num_wrong_digests"] == 0


def test_a_replay_stops_after_a_call(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, log, "--json", "--until", 100)[1])["num_calls"] == 100


def test_other_options_are_said(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, log, "--policy", "fifo", "--num-blocks", "30")
    assert "30 blocks of 2 tokens, fifo" in out
    assert "of other options than the recorded ones" in out


def test_a_wrong_digest_is_said(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write('{"digest": "other"}\n')
    assert "differs from the recorded one after call" in run(capsys, log)[1]
    log.write_text(log.read_text("utf-8").splitlines()[0] + "\n", "utf-8")
    assert "never compared" in run(capsys, log)[1]


def test_two_logs_are_compared(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, log, "--diff", log)[:2] == (
        0,
        f"{log} and {log} do the same to the same state, in every call\n",
    )
    other = tmp_path / "other.jsonl"
    lines = log.read_text("utf-8").splitlines()
    other.write_text("\n".join(lines[:40]), "utf-8")
    code, out, _ = run(capsys, log, "--diff", other)
    assert code == 1
    assert "the second log ends before this call" in out
    code, out, _ = run(capsys, log, "--diff", other, "--json")
    assert (code, json.loads(out)["difference"]["call"] < 40) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read"),
        (["LOG", "--policy", "mine"], "policy must be one of"),
        (["LOG", "--num-blocks", "0"], "num_blocks must be at least 1"),
        (["LOG", "--diff", "LOG", "--check"], "--diff compares two logs as they are"),
        (["LOG", "--diff", "missing.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(
    arguments: list[str], reason: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *(log if each == "LOG" else each for each in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("kvblocks: ")
    assert reason in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty"
    path.write_text("", "utf-8")
    assert "a log must begin" in run(capsys, path)[2]


def drawn(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    page = tmp_path / "blocks.html"
    assert run(capsys, log, "--html", page)[0] == 0
    return page.read_text("utf-8")


def test_a_page_has_a_cell_a_block_and_closes_what_it_opens(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Elements(drawn(log, tmp_path, capsys))
    assert (found.wrong, found.open) == ("", [])
    assert sum(each.get("width") == "11" for each in found.attributes) == 24


def test_ids_of_others_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    header = '{"kvblocks_log": 1, "manager": {"num_blocks": 5000, "block_size": 2}}'
    path.write_text(
        header + '\n{"op": "allocate", "seq": "</script><b>", "tokens": [1]}\n', "utf-8"
    )
    page = drawn(path, tmp_path, capsys)
    assert "<b>" not in page
    assert Elements(page).open == []
    assert "The first 4,096 of 5,000 blocks" in page


def test_half_a_character_in_an_id_is_drawn_as_its_escape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    header = '{"kvblocks_log": 1, "manager": {"num_blocks": 8, "block_size": 2}}'
    path.write_text(
        header + '\n{"op": "allocate", "seq": "half \\ud83d", "tokens": [1]}\n', "utf-8"
    )
    assert "half \\ud83d" in drawn(path, tmp_path, capsys)


def test_of_many_sequences_those_are_drawn_that_fork(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    lines = ['{"kvblocks_log": 1, "manager": {"num_blocks": 200, "block_size": 2}}']
    lines += [json.dumps({"op": "allocate", "seq": f"s{i}", "tokens": [i]}) for i in range(150)]
    lines += ['{"op": "fork", "seq": "s149", "child": "a fork with quite a long name"}']
    path.write_text("\n".join(lines), "utf-8")
    page = drawn(path, tmp_path, capsys)
    assert "100 of 151 sequences" in page
    assert "forked from s149 by call 151" in page


def test_lines_are_named_and_calls_counted_as_they_stand_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '\n{"kvblocks_log": 1, "manager": {"num_blocks": 3, "block_size": 2}}\n\n'
        '{"op": "allocate", "seq": "a\u2028", "tokens": [1]}\n\n{\n',
        "utf-8",
    )
    assert main(["replay", str(path)]) == 2
    assert "kvblocks: line 6: not JSON" in capsys.readouterr().err
    assert main(["replay", str(path), "--until", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_calls"] == 1


def test_a_call_says_how_many_blocks_it_evicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"kvblocks_log": 1, "manager": {"num_blocks": 3, "block_size": 2}}\n'
        '{"op": "allocate", "seq": "a", "tokens": [1, 2, 3, 4]}\n'
        '{"op": "append", "batch": [["a", 4]]}\n'
        '{"op": "commit", "seq": "a", "num_tokens": 4, "tokens": []}\n'
        '{"op": "free", "seq": "a"}\n'
        '{"op": "allocate", "seq": "b", "tokens": [5, 6, 7, 8, 9]}\n',
        "utf-8",
    )
    page = drawn(path, tmp_path, capsys)
    assert page.count("blocks evicted)") == 2  # in the data, and as shown at first
    assert "(2 blocks evicted)" in page


STEPS = """
const slider = document.getElementById("frame"), map = document.getElementById("blocks");
const move = (to) => { slider.value = to; slider.dispatchEvent(new Event("input")); };
const tip = document.getElementById("tip");
const first = () => map.querySelector("rect").getAttribute("class");
document.body.dataset.last = first();
move(0); document.body.dataset.text = document.getElementById("call").textContent;
document.body.dataset.first = first();
map.focus(); map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
document.body.dataset.tip = tip.textContent;
map.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
document.body.dataset.gone = tip.hidden;
move(slider.max); document.body.dataset.again = first();
"""


@needs_chromium
def test_a_browser_moves_through_the_calls(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = browse(tmp_path, drawn(log, tmp_path, capsys), STEPS, "--window-size=1000,900")
    body = next(a for a in Elements(page).attributes if "data-gone" in a)
    assert str(body["data-text"]).startswith("after call 2: ")
    assert str(body["data-tip"]).startswith("block 1: ")
    assert body["data-gone"] == "true"
    assert body["data-again"] == body["data-last"]


def test_a_log_without_calls_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kvblocks_log": 1, "manager": {"num_blocks": 5, "block_size": 2}}', "utf-8")
    assert "<svg" not in drawn(path, tmp_path, capsys)
    assert json.loads(run(capsys, path, "--json", "--until", 10**6)[1])["num_calls"] == 0
