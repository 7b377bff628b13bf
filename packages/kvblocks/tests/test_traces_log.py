"""Logs of operations as traces: each prompt is a request, and what was committed beyond it its answer."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvblocks import Adapter, BlockManager, Media, OutOfBlocks
from kvblocks.cli import main
from kvblocks.errors import InvalidTrace
from kvblocks.recording import RecordingBlockManager
from kvblocks.simulate import Simulation
from kvblocks.traces import Trace, read_trace

HEADER = '{"kvblocks_log": 1, "manager": {"num_blocks": 8, "block_size": 2}}'


def read(folder: Path, text: str, block_size: int | None = None) -> Trace:
    path = folder / "operations.jsonl"
    path.write_text(text, "utf-8")
    return read_trace(path, block_size=block_size)


def recorded(
    folder: Path, work: Callable[[BlockManager], object], num_blocks: int = 16, **options: Any
) -> Trace:
    log = io.StringIO()
    work(RecordingBlockManager(log, num_blocks, 2, **options))
    return read(folder, log.getvalue())


def start(manager: BlockManager, name: str, tokens: list[int], **options: Any) -> None:
    manager.allocate(name, tokens, **options)
    manager.append({name: len(tokens) - manager.num_committed_tokens(name)})
    manager.commit(name, len(tokens))


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.num_input_tokens, request.num_output_tokens) for request in trace.requests]


def test_each_prompt_is_a_request_in_the_blocks_of_its_manager(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        start(manager, "a", [1, 2, 3, 4, 5])
        start(manager, "b", [1, 2, 3, 4, 9, 9])

    trace = recorded(tmp_path, work)
    first, second = trace.requests
    assert (trace.format, trace.block_size, len(first.blocks)) == ("log", 2, 2)
    assert first.blocks == second.blocks[:2]
    assert not trace.warnings


def test_prompts_can_be_cut_into_other_blocks(tmp_path: Path) -> None:
    text = f'{HEADER}\n{{"op":"allocate","seq":"a","tokens":[1,2,3,4,5]}}\n'
    trace = read(tmp_path, text, block_size=1)
    assert (trace.block_size, len(trace.requests[0].blocks)) == (1, 5)


def test_an_answer_is_what_was_committed_beyond_the_prompt(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        start(manager, "a", [1, 2, 3])
        manager.append({"a": 3})
        manager.commit("a", 5, [7, 8])  # of three that were computed
        manager.truncate("a", 5)
        manager.allocate("b", [9, 9, 9])

    assert lengths(recorded(tmp_path, work)) == [(3, 2), (3, 0)]


def test_a_decode_batch_counts_for_the_rows_that_it_went_on_with(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        for name in "abc":
            start(manager, name, [ord(name), 2, 3])
        batch = manager.decode_batch("abc")
        batch.append()
        batch.commit([4, 4, 4])
        manager.free("a")
        batch.append()
        batch.commit([5, 5])

    assert lengths(recorded(tmp_path, work)) == [(3, 1), (3, 2), (3, 2)]


def test_a_name_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        for _ in range(2):
            start(manager, "a", [1, 2, 3])
            manager.append({"a": 1})
            manager.commit("a", 4, [4])
            manager.free("a")

    assert lengths(recorded(tmp_path, work)) == [(3, 1), (3, 1)]


def test_what_a_fork_goes_on_to_say_is_nobodys_answer(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        start(manager, "a", [1, 2, 3])
        manager.fork("a", "b")
        manager.append({"b": [4]})
        manager.commit("b", 4)
        manager.free("a")
        manager.fork("b", "a")  # another one, by the name of what is gone
        manager.append({"a": [5]})
        manager.commit("a", 5)

    assert lengths(recorded(tmp_path, work)) == [(3, 0)]


def test_salts_and_adapters_separate_prompts(tmp_path: Path) -> None:
    spaces: list[dict[str, Any]] = [
        {},
        {"salt": ""},
        {"salt": "x"},
        {"adapter": "x"},
        {"adapter": Adapter("x", 1)},
    ]

    def work(manager: BlockManager) -> None:
        for number, space in enumerate(spaces):
            start(manager, f"{number}", [1, 2, 3], **space)

    scopes = {request.scope for request in recorded(tmp_path, work).requests}
    assert len(scopes) == len(spaces)


def test_media_separate_prompts_from_the_block_in_which_they_begin(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        for name, digest in (("a", "cat"), ("b", b"dog")):
            start(manager, name, [1, 2, 3, 4, 5], media=[Media(2, digest)])

    first, second = recorded(tmp_path, work).requests
    assert first.scope == second.scope
    assert [one == other for one, other in zip(first.blocks, second.blocks, strict=True)] == [
        True,
        False,
    ]


def test_a_log_without_token_ids_has_lengths_only(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        manager.allocate("a", 5)
        manager.append({"a": 5})
        manager.commit("a", 5)
        manager.append({"a": 1})
        manager.commit("a", 6)

    trace = recorded(tmp_path, work, prefix_caching=False)
    assert not trace.has_content
    assert lengths(trace) == [(5, 1)]


def test_a_refused_prompt_is_no_request_and_is_counted(tmp_path: Path) -> None:
    def work(manager: BlockManager) -> None:
        start(manager, "a", [1, 2, 3])
        with pytest.raises(OutOfBlocks):
            manager.allocate("b", range(100))

    trace = recorded(tmp_path, work)
    assert lengths(trace) == [(3, 0)]
    assert trace.warnings == ("1 calls were refused, 1 of them prompts, which are no requests",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{7", "not JSON: Expecting property name enclosed in double quotes"),
        ("[1, 2]", "a record must be an object, got '[1, 2]"),
        ('{"op": "guess", "seq": "b"}', "op must be one that is recorded, got 'guess'"),
        ('{"op": "allocate", "seq": "b"}', "allocate cannot be carried out: KeyError('tokens')"),
        (
            '{"op": "allocate", "seq": {}, "tokens": [1]}',
            "allocate cannot be carried out: TypeError",
        ),
        ('{"op": "append", "batch": {"a": 1}}', "append cannot be carried out: "),
        (
            '{"op": "commit", "seq": "a", "num_tokens": 1e400, "tokens": []}',
            "commit cannot be carried out: ",
        ),
        ('{"op": "reserve", "lengths": [["a", 1e99]]}', "reserve cannot be carried out: "),
        (
            '{"op": "batch.commit", "batch": "x", "tokens": []}',
            "batch.commit cannot be carried out",
        ),
        ('{"op": "allocate", "seq": "b", "tokens": [1], "media": [[0, [{}]]]}', "allocate"),
        ('{"op": "allocate", "seq": "b", "tokens": [1], "media": [[0, ["z"]]]}', "allocate"),
        ('{"op": "allocate", "seq": "b", "tokens": [1], "priority": 1e400}', "allocate cannot be"),
        ('{"op": "allocate", "seq": "b", "tokens": []}', "a prompt must have at least 1 token"),
        ('{"op": "allocate", "seq": "b", "tokens": [-1]}', "token ids must be in [0, 2**32)"),
        ('{"op": "allocate", "seq": "b", "tokens": [1], "salt": 5}', "salt must be a string"),
    ],
)
def test_a_malformed_line_is_named_and_the_others_are_read(
    line: str, reason: str, tmp_path: Path
) -> None:
    calls = [f'{{"op":"allocate","seq":"{name}","tokens":[1,2]}}' for name in "ac"]
    trace = read(tmp_path, "\n".join((HEADER, calls[0], line, calls[1])))
    (found,) = trace.malformed
    assert str(found).startswith(f"line 3: {reason}")
    assert len(trace.requests) == 2


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("", "line 1: a log must begin with what made its manager, and does not"),
        ('{"kvblocks_log": 9, "manager": {}}\n', "line 1: the format of a log must be 1, got 9"),
        ('{"kvblocks_log": 1, "manager": {}}\n', "the manager of this log cannot be made"),
    ],
)
def test_a_log_without_its_first_line_is_refused(
    header: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidTrace) as caught:
        read(tmp_path, f'{header}{{"op":"allocate","seq":"a","tokens":[1,2]}}\n')
    assert sentence in str(caught.value)


def test_a_replay_of_a_log_finds_what_its_manager_found(tmp_path: Path) -> None:
    managers: list[BlockManager] = []

    def work(manager: BlockManager) -> None:
        managers.append(manager)
        for number in range(40):
            shared = [number % 3 + 1] * (2 * (number % 5 + 1))
            start(manager, "a", [*shared, 9, number])
            manager.free("a")

    trace = recorded(tmp_path, work, num_blocks=9)
    found = Simulation(trace).engine("lru", 9)
    assert 0 < found.hit_tokens == managers[0].stats().num_cached_tokens
    assert found.evictions > 0


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "operations.jsonl"
    call = '{"op":"allocate","seq":"a","tokens":[1,2,3]}'
    path.write_text(f"{HEADER}\n{call}\n{call}\n{{\n", "utf-8")
    assert main(["simulate", str(path), "--capacity", "4", "--json"]) == 0
    shown = capsys.readouterr()
    trace = json.loads(shown.out)["trace"]
    assert (trace["format"], trace["requests"], trace["block_size"]) == ("log", 1, 2)
    assert "left out line 4: not JSON" in shown.err
    assert "warning: 1 calls were refused, 1 of them prompts" in shown.err
