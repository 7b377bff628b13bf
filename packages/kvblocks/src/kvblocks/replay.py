"""Repeating a log of operations, call by call, and finding where two of them part.

    with open("operations.jsonl") as log:
        for applied in Replay(log):
            print(applied.number, applied.op, applied.error)

A call that was refused when it was recorded is refused again. A replay under another policy, or with
another number of blocks, shows what would have become of the same calls.

Knows the format that `kvblocks.recording` writes. Does not know files, or what is drawn of a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from kvblocks.decode import DecodeBatch
from kvblocks.errors import InvalidConfig, InvalidLog, KVBlocksError
from kvblocks.hashing import Adapter
from kvblocks.manager import BlockManager
from kvblocks.recording import LOG_FORMAT
from kvblocks.results import ALL_SALTS

# What values of the wrong kind raise, wherever in a call they are met.
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Applied(NamedTuple):
    """One call that was carried out: what it was, and its answer or the error that it raised.

    Calls count from 1. `line` is where it stands in the log.
    """

    number: int
    line: int
    op: str
    arguments: Mapping[str, Any]
    answer: Any
    error: KVBlocksError | None


class Difference(NamedTuple):
    """Where two logs part: the number of the call, and what differs, in words."""

    number: int
    what: tuple[str, ...]


class Replay:
    """The calls of a log, carried out on a manager of their own as they are iterated over.

    `changes` are options of `BlockManager` that take the place of the recorded ones; with some, the
    recorded digests say nothing, and are passed over. `InvalidLog` names the line that cannot be read.
    """

    def __init__(self, lines: Iterable[str], **changes: Any) -> None:
        self._lines = enumerate(lines, 1)
        self._batches: list[DecodeBatch] = []
        options = self._read_header()
        self.is_changed = any(options.get(name) != value for name, value in changes.items())
        try:
            self.manager = BlockManager(**(options | changes))
        except (TypeError, InvalidConfig) as error:
            raise InvalidLog(f"the manager of this log cannot be made: {error}") from error
        self.num_digests = 0  # those that were compared
        self.num_wrong_digests = 0
        self.first_wrong_digest: int | None = None  # the number of the call before it

    def __iter__(self) -> Iterator[Applied]:
        number = 0
        for line, record in self._records():
            if "digest" in record:
                self._compare(number, record["digest"])
                continue
            number += 1
            op = record.pop("op", None)
            if not isinstance(op, str) or op not in _OPERATIONS:
                raise InvalidLog(f"line {line}: op must be one that is recorded, got {op!r}")
            try:
                answer, error = _OPERATIONS[op](self, record), None
            except KVBlocksError as refused:
                answer, error = None, refused
            except _FAULTS as fault:
                raise InvalidLog(f"line {line}: {op} cannot be carried out: {fault!r}") from fault
            yield Applied(number, line, op, record, answer, error)

    def _read_header(self) -> dict[str, Any]:
        _, record = next(self._records(), (1, {}))
        if "kvblocks_log" not in record or not isinstance(record.get("manager"), dict):
            raise InvalidLog("line 1: a log must begin with what made its manager, and does not")
        if record["kvblocks_log"] != LOG_FORMAT:
            raise InvalidLog(
                f"line 1: the format of a log must be {LOG_FORMAT}, got {record['kvblocks_log']}"
            )
        return dict(record["manager"])

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for line, text in self._lines:
            if text.strip():
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise InvalidLog(f"line {line}: not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise InvalidLog(f"line {line}: a record must be an object, got {text[:40]!r}")
                yield line, record

    def _compare(self, number: int, digest: object) -> None:
        if not self.is_changed:
            self.num_digests += 1
            if self.manager.state_digest() != digest:
                self.num_wrong_digests += 1
                self.first_wrong_digest = self.first_wrong_digest or number

    def batch(self, number: int) -> DecodeBatch:
        """The decode batch that was made as number `number`, from 0 on."""
        return self._batches[number]

    def make_batch(self) -> DecodeBatch:
        """One more decode batch."""
        self._batches.append(self.manager.decode_batch())
        return self._batches[-1]


def find_difference(ours: Iterable[str], theirs: Iterable[str]) -> Difference | None:
    """Where two logs part: at another call, at another answer, or at another state. None if nowhere.

    Both are carried out call by call: O(calls x state). `InvalidLog`.
    """
    one, other = Replay(ours), Replay(theirs)
    for number, (left, right) in enumerate(zip_longest(one, other), 1):
        if left is None or right is None:
            which = "first" if left is None else "second"
            return Difference(number, (f"the {which} log ends before this call",))
        if (left.op, left.arguments) != (right.op, right.arguments):
            return Difference(number, (_call(left), _call(right)))
        if one.manager.state_digest() != other.manager.state_digest():
            return Difference(number, (_call(left), *_differences(one.manager, other.manager)))
    return None


def id_of(value: Any) -> Any:
    """The id that a record has, as it was: JSON has lists for tuples.

    >>> id_of(["a", [1, 2]])
    ('a', (1, 2))
    """
    return tuple(map(id_of, value)) if isinstance(value, list) else value


def _differences(one: BlockManager, other: BlockManager) -> Iterator[str]:
    """What differs between two managers, in words."""
    ours, theirs = dict(_facts(one)), dict(_facts(other))
    found = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    for name in found:
        yield f"{name}: {ours.get(name, 'none')}, and {theirs.get(name, 'none')}"
    if not found:
        yield "the order in which blocks are handed out or evicted"


def _facts(manager: BlockManager) -> Iterator[tuple[str, object]]:
    for name in ("num_blocks", "block_size", "policy"):
        yield name, getattr(manager, name)
    stats = manager.stats()
    for name in stats.__slots__:
        yield name, getattr(stats, name)
    for seq_id in manager.seq_ids:
        lengths = manager.num_committed_tokens(seq_id), manager.num_computed_tokens(seq_id)
        yield f"sequence {seq_id!r}, committed and computed tokens", lengths
        if manager.is_swapped(seq_id):
            yield f"sequence {seq_id!r}, blocks", "swapped out"
        else:
            yield f"sequence {seq_id!r}, blocks", manager.block_table(seq_id).tolist()
            for group, window in enumerate(manager.windows, 1):
                table = manager.block_table(seq_id, group).tolist()
                yield f"sequence {seq_id!r}, blocks of window {window}", table


def _call(applied: Applied) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in applied.arguments.items())
    return f"{applied.op}({arguments})"


def call_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an `allocate` or a `pin` that its record has, as the call takes them."""
    names = ("salt", "adapter", "priority", "num_lookahead_tokens")
    options = {name: record[name] for name in names if name in record}
    if isinstance(options.get("adapter"), list):
        options["adapter"] = Adapter(*options["adapter"])
    if "media" in record:
        options["media"] = [
            (position, bytes.fromhex(digest[0]) if isinstance(digest, list) else digest)
            for position, digest in record["media"]
        ]
    return options


