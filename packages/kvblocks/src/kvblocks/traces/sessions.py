"""Sessions of coding agents, as kv-cache-tester records them: one JSON object a session.

Knows its fields, and agents that an agent starts. Does not know how a file is told to be one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from kvblocks.errors import InvalidTrace
from kvblocks.traces.records import (
    MalformedRow,
    Request,
    RowError,
    Trace,
    block_names,
    by_time,
    count_overlong,
    integer,
    merged,
    numbered,
    parsed,
    seconds,
    shown,
)


def read_sessions(lines: Iterable[str], name: str, block_size: int | None) -> Trace:
    """Read a file of one session, or of one session a line; requests in the order of their times.

    Block names count within their session, unless it says that their scope is not local.
    `InvalidTrace` where no session can be read, and for another block size than asked.
    """
    text = "".join(lines)
    sessions: list[Trace] = []
    malformed: list[MalformedRow] = []
    for place, part in _parts(text):
        try:
            sessions.append(_session(part, place, name))
        except RowError as error:
            malformed.append(MalformedRow(place or "the session", str(error)))
    if not sessions:
        raise InvalidTrace(f"{name}: no session can be read from it; {malformed[0]}")
    trace = merged(sessions)
    if block_size not in (None, trace.block_size):
        raise InvalidTrace(f"{name}: its blocks have {trace.block_size} tokens, not {block_size}")
    return trace._replace(malformed=(*malformed, *trace.malformed))


def _parts(text: str) -> Iterable[tuple[str, str]]:
    """The text as a whole if its first line is no JSON by itself, or else its lines."""
    first = text.lstrip().partition("\n")[0]
    try:
        parsed(first)
    except RowError:
        return [("", text)]
    lines = list(numbered(text.splitlines()))
    return lines if len(lines) > 1 else [("", text)]


def _session(text: str, place: str, name: str) -> Trace:
    session = parsed(text.rstrip())
    if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
        raise RowError(
            f"a session must be a JSON object with a list of requests, got {shown(session)}"
        )
    size = integer(session, "block_size", at_least=1)
    scope = (name, place) if session.get("hash_id_scope", "local") == "local" else None
    requests: list[Request] = []
    malformed: list[MalformedRow] = []
    for at, row in _flattened(session["requests"], f"{place}, request " if place else "request "):
        try:
            requests.append(_request(row, scope))
        except RowError as error:
            malformed.append(MalformedRow(at, str(error)))
    warnings = count_overlong(requests, size)
    return Trace("sessions", size, tuple(by_time(requests)), tuple(malformed), warnings)


def _flattened(rows: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Every request with its place: those of an agent that request 7 started are 7.1, 7.2, ..."""
    for number, row in enumerate(rows, 1):
        inner = row.get("requests") if isinstance(row, dict) else None
        if isinstance(inner, list):
            yield from _flattened(inner, f"{where}{number}.")
        else:
            yield f"{where}{number}", row


def _request(row: Any, scope: Hashable) -> Request:
    if not isinstance(row, dict):
        raise RowError(f"a request must be a JSON object, got {shown(row)}")
    timestamp = seconds(row, "t")
    if timestamp is None:
        raise RowError("t must be a number, got nothing")
    return Request(
        timestamp,
        integer(row, "in", at_least=1),
        integer(row, "out", at_least=0, default=0),
        block_names(row, "hash_ids"),
        scope,
    )
