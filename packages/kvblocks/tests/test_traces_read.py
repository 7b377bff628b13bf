"""Formats of traces: what each says, how it is told, and rows that cannot be read."""

import gzip
import json
from pathlib import Path

import pytest

from kvblocks.errors import InvalidTrace
from kvblocks.traces import FORMATS, Trace, read_trace


def read(folder: Path, text: str, **options: int | str) -> Trace:
    path = folder / "trace"
    path.write_text(text, "utf-8")
    return read_trace(path, **options)  # type: ignore[arg-type]  # whatever a test passes


def mooncake_row(**fields: object) -> str:
    row = {"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}
    return json.dumps({**row, **fields}) + "\n"


def session(*requests: object, **fields: object) -> str:
    return json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": requests, **fields})


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_told_by_its_example(name: str, tmp_path: Path) -> None:
    trace = read(tmp_path, FORMATS[name].example)
    assert trace.format == name
    assert len(trace.requests) == 1
    assert not trace.malformed


def test_mooncake_rows_have_milliseconds_and_names_for_all_blocks(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake_row())
    (request,) = trace.requests
    assert trace.block_size == 512
    assert request[:4] == (1.5, 700, 20, [0, 1])


def test_azure_rows_have_lengths_and_no_content(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,3180,8\n",
    )
    first, second = trace.requests
    assert not trace.has_content
    assert (first.num_input_tokens, first.num_output_tokens, first.blocks) == (4808, 10, ())
    assert first.timestamp is not None
    assert second.timestamp == pytest.approx(first.timestamp + 1)


def test_a_session_keeps_its_names_to_itself(tmp_path: Path) -> None:
    row = {"t": 0, "in": 130, "out": 1, "hash_ids": [1, 2]}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(session(row), "utf-8")
    first, second = read_trace(tmp_path).requests
    assert first.blocks == second.blocks
    assert first.scope != second.scope


def test_a_session_with_a_global_scope_shares_its_names(tmp_path: Path) -> None:
    row = {"t": 0, "in": 130, "out": 1, "hash_ids": [1, 2]}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(session(row, hash_id_scope="global"), "utf-8")
    first, second = read_trace(tmp_path).requests
    assert first.scope == second.scope


def test_requests_of_started_agents_are_in_their_place_in_time(tmp_path: Path) -> None:
    agent = {"t": 1, "type": "subagent", "requests": [{"t": 2, "in": 64, "hash_ids": [7]}]}
    outer = [{"t": t, "in": 64, "hash_ids": [t]} for t in (0, 3)]
    trace = read(tmp_path, session(outer[0], agent, outer[1]))
    assert [request.blocks for request in trace.requests] == [[0], [7], [3]]


def test_sessions_may_stand_one_a_line(tmp_path: Path) -> None:
    row = {"t": 0, "in": 64, "hash_ids": [1]}
    trace = read(tmp_path, f"{session(row)}\n{session(row, row)}\n")
    assert len({request.scope for request in trace.requests}) == 2
    assert len(trace.requests) == 3


def test_a_session_may_be_written_over_many_lines(tmp_path: Path) -> None:
    text = json.dumps(json.loads(session({"t": 0, "in": 64, "hash_ids": [1]})), indent=2)
    assert len(read(tmp_path, text).requests) == 1


def test_sessions_of_several_files_run_side_by_side(tmp_path: Path) -> None:
    for name, times in (("a.json", (0, 10)), ("b.json", (5, 6))):
        rows = [{"t": t, "in": 64, "hash_ids": [t]} for t in times]
        (tmp_path / name).write_text(session(*rows), "utf-8")
    assert [request.timestamp for request in read_trace(tmp_path).requests] == [0, 5, 6, 10]


def test_token_ids_are_cut_into_full_blocks(tmp_path: Path) -> None:
    text = "[1,2,3,4,5]\n" + json.dumps({"tokens": [1, 2, 3, 4, 9, 9], "output_length": 3}) + "\n"
    first, second = read(tmp_path, text, block_size=2).requests
    assert (first.num_input_tokens, len(first.blocks)) == (5, 2)
    assert (second.num_input_tokens, second.num_output_tokens, len(second.blocks)) == (6, 3, 3)
    assert first.blocks == second.blocks[:2]


def test_salts_separate_token_ids(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2], "salt": salt} for salt in (None, "", "x")]
    trace = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert len({request.scope for request in trace.requests}) == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{7", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("7", "a row must be a JSON object, got 7"),
        (mooncake_row(input_length=0), "input_length must be at least 1, got 0"),
        (mooncake_row(input_length="700"), "input_length must be an integer, got '700'"),
        (mooncake_row(input_length=True), "input_length must be an integer, got True"),
        (mooncake_row(output_length=-1), "output_length must be at least 0, got -1"),
        (mooncake_row(timestamp="now"), "timestamp must be a number, got 'now'"),
        (mooncake_row(timestamp=float("nan")), "timestamp must be a number, got nan"),
        (mooncake_row(hash_ids=None), "hash_ids must be a list, got nothing"),
        (mooncake_row(hash_ids=[1, 2.0]), "hash_ids must hold integers or strings only"),
        (mooncake_row(hash_ids=[True]), "hash_ids must hold integers or strings only"),
        ('{"hash_ids": [1,', "not JSON: Expecting value at column 17"),
    ],
)
def test_a_malformed_row_is_named_and_the_others_are_read(
    row: str, reason: str, tmp_path: Path
) -> None:
    trace = read(tmp_path, f"{mooncake_row()}\n{row.strip()}\n{mooncake_row()}")
    assert len(trace.requests) == 2
    assert [str(found) for found in trace.malformed] == [f"line 3: {reason}"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:17:03,1", "a row must have 3 columns, got 2"),
        ("yesterday,1,1", "TIMESTAMP must be a date and a time, got 'yesterday'"),
        ("2023-11-16 18:17:03,-1,1", "ContextTokens must be an integer, got '-1'"),
        ("2023-11-16 18:17:03,1,", "GeneratedTokens must be an integer, got ''"),
        (
            "2023-11-16 18:17:03,1," + "9" * 19,
            f"GeneratedTokens must be an integer, got '{'9' * 19}'",
        ),
        ("2023-11-16 18:17:03,1," + "9" * 200_000, "field larger than field limit (131072)"),
    ],
)
def test_a_malformed_row_of_a_table_is_named(row: str, reason: str, tmp_path: Path) -> None:
    trace = read(tmp_path, f"{FORMATS['azure'].example}{row}\n")
    assert [str(found) for found in trace.malformed] == [f"line 3: {reason}"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("[]", "tokens must be a list of at least one token id, got []"),
        ('{"tokens": 7}', "tokens must be a list of at least one token id, got 7"),
        ('{"tokens": [1, "2"]}', "tokens must hold integers only"),
        ('{"tokens": [-1]}', "token ids must be in [0, 2**32): can't convert negative value"),
        ('{"tokens": [1], "salt": 5}', "salt must be a string, got 5"),
    ],
)
def test_a_malformed_row_of_tokens_is_named(row: str, reason: str, tmp_path: Path) -> None:
    trace = read(tmp_path, f"[1]\n{row}\n")
    (found,) = trace.malformed
    assert str(found).startswith(f"line 2: {reason}")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (7, "a request must be a JSON object, got 7"),
        ({"in": 1, "hash_ids": []}, "t must be a number, got nothing"),
        ({"t": 0, "hash_ids": []}, "in must be an integer, got nothing"),
    ],
)
def test_a_malformed_request_of_a_session_is_named(
    row: object, reason: str, tmp_path: Path
) -> None:
    trace = read(tmp_path, session({"t": 0, "in": 1, "hash_ids": []}, {"requests": [row]}))
    assert [str(found) for found in trace.malformed] == [f"request 2.1: {reason}"]


