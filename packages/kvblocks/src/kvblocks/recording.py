"""A manager that writes down every call that may change it: a log that `kvblocks.replay` repeats.

    {"kvblocks_log": 1, "version": "0.1.0", "manager": {"num_blocks": 64, "block_size": 16}}
    {"op": "allocate", "seq": "a", "tokens": [1, 2, 3], "salt": "x"}
    {"op": "append", "batch": [["a", 3]]}
    {"op": "commit", "seq": "a", "num_tokens": 3, "tokens": []}
    {"digest": "2b5a..."}

One JSON object a line. A line is written before its call is carried out, so that a log ends with what
went wrong, and a log that cannot be written to leaves the manager as it was. Answers are not written:
the same calls give the same answers. Every so often the digest of the state is, for a replay to compare.

Knows calls and how they are written. Does not know what they do.
"""

from __future__ import annotations

import json
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from kvblocks._version import __version__
from kvblocks.decode import DecodeBatch
from kvblocks.errors import InvalidConfig, InvalidLog
from kvblocks.hashing import Adapter, Media, make_namespace, pack_tokens, read_media
from kvblocks.ledger import Ledger
from kvblocks.manager import BlockManager
from kvblocks.results import (
    ALL_SALTS,
    Allocation,
    AllSalts,
    Batch,
    BlockMerge,
    BlockSwap,
    Forgotten,
    Match,
    PinName,
    Reservation,
    SequenceId,
    StepPlan,
)
from kvblocks.sequence import read_entry, require_mapping

LOG_FORMAT = 1


class Writer(Protocol):
    """Where lines go: a text file, for example."""

    def write(self, line: str, /) -> object:
        """Take one line, with its end."""


