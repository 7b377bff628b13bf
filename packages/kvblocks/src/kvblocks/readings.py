"""How fast a kernel reads blocks of each size, as somebody measured it: a file of readings.

Reads what `kvkernels bench --json` prints and what `nox -s bench -- attention-cpu --json` writes. Knows
their fields. Does not know how they were measured, or on what machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvblocks.errors import InvalidReadings
from kvblocks.files import read_text
from kvblocks.units import shorten

_NUMBERS = ("block_size", "batch", "context", "num_threads", "fraction_of_linear")


class Reading(NamedTuple):
    """Attention over blocks of a size: its share of the speed of a read in one line, and gigabytes a second."""

    block_size: int
    share: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of one dtype, on one number of threads, of steps of one size: they can be compared."""

    dtype: str
    num_threads: int
    batch: int
    context: int
    sizes: tuple[Reading, ...]

    @property
    def shares(self) -> dict[int, float]:
        """By block size."""
        return {reading.block_size: reading.share for reading in self.sizes}


def read_readings(path: str, dtype: str = "") -> Readings:
    """Read a file of readings. `UnreadableFile`, and `InvalidReadings` which names the file.

    Of a dtype (of the only one, if none is asked for) the readings on most threads are taken, and of
    these those of the largest step.
    """
    try:
        return choose(parse(json.loads(read_text(path))), dtype)
    except ValueError as error:
        if isinstance(error, InvalidReadings):
            raise InvalidReadings(f"{path}: {error}") from error
        raise InvalidReadings(f"{path} is no JSON: {error}") from error


def parse(content: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a file's content, checked. `InvalidReadings`."""
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise InvalidReadings("readings are an object with a list of rows, got none")
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
            raise InvalidReadings(f"each row must be an object with a dtype, got {shorten(row)}")
        for name in (*_NUMBERS, "attention_gb_per_s"):
            if not _is_positive(row.get(name)):
                raise InvalidReadings(
                    f"{name} must be a positive number, got {shorten(row.get(name))}"
                )
    return rows


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")


def choose(rows: Sequence[Mapping[str, Any]], dtype: str = "") -> Readings:
    """Return those readings that can be compared. `InvalidReadings`.

    >>> row = {"dtype": "float32", "batch": 8, "context": 4096, "num_threads": 1,
    ...        "block_size": 16, "fraction_of_linear": 0.6, "attention_gb_per_s": 25.0}
    >>> choose([row, row | {"block_size": 64, "fraction_of_linear": 0.7}]).shares
    {16: 0.6, 64: 0.7}
    """
    known = list(dict.fromkeys(row["dtype"] for row in rows))
    if not dtype and len(known) > 1:
        raise InvalidReadings(f"a dtype must be known to choose among {', '.join(known)}")
    own = [row for row in rows if row["dtype"] == (dtype or known[0])]
    if not own:
        raise InvalidReadings(f"there must be readings of {dtype}, got {', '.join(known)}")

    def step(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["num_threads"], row["batch"] * row["context"], row["batch"], row["context"]

    largest = max(map(step, own))
    num_threads, _, batch, context = largest
    sizes = tuple(sorted(_sizes(row for row in own if step(row) == largest)))
    return Readings(own[0]["dtype"], int(num_threads), int(batch), int(context), sizes)


def _sizes(rows: Iterator[Mapping[str, Any]]) -> Iterator[Reading]:
    for row in rows:
        yield Reading(
            int(row["block_size"]), float(row["fraction_of_linear"]), row["attention_gb_per_s"]
        )
