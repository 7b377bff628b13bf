"""Snapshots: the whole state of a manager as bytes, and a manager from such bytes.

    one line of JSON: version, policy, SHA-256 of the rest | the state, pickled

Runs hang together as deeply as conversations are long, deeper than a pickle may recurse. So they are
written as a list, parents before children, and each one's children after that. Reading imports nothing
and names nothing but this package's own records, arrays, counters and the policy. That keeps accidents
out; who makes bytes on purpose can still harm those classes, so snapshots are to be trusted.

Knows how state is stored. Does not know what it means.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum
from hashlib import sha256
from typing import Any

from kvblocks._version import __version__
from kvblocks.decode import DecodeBatch
from kvblocks.errors import InvalidSnapshot, KVBlocksError
from kvblocks.hashing import Digest
from kvblocks.ledger import Ledger
from kvblocks.lifetimes import Clock
from kvblocks.policies import make_policy
from kvblocks.runs import Run

_PROTOCOL = 5
# Not this package's own. The last makes arrays.
_KNOWN: tuple[Any, ...] = (
    *(array, Counter, OrderedDict),
    array("i").__reduce_ex__(_PROTOCOL)[0],
)
_DIGEST, _BATCH, _CLOCK = "digest", "batch", "clock"


def dump_state(state: dict[str, Any], ledger: Ledger, policy: str, digest: Digest) -> bytes:
    """A manager's attributes, those of its ledger included, as bytes. O(state).

    `InvalidSnapshot` for a sequence id or a pin's name that is not plain.
    """
    ledger.all_sequences()  # their lengths are up to date now
    runs = _parents_first(ledger)
    body = io.BytesIO()
    clock = ledger.lifetimes.clock if ledger.lifetimes else None
    pickler = _Pickler(body, digest, type(ledger.runs.queue.policy), clock)
    pickler.dump((runs, [list(run.children.values()) for run in runs], state))
    header = {
        "kvblocks": __version__,
        "policy": policy,
        "sha256": sha256(body.getbuffer()).hexdigest(),
    }
    return json.dumps(header).encode() + b"\n" + body.getvalue()


def load_state(snapshot: bytes, digest: Digest, clock: Clock | None) -> dict[str, Any]:
    """The attributes that `dump_state` wrote. O(state); `InvalidSnapshot`."""
    line, _, body = bytes(snapshot).partition(b"\n")
    try:
        header = json.loads(line)
        version, policy, checksum = header["kvblocks"], header["policy"], header["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidSnapshot(
            "snapshot must be what `snapshot` returned, got other bytes"
        ) from None
    if version != __version__:
        raise InvalidSnapshot(
            f"snapshot must be of this version, {__version__}, got one of {version}"
        )
    if sha256(body).hexdigest() != checksum:
        raise InvalidSnapshot("snapshot must be whole, got bytes that its checksum does not fit")
    unpickler = _Unpickler(io.BytesIO(body), digest, type(make_policy(policy)), clock)
    try:
        runs, children, state = unpickler.load()
        for run, following in zip(runs, children, strict=True):
            run.children = {child.key: child for child in following}
        return dict(state)
    except KVBlocksError:
        raise
    except Exception as error:
        raise InvalidSnapshot(f"snapshot cannot be read: {error}") from error


def _parents_first(ledger: Ledger) -> list[Run]:
    """Every run that somebody holds or could find."""
    ends = [sequence.run for sequence in ledger.sequences.values()]
    ends += [swapped.sequence.run for swapped in ledger.swapped.values()]
    ends += [run for _, run in ledger.pins.held.values()]
    seen: dict[Run, None] = {}
    for end in (ledger.runs.root, *ends):
        path: list[Run] = []
        run: Run | None = end
        while run is not None and run not in seen:
            path.append(run)
            run = run.parent
        seen.update(dict.fromkeys(reversed(path)))
    stack: list[Run] = list(seen)
    while stack:
        following: Iterable[Run] = stack.pop().children.values()
        news = [run for run in following if run not in seen]
        seen.update(dict.fromkeys(news))
        stack += news
    return list(seen)


class _Pickler(pickle.Pickler):
    """Writes what `_Unpickler` reads, and nothing else."""

    def __init__(self, file: io.BytesIO, digest: Digest, policy: type, clock: Clock | None) -> None:
        super().__init__(file, _PROTOCOL)
        self._digest = digest
        self._policy = policy
        self._clock = clock

    def persistent_id(self, obj: object) -> str | None:
        """Leave the digest and the clock to the reader, and batches out: their rows go on alone."""
        if obj is self._digest:
            return _DIGEST
        if obj is not None and obj is self._clock:
            return _CLOCK
        return _BATCH if isinstance(obj, DecodeBatch) else None

    def reducer_override(self, obj: Any) -> Any:
        """Write a run without its children; refuse what would not be read."""
        if isinstance(obj, Run):
            noted = {name: getattr(obj, name) for name in Run.__slots__ if name != "children"}
            made_of = (obj.key, obj.tokens, obj.blocks, obj.parent, obj.serial)
            return Run, made_of, (None, noted)
        if isinstance(obj, Enum):
            return type(obj), (obj.value,)  # some versions of Python would call getattr
        if not _is_ours(obj if hasattr(obj, "__qualname__") else type(obj), self._policy):
            raise InvalidSnapshot(
                f"ids of sequences and names of pins must be plain values to be stored (text, "
                f"numbers, bytes, tuples of these), got {obj!r}"
            )
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes this package's records, arrays, counters and one policy; calls nothing else."""

    def __init__(self, file: io.BytesIO, digest: Digest, policy: type, clock: Clock | None) -> None:
        super().__init__(file)
        self._given: dict[object, Digest | Clock | None] = {_DIGEST: digest, _CLOCK: clock}
        self._policy = policy

    def persistent_load(self, pid: object) -> Digest | Clock | None:
        """The digest and the clock of the new manager; no batch."""
        return self._given.get(pid)

    def find_class(self, module: str, name: str) -> Any:
        """A class that a state is made of."""
        is_known = module.startswith("kvblocks.") or (module, name) in {
            (known.__module__, known.__qualname__) for known in (self._policy, *_KNOWN)
        }
        # Before anything is imported; a name with dots would be looked up in another.
        if module in sys.modules and is_known and "." not in name:
            found = super().find_class(module, name)
            if _is_ours(found, self._policy):
                return found
        raise InvalidSnapshot(f"snapshot must be of a manager, got one of {module}.{name}")


def _is_ours(named: Any, policy: type) -> bool:
    if named is policy or named in _KNOWN:
        return True
    return isinstance(named, type) and named.__module__.startswith("kvblocks.")
