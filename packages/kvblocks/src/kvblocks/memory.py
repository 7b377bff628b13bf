"""What is remembered beside the state, so that it can be explained what a prompt found and did not.

Knows keys of content that left, how and when, and the namespaces seen last. Does not know runs, nor who
asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvblocks.hashing import Namespace

_MAX_NAMESPACES = 64


class Departure(NamedTuple):
    """How a block left the cache: by eviction, or forgotten by a reset; and when."""

    is_eviction: bool
    num_evicted: int  # blocks that had been evicted by then, those that left with it included
    step: int  # the newest step that had been begun


class Memory:
    """The last departures, at least `num_remembered` of them, and the last namespaces."""

    def __init__(self, num_remembered: int) -> None:
        self.namespaces: OrderedDict[bytes, Namespace] = OrderedDict()
        self._num_remembered = num_remembered
        # Two generations: the older goes when the younger is full, which costs nothing a key.
        self._younger: dict[bytes, Departure] = {}
        self._older: dict[bytes, Departure] = {}

    def note_departure(self, keys: Iterable[bytes], departure: Departure) -> None:
        """Remember that blocks have left together. O(keys)."""
        if len(self._younger) >= self._num_remembered:
            self._younger, self._older = {}, self._younger
        self._younger.update(dict.fromkeys(keys, departure))

    def departure_of(self, key: bytes) -> Departure | None:
        """How a block left last, if that is remembered. O(1)."""
        return self._younger.get(key) or self._older.get(key)

    def note_namespace(self, namespace: Namespace) -> None:
        """Remember the namespace of a prompt. O(1)."""
        self.namespaces[namespace.key] = namespace
        self.namespaces.move_to_end(namespace.key)
        if len(self.namespaces) > _MAX_NAMESPACES:
            self.namespaces.popitem(last=False)
