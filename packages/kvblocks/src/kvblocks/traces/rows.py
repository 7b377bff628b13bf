"""Formats of one row a request: Mooncake JSONL, JSONL of token ids, Azure CSV.

Knows what a row of each says. Does not know how the format of a file is told, or replay.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from kvblocks.errors import InvalidTokens, InvalidTrace
from kvblocks.hashing import pack_tokens, split_blocks
from kvblocks.traces.records import (
    MalformedRow,
    Request,
    RowError,
    Trace,
    block_names,
    count_overlong,
    integer,
    numbered,
    parsed,
    seconds,
    shown,
)

MOONCAKE_BLOCK_SIZE = 512
TOKENS_BLOCK_SIZE = 16
TOKEN_KEYS = ("tokens", "token_ids", "prompt_token_ids")
_MOST_DIGITS = 18
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_mooncake(lines: Iterable[str], name: str, block_size: int | None) -> Trace:
    """Read a Mooncake trace; the file's `name` is the scope of its block names.

    Tokens a block: what the caller says, or what the rows say, or 512; or another power of two where
    the lengths of the rows speak for it, with a warning. `InvalidTrace` when rows contradict each
    other.
    """
    stated: set[int] = set()
    warnings: tuple[str, ...] = ()

    def read(row: object) -> Request:
        fields = _fields(row)
        request = Request(
            seconds(fields, "timestamp", per_second=1000),
            integer(fields, "input_length", at_least=1),
            integer(fields, "output_length", at_least=0, default=0),
            block_names(fields, "hash_ids"),
            name,
        )
        if fields.get("block_size") is not None:
            stated.add(integer(fields, "block_size", at_least=1))
        return request

    requests, malformed = _read_json_rows(lines, read)
    size = block_size or _stated(stated, name)
    if size is None:
        size, warnings = _fitting_size(requests, name)
    return Trace(
        "mooncake", size, requests, malformed, (*warnings, *count_overlong(requests, size))
    )


def read_tokens(lines: Iterable[str], _name: str, block_size: int | None) -> Trace:
    """Read a JSONL of token ids, cut into full blocks; 16 tokens a block if nobody says."""
    size = block_size or TOKENS_BLOCK_SIZE

    def read(row: object) -> Request:
        fields = {"tokens": row} if isinstance(row, list) else _fields(row)
        key = next((key for key in TOKEN_KEYS if key in fields), TOKEN_KEYS[0])
        values = fields.get(key)
        if not isinstance(values, list) or not values:
            raise RowError(f"{key} must be a list of at least one token id, got {shown(values)}")
        if set(map(type, values)) != {int}:
            raise RowError(f"{key} must hold integers only")
        try:
            packed = pack_tokens(values)
        except InvalidTokens as error:
            raise RowError(str(error)) from None
        num_full = len(packed) // size
        salt = fields.get("salt")
        if salt is not None and not isinstance(salt, str):
            raise RowError(f"salt must be a string, got {shown(salt)}")
        return Request(
            seconds(fields, "timestamp", per_second=1000),
            len(packed),
            integer(fields, "output_length", at_least=0, default=0),
            tuple(split_blocks(packed.tobytes(), size, num_full)),
            salt,
        )

    requests, malformed = _read_json_rows(lines, read)
    return Trace("tokens", size, requests, malformed)


def read_azure(lines: Iterable[str], name: str, _block_size: int | None) -> Trace:
    """Read an Azure trace: when requests came and how long they were, but nothing of content."""
    requests: list[Request] = []
    malformed: list[MalformedRow] = []
    rows = numbered(lines)
    _, header = next(rows, ("", ""))
    columns = next(csv.reader([header]), [])
    missing = [column for column in AZURE_COLUMNS if column not in columns]
    if missing:
        raise InvalidTrace(
            f"{name}: the header must name {', '.join(AZURE_COLUMNS)}, got {header!r}"
        )
    for place, line in rows:
        try:
            requests.append(_azure_request(next(csv.reader([line])), columns))
        except (RowError, csv.Error) as error:
            malformed.append(MalformedRow(place, str(error)))
    return Trace("azure", None, tuple(requests), tuple(malformed))


def _azure_request(values: list[str], columns: list[str]) -> Request:
    if len(values) != len(columns):
        raise RowError(f"a row must have {len(columns)} columns, got {len(values)}")
    row: dict[str, Any] = dict(zip(columns, values, strict=True))
    try:
        when = datetime.fromisoformat(row["TIMESTAMP"].strip())
    except ValueError:
        raise RowError(f"TIMESTAMP must be a date and a time, got {row['TIMESTAMP']!r}") from None
    for column in AZURE_COLUMNS[1:]:
        # A number that a spreadsheet wrote as 12.0 is still a number of tokens.
        digits = row[column].strip().removesuffix(".0")
        is_count = digits.isdecimal() and len(digits) <= _MOST_DIGITS
        row[column] = int(digits) if is_count else row[column].strip()
    # Without a zone, days have 24 hours: a zone would bring the reader's clock changes in.
    timestamp = (when.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001 -- see above
    return Request(
        timestamp,
        integer(row, "ContextTokens", at_least=1),
        integer(row, "GeneratedTokens", at_least=0),
    )


def _read_json_rows(
    lines: Iterable[str], read: Callable[[Any], Request]
) -> tuple[tuple[Request, ...], tuple[MalformedRow, ...]]:
    requests: list[Request] = []
    malformed: list[MalformedRow] = []
    for place, line in numbered(lines):
        try:
            requests.append(read(parsed(line.rstrip())))
        except RowError as error:
            malformed.append(MalformedRow(place, str(error)))
    return tuple(requests), tuple(malformed)


def _fields(row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, got {shown(row)}")
    return row


def _stated(sizes: set[int], name: str) -> int | None:
    if len(sizes) > 1:
        raise InvalidTrace(f"{name}: all rows must have one block_size, got {sorted(sizes)}")
    return next(iter(sizes), None)


def _fitting_size(requests: Iterable[Request], name: str) -> tuple[int, tuple[str, ...]]:
    """The usual size if the lengths agree with it, or the one power of two that they agree with.

    They agree when every row's last block holds at least one token and at most a block of them.
    """
    low, high = 1, sys.maxsize
    for request in requests:
        number, length = len(request.blocks), request.num_input_tokens
        if number:
            low = max(low, -(-length // number))
        if number > 1:
            high = min(high, (length - 1) // (number - 1))
    if low <= MOONCAKE_BLOCK_SIZE <= high or low > high:
        return MOONCAKE_BLOCK_SIZE, ()
    powers = [1 << bit for bit in range(20) if low <= 1 << bit <= high]
    size = powers[0] if len(powers) == 1 else MOONCAKE_BLOCK_SIZE
    between = f"between {low:,} and {high:,}" if high < sys.maxsize else f"at least {low:,}"
    told = f"{name}: counted as {size} tokens a block; its lengths fit any number {between}"
    return size, (f"{told}, and block_size says which it is",)