@pytest.mark.parametrize(
    "row", ["[" * 100_000, "9" * 5000, '{"tokens": ' + "[" * 100_000], ids=["deep", "long", "in"]
)
@pytest.mark.parametrize("name", ["tokens", "mooncake", "log", "sessions"])
def test_json_that_no_reader_takes_is_a_malformed_row(name: str, row: str, tmp_path: Path) -> None:
    trace = read(tmp_path, f"{FORMATS[name].example}{row}\n")
    (found,) = trace.malformed
    assert (trace.format, len(trace.requests)) == (name, 1)
    line = FORMATS[name].example.count("\n") + 1
    assert str(found).startswith(f"line {line}: not JSON")


def test_a_malformed_session_among_others_is_named(tmp_path: Path) -> None:
    good = session({"t": 0, "in": 1, "hash_ids": []})
    trace = read(tmp_path, f'{good}\n{{"requests": 1}}\n{{\n{good}\n')
    assert [row.place for row in trace.malformed] == ["line 2", "line 3"]
    assert len(trace.requests) == 2


def test_malformed_rows_name_their_file_where_there_are_several(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(f"{mooncake_row()}x\n", "utf-8")
    places = [row.place for row in read_trace(tmp_path).malformed]
    assert places == ["a.jsonl, line 2", "b.jsonl, line 2"]


def test_files_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(mooncake_row().encode()))
    assert len(read_trace(path).requests) == 1


