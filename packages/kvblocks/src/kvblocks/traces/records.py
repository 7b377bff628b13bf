"""What a trace is, once it has been read: requests, each with the identities of its blocks.

Knows the shape of a trace, whichever format it came in. Does not know files or formats.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import merge
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from kvblocks.errors import InvalidTrace

Blocks = Sequence[Hashable]
T = TypeVar("T")


class Request(NamedTuple):
    """One prompt and how much was generated for it.

    `blocks` names the prompt's blocks in order: what a name stands for is the block's tokens, and a
    block is found again where the names of all blocks before it are equal too, in the same `scope`.
    Empty where a format has lengths only. `timestamp` is in seconds, from any origin.
    """

    timestamp: float | None
    num_input_tokens: int
    num_output_tokens: int
    blocks: Blocks = ()
    scope: Hashable = None


class MalformedRow(NamedTuple):
    """A row that was left out, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class Trace(NamedTuple):
    """Requests in the order in which they are replayed.

    `block_size` is the number of tokens that a name in `blocks` stands for; None where there are no
    names. `warnings` tells what was read as it stands although it looks wrong.
    """

    format: str
    block_size: int | None
    requests: tuple[Request, ...]
    malformed: tuple[MalformedRow, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def has_content(self) -> bool:
        """Whether blocks have names, so that one prompt may be found in the cache of another."""
        return self.block_size is not None

    @property
    def has_timestamps(self) -> bool:
        """Whether it is known when each request came."""
        return all(request.timestamp is not None for request in self.requests)


class RowError(ValueError):
    """A row that cannot be read; caught by whoever reads rows, and noted with its place."""


def parsed(text: str) -> Any:
    """The value of a JSON text. `RowError`.

    >>> parsed("[1, 2]")
    [1, 2]
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise RowError(f"not JSON: {error.msg} at {at}column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or too deep a nesting
        raise RowError(f"not JSON that can be read: {error}") from None


def integer(row: dict[str, Any], key: str, *, at_least: int, default: int | None = None) -> int:
    """The integer of a row. `RowError`.

    >>> integer({"input_length": 7}, "input_length", at_least=1)
    7
    """
    value = row.get(key, default)
    if type(value) is not int:
        raise RowError(f"{key} must be an integer, got {shown(value)}")
    if value < at_least:
        raise RowError(f"{key} must be at least {at_least}, got {value}")
    return value


def seconds(row: dict[str, Any], key: str, *, per_second: float = 1.0) -> float | None:
    """The time of a row, None where it has none. `RowError`."""
    value = row.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not isfinite(value):
        raise RowError(f"{key} must be a number, got {shown(value)}")
    return float(value) / per_second


def block_names(row: dict[str, Any], key: str) -> list[Hashable]:
    """The names of a row's blocks: integers or strings. `RowError`."""
    value = row.get(key)
    if not isinstance(value, list):
        raise RowError(f"{key} must be a list, got {shown(value)}")
    if not set(map(type, value)) <= {int, str}:
        raise RowError(f"{key} must hold integers or strings only")
    return value


def shown(value: object) -> str:
    """A value as a message shows it: in one line and not too long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def count_overlong(requests: Iterable[Request], block_size: int) -> tuple[str, ...]:
    """A warning when prompts have more blocks than their tokens fill."""
    number = sum(len(r.blocks) > -(-r.num_input_tokens // block_size) for r in requests)
    if not number:
        return ()
    return (f"{number} requests name more blocks of {block_size} tokens than they have tokens",)


def merged(traces: Sequence[Trace]) -> Trace:
    """Several traces of one format as one, in the order of their timestamps.

    A single trace keeps the order of its file. `InvalidTrace` when formats or block sizes differ, or
    when it is not known when each request came.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
    for what, values in (
        ("format", {trace.format for trace in traces}),
        ("block size", {trace.block_size for trace in traces}),
    ):
        if len(values) > 1:
            raise InvalidTrace(
                f"traces are merged when they have one {what}, got {_listed(values)}"
            )
    if not all(trace.has_timestamps for trace in traces):
        raise InvalidTrace("traces are merged by timestamps, and some requests have none")
    requests = merge(*(by_time(trace.requests) for trace in traces), key=_timestamp)
    return first._replace(
        requests=tuple(requests),
        malformed=tuple(row for trace in traces for row in trace.malformed),
        warnings=tuple(text for trace in traces for text in trace.warnings),
    )


def by_time(requests: Iterable[Request]) -> list[Request]:
    """Requests in the order in which they came; equal times keep the order of the trace."""
    return sorted(requests, key=_timestamp)


def _timestamp(request: Request) -> float:
    assert request.timestamp is not None, "only asked of requests that have one"
    return request.timestamp


def _listed(values: Iterable[object]) -> str:
    return " and ".join(sorted(map(str, values)))


def numbered(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with its place."""
    for number, line in enumerate(lines, 1):
        if not line.isspace() and line:
            yield f"line {number}", line