_Operation = Callable[[Replay, Mapping[str, Any]], Any]
_OPERATIONS: dict[str, _Operation] = {
    "allocate": lambda r, a: r.manager.allocate(id_of(a["seq"]), a["tokens"], **call_options(a)),
    "append": lambda r, a: r.manager.append({id_of(seq): entry for seq, entry in a["batch"]}),
    "reserve": lambda r, a: r.manager.reserve({id_of(seq): n for seq, n in a["lengths"]}),
    "commit": lambda r, a: r.manager.commit(id_of(a["seq"]), a["num_tokens"], a["tokens"]),
    "truncate": lambda r, a: r.manager.truncate(id_of(a["seq"]), a["num_tokens"]),
    "fork": lambda r, a: r.manager.fork(id_of(a["seq"]), id_of(a["child"])),
    "free": lambda r, a: r.manager.free(id_of(a["seq"])),
    "swap_out": lambda r, a: r.manager.swap_out(map(id_of, a["seqs"])),
    "swap_in": lambda r, a: r.manager.swap_in(map(id_of, a["seqs"])),
    "pin": lambda r, a: r.manager.pin(id_of(a["name"]), a["tokens"], **call_options(a)),
    "unpin": lambda r, a: r.manager.unpin(id_of(a["name"])),
    "reset": lambda r, a: r.manager.reset_prefix_cache(salt=a.get("salt", ALL_SALTS)),
    "begin_step": lambda r, _: r.manager.begin_step(),
    "complete_step": lambda r, a: r.manager.complete_step(a["step"]),
    "decode_batch": lambda r, _: r.make_batch(),
    "batch.join": lambda r, a: r.batch(a["batch"]).join(id_of(a["seq"])),
    "batch.leave": lambda r, a: r.batch(a["batch"]).leave(id_of(a["seq"])),
    "batch.append": lambda r, a: r.batch(a["batch"]).append(),
    "batch.commit": lambda r, a: r.batch(a["batch"]).commit(a["tokens"]),
}
