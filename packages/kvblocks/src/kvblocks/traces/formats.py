"""The formats of traces by name, and how a file is told to be in one.

A new format is one more entry of `FORMATS`: a name, an example, how to tell it and how to read it.

Knows names, the first lines of files and which reader reads them. Does not know what rows say.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvblocks.errors import InvalidTrace
from kvblocks.traces.operations import read_log
from kvblocks.traces.records import MalformedRow, RowError, Trace, merged, parsed
from kvblocks.traces.rows import (
    AZURE_COLUMNS,
    TOKEN_KEYS,
    read_azure,
    read_mooncake,
    read_tokens,
)
from kvblocks.traces.sessions import read_sessions

AUTO = "auto"
_NUM_LINES_TO_TELL = 20
_NUM_CHARACTERS_TO_TELL = 1 << 16


@dataclass(frozen=True)
class Format:
    """One format: `example` is a file of it, `tells` says of a file's beginning whether it is one."""

    name: str
    about: str
    example: str
    tells: Callable[[str], bool]
    read: Callable[[Iterable[str], str, int | None], Trace]


def _rows(head: str) -> list[Any]:
    """The first lines that are JSON; the last may be cut off, and others may be broken."""
    found = []
    for line in head.splitlines()[:_NUM_LINES_TO_TELL]:
        try:
            found.append(parsed(line))
        except RowError:
            continue
    return found


def _is_mooncake(head: str) -> bool:
    return any(isinstance(row, dict) and "hash_ids" in row for row in _rows(head))


def _is_log(head: str) -> bool:
    # A log whose first line is lost is told too: its calls are no prompts of token ids.
    return any(
        isinstance(row, dict) and ("kvblocks_log" in row or row.keys() >= {"op", "seq"})
        for row in _rows(head)
    )


def _is_tokens(head: str) -> bool:
    return any(
        isinstance(row, list) or (isinstance(row, dict) and not row.keys().isdisjoint(TOKEN_KEYS))
        for row in _rows(head)
    )


def _is_azure(head: str) -> bool:
    return all(column in head.partition("\n")[0] for column in AZURE_COLUMNS)


def _is_sessions(head: str) -> bool:
    # A session is one line that may be longer than what is looked at.
    return head.startswith("{") and '"requests"' in head and '"block_size"' in head


# In the order in which a file is tried: a session has hash_ids too, further in, and a log tokens.
FORMATS: dict[str, Format] = {
    found.name: found
    for found in (
        Format(
            "azure",
            "Azure LLM inference traces: CSV with lengths only, so nothing can be found again",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
            _is_azure,
            read_azure,
        ),
        Format(
            "sessions",
            "sessions of coding agents (kv-cache-tester): JSON, names of full blocks, seconds",
            '{"block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "in": 130, '
            '"out": 9, "hash_ids": [1, 2]}]}\n',
            _is_sessions,
            read_sessions,
        ),
        Format(
            "mooncake",
            "Mooncake traces: JSONL, names of all blocks of 512 tokens, milliseconds",
            '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}\n',
            _is_mooncake,
            read_mooncake,
        ),
        Format(
            "log",
            "logs of kvblocks.recording: JSONL, each prompt that a manager was asked to allocate",
            '{"kvblocks_log": 1, "manager": {"num_blocks": 64, "block_size": 16}}\n'
            '{"op": "allocate", "seq": "a", "tokens": [5, 6, 7], "salt": "x"}\n',
            _is_log,
            read_log,
        ),
        Format(
            "tokens",
            "token ids: JSONL, the ids of a prompt, cut into blocks of 16 tokens; milliseconds",
            '{"tokens": [5, 6, 7, 8], "output_length": 20, "timestamp": 0, "salt": "a"}\n',
            _is_tokens,
            read_tokens,
        ),
    )
}


def read_trace(
    *paths: str | Path,
    format: str = AUTO,  # noqa: A002 -- the word of the command line
    block_size: int | None = None,
) -> Trace:
    """Read one trace from files, or from all files of folders, gzip or not.

    Several files are merged in the order of their timestamps; block names are told apart by file.
    `block_size` is the number of tokens a block: needed where a trace does not say, refused where it
    says otherwise. O(size of the files). `InvalidTrace` for what is no trace at all; rows that
    cannot be read are left out and listed in `malformed`.
    """
    if format != AUTO and format not in FORMATS:
        raise InvalidTrace(f"format must be one of {AUTO}, {', '.join(FORMATS)}, got {format!r}")
    if block_size is not None and block_size < 1:
        raise InvalidTrace(f"block_size must be at least 1, got {block_size}")
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise InvalidTrace("a trace needs at least one file, got none")
    traces = [_read_file(file, format, block_size) for file in files]
    if len(files) > 1:
        traces = [_placed(trace, file) for trace, file in zip(traces, files, strict=True)]
    trace = merged(traces)
    if not trace.requests:
        rows = "".join(f"; {row}" for row in trace.malformed[:1])
        raise InvalidTrace(f"{files[0]}: no request can be read from it{rows}")
    return trace


def tell_format(head: str, name: str) -> Format:
    """The format of a file by its beginning. `InvalidTrace` when it is none of ours.

    >>> tell_format('{"input_length": 4, "hash_ids": [0]}', "trace.jsonl").name
    'mooncake'
    """
    head = head.lstrip("\ufeff \r\n\t")
    for candidate in FORMATS.values():
        if candidate.tells(head):
            return candidate
    raise InvalidTrace(
        f"{name}: its format must be one of {', '.join(FORMATS)}, and looks like none"
    )


def _read_file(path: Path, format_name: str, block_size: int | None) -> Trace:
    try:
        with _open(path) as file:
            head = file.read(_NUM_CHARACTERS_TO_TELL)
            found = FORMATS.get(format_name) or tell_format(head, str(path))
            file.seek(0)
            return found.read(file, str(path), block_size)
    except UnicodeDecodeError as error:
        raise InvalidTrace(f"{path}: a trace must be UTF-8 text: {error}") from None
    except (OSError, EOFError) as error:
        raise InvalidTrace(f"{path}: cannot be read: {error}") from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")


def _placed(trace: Trace, path: Path) -> Trace:
    rows = (MalformedRow(f"{path.name}, {row.place}", row.reason) for row in trace.malformed)
    return trace._replace(malformed=tuple(rows))