class RecordingBlockManager(BlockManager):
    """A `BlockManager` that writes each call to `log` before it carries it out.

    Everything else is as ever; `options` are those of `BlockManager`. Ids and names must be values
    that JSON has (text, numbers, tuples of them): `InvalidLog`, and nothing changed. Whatever the
    writer raises goes to the caller, and nothing changed. O(what is written) a call, and O(state)
    every `digest_every` calls.

    >>> import io
    >>> log = io.StringIO()
    >>> manager = RecordingBlockManager(log, num_blocks=8, block_size=4)
    >>> manager.allocate("a", [1, 2, 3]).block_ids
    (0,)
    >>> print(log.getvalue().splitlines()[1])
    {"op":"allocate","seq":"a","tokens":[1,2,3]}
    """

    def __init__(
        self,
        log: Writer,
        num_blocks: int,
        block_size: int = 16,
        *,
        digest_every: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **options)
        if digest_every < 1:
            raise InvalidConfig(f"digest_every must be at least 1, got {digest_every}")
        self._log = log
        self._digest_every = digest_every
        self._num_operations = 0
        self._num_batches = 0
        options.pop("digest", None)
        options.pop("clock", None)
        # What was given may have been read once only, or be a number that JSON has not.
        options |= {
            name: getattr(self, name) for name in ("windows", "num_host_blocks") if name in options
        }
        made_of = {"num_blocks": self.num_blocks, "block_size": self.block_size, **options}
        self._write({"kvblocks_log": LOG_FORMAT, "version": __version__, "manager": made_of})

    # ── the calls ────────────────────────────────────────────────────────────────────────────

    def allocate(
        self,
        seq_id: SequenceId,
        tokens: Iterable[int] | int,
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
        priority: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> Allocation:
        """See `BlockManager.allocate`."""
        given = tokens if isinstance(tokens, int) else pack_tokens(tokens)
        items = read_media(media)
        make_namespace(salt, adapter)
        priority = operator.index(priority)
        num_lookahead_tokens = operator.index(num_lookahead_tokens)
        self._record(
            "allocate",
            {"seq": seq_id, "tokens": _as_json(given)},
            salt=salt,
            adapter=adapter,
            media=_media_as_json(items),
            priority=priority,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        return super().allocate(
            seq_id,
            given,
            salt=salt,
            adapter=adapter,
            media=items,
            priority=priority,
            num_lookahead_tokens=num_lookahead_tokens,
        )

    def append(self, batch: Batch) -> StepPlan:
        """See `BlockManager.append`."""
        require_mapping(batch)
        given = {seq_id: read_entry(entry) for seq_id, entry in batch.items()}
        rows = [[seq_id, _as_json(entry)] for seq_id, entry in given.items()]
        self._record("append", {"batch": rows})
        return super().append(given)

    def reserve(self, lengths: Mapping[Any, int]) -> Reservation:
        """See `BlockManager.reserve`."""
        require_mapping(lengths)
        given = {seq_id: operator.index(length) for seq_id, length in lengths.items()}
        self._record("reserve", {"lengths": [[seq_id, n] for seq_id, n in given.items()]})
        return super().reserve(given)

    def commit(
        self, seq_id: SequenceId, num_tokens: int, token_ids: Iterable[int] = ()
    ) -> tuple[BlockMerge, ...]:
        """See `BlockManager.commit`."""
        num_tokens, packed = operator.index(num_tokens), pack_tokens(token_ids)
        self._record("commit", {"seq": seq_id, "num_tokens": num_tokens, "tokens": packed.tolist()})
        return super().commit(seq_id, num_tokens, packed)

    def truncate(self, seq_id: SequenceId, num_tokens: int) -> None:
        """See `BlockManager.truncate`."""
        num_tokens = operator.index(num_tokens)
        self._record("truncate", {"seq": seq_id, "num_tokens": num_tokens})
        super().truncate(seq_id, num_tokens)

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """See `BlockManager.fork`."""
        self._record("fork", {"seq": parent_id, "child": child_id})
        super().fork(parent_id, child_id)

    def free(self, seq_id: SequenceId) -> None:
        """See `BlockManager.free`."""
        self._record("free", {"seq": seq_id})
        super().free(seq_id)

    def swap_out(self, seq_ids: Iterable[SequenceId]) -> tuple[BlockSwap, ...]:
        """See `BlockManager.swap_out`."""
        listed = list(seq_ids)
        self._record("swap_out", {"seqs": listed})
        return super().swap_out(listed)

    def swap_in(self, seq_ids: Iterable[SequenceId]) -> tuple[BlockSwap, ...]:
        """See `BlockManager.swap_in`."""
        listed = list(seq_ids)
        self._record("swap_in", {"seqs": listed})
        return super().swap_in(listed)

    def pin(
        self,
        name: PinName,
        tokens: Iterable[int],
        *,
        salt: str | None = None,
        adapter: Adapter | str | int | None = None,
        media: Iterable[Media] = (),
    ) -> Match:
        """See `BlockManager.pin`."""
        packed, items = pack_tokens(tokens), read_media(media)
        make_namespace(salt, adapter)
        self._record(
            "pin",
            {"name": name, "tokens": packed.tolist()},
            salt=salt,
            adapter=adapter,
            media=_media_as_json(items),
        )
        return super().pin(name, packed, salt=salt, adapter=adapter, media=items)

    def unpin(self, name: PinName) -> None:
        """See `BlockManager.unpin`."""
        self._record("unpin", {"name": name})
        super().unpin(name)

    def reset_prefix_cache(self, *, salt: str | AllSalts | None = ALL_SALTS) -> Forgotten:
        """See `BlockManager.reset_prefix_cache`."""
        self._record("reset", {} if isinstance(salt, AllSalts) else {"salt": salt})
        return super().reset_prefix_cache(salt=salt)

    def begin_step(self) -> int:
        """See `BlockManager.begin_step`."""
        self._record("begin_step", {})
        return super().begin_step()

    def complete_step(self, step: int) -> None:
        """See `BlockManager.complete_step`."""
        step = operator.index(step)
        self._record("complete_step", {"step": step})
        super().complete_step(step)

    def _make_batch(self) -> DecodeBatch:
        self._record("decode_batch", {})
        self._num_batches += 1
        return _RecordingDecodeBatch(self._ledger, self._record, self._num_batches - 1)

    def snapshot(self) -> bytes:
        """See `BlockManager.snapshot`: the state without the log, for `BlockManager.restore`."""
        plain = BlockManager.__new__(BlockManager)
        vars(plain).update({n: value for n, value in vars(self).items() if n not in _OF_THE_LOG})
        return plain.snapshot()

    @classmethod
    def restore(cls, *_: Any, **__: Any) -> NoReturn:
        """A log begins with a new manager: `BlockManager.restore` goes on without one. `InvalidLog`."""
        raise InvalidLog("a log must begin with a new manager: restore a BlockManager instead")

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def _record(self, op: str, arguments: Mapping[str, Any], **options: Any) -> None:
        """Write a call that is about to be carried out; options that say nothing are left out.

        An id that cannot be hashed is a TypeError before: JSON would bring a list back as a tuple.
        """
        hash((*(arguments[name] for name in _IDS & arguments.keys()), *arguments.get("seqs", ())))
        if self._num_operations and self._num_operations % self._digest_every == 0:
            self._write({"digest": self.state_digest()})
        said = {key: value for key, value in options.items() if value != _DEFAULTS[key]}
        self._write({"op": op, **arguments, **said})
        self._num_operations += 1

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidLog(f"a recorded call must have values that JSON has: {error}") from None
        self._log.write(line + "\n")


class _RecordingDecodeBatch(DecodeBatch):
    """A `DecodeBatch` whose calls are written, by its number among those of its manager."""

    def __init__(self, ledger: Ledger, record: Callable[..., None], number: int) -> None:
        super().__init__(ledger)
        self._record = record
        self._number = number

    def join(self, seq_id: SequenceId) -> None:
        self._record("batch.join", {"batch": self._number, "seq": seq_id})
        super().join(seq_id)

    def leave(self, seq_id: SequenceId) -> None:
        self._record("batch.leave", {"batch": self._number, "seq": seq_id})
        super().leave(seq_id)

    def append(self) -> StepPlan:
        self._record("batch.append", {"batch": self._number})
        return super().append()

    def commit(self, token_ids: Iterable[int] = ()) -> dict[SequenceId, tuple[BlockMerge, ...]]:
        packed = pack_tokens(token_ids)
        self._record("batch.commit", {"batch": self._number, "tokens": packed.tolist()})
        return super().commit(packed)


_IDS = {"seq", "child", "name"}
_OF_THE_LOG = {"_log", "_digest_every", "_num_operations", "_num_batches"}
_DEFAULTS: Mapping[str, Any] = {
    "salt": None,
    "adapter": None,
    "media": [],
    "priority": 0,
    "num_lookahead_tokens": 0,
}


def _as_json(entry: array[int] | int) -> list[int] | int:
    return entry if isinstance(entry, int) else entry.tolist()


def _media_as_json(media: Iterable[Media]) -> list[list[Any]]:
    """A digest of bytes is written in hex, in a list of its own."""
    return [
        [position, digest if isinstance(digest, str) else [digest.hex()]]
        for position, digest in media
    ]