def test_a_byte_order_mark_and_windows_lines_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + FORMATS["azure"].example.replace("\n", "\r\n").encode())
    assert len(read_trace(path).requests) == 1


def test_rows_may_state_their_block_size(tmp_path: Path) -> None:
    assert read(tmp_path, mooncake_row(block_size=384)).block_size == 384


def test_rows_that_state_different_block_sizes_are_refused(tmp_path: Path) -> None:
    text = mooncake_row(block_size=384) + mooncake_row(block_size=512)
    with pytest.raises(InvalidTrace, match=r"must have one block_size, got \[384, 512\]"):
        read(tmp_path, text)


def test_lengths_that_fit_one_other_power_of_two_are_believed_with_a_warning(
    tmp_path: Path,
) -> None:
    trace = read(tmp_path, mooncake_row(input_length=33, hash_ids=[0, 1, 2]))
    assert trace.block_size == 16
    assert (
        "counted as 16 tokens a block; its lengths fit any number between 11 and 16"
        in (trace.warnings[0])
    )


def test_lengths_that_fit_several_are_counted_as_usual_with_a_warning(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake_row(input_length=600, hash_ids=[0]))
    assert trace.block_size == 512
    assert "any number at least 600" in trace.warnings[0]


def test_more_names_than_tokens_are_read_with_a_warning(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake_row(input_length=10, hash_ids=[0, 1]), block_size=16)
    assert trace.warnings == ("1 requests name more blocks of 16 tokens than they have tokens",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "its format must be one of azure, sessions, mooncake, log, tokens, and looks like none",
        ),
        ("hello\n", "its format must be one of"),
        (mooncake_row(input_length=0), "no request can be read from it; line 1: input_length"),
        ('{"requests": [}, "block_size": 1}', "no session can be read from it; the session: not"),
        ('{"requests": [], "block_size": 0}', "block_size must be at least 1, got 0"),
    ],
)
def test_what_is_no_trace_is_refused_with_one_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidTrace) as caught:
        read(tmp_path, text)
    assert sentence in str(caught.value)


def test_a_table_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="the header must name TIMESTAMP, ContextTokens"):
        read(tmp_path, "a,b\n1,2\n", format="azure")


def test_an_unknown_format_is_refused_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="format must be one of auto, azure, sessions"):
        read(tmp_path, "", format="xml")


def test_another_block_size_than_a_session_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="its blocks have 64 tokens, not 32"):
        read(tmp_path, session({"t": 0, "in": 1, "hash_ids": []}), block_size=32)


def test_a_block_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="block_size must be at least 1, got 0"):
        read(tmp_path, "[1]", block_size=0)


def test_traces_of_different_formats_are_not_merged(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(mooncake_row(), "utf-8")
    (tmp_path / "b").write_text("[1]\n", "utf-8")
    with pytest.raises(InvalidTrace, match="have one format, got mooncake and tokens"):
        read_trace(tmp_path)


def test_traces_without_times_are_not_merged(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("[1]\n", "utf-8")
    with pytest.raises(InvalidTrace, match="merged by timestamps, and some requests have none"):
        read_trace(tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="cannot be read: "):
        read_trace(tmp_path / "nothing")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="a trace needs at least one file, got none"):
        read_trace(tmp_path)


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidTrace, match="must be UTF-8 text"):
        read_trace(path)


def test_a_prompt_without_blocks_says_nothing_of_their_size(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake_row(hash_ids=[]) + mooncake_row(input_length=9, hash_ids=[1]))
    assert [request.blocks for request in trace.requests] == [[], [1]]
    assert trace.block_size == 512
