"""What a manager tells others of its prefix cache: which content can be found, and which no longer.

The types have the fields that vLLM publishes (`vllm.distributed.kv_events`), and `as_dict` the form in
which its subscribers expect them. The keys are the chained block hashes of `kvblocks.hashing`. Whoever
replays all events, from the first on, has the keys that can be found after each of them.

Events wait until they are asked for. So a subscriber cannot disturb a manager, however it fails; and
how many wait is up to who asks.

Knows content and its names. Does not know which blocks hold it, nor how events travel.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvblocks.hashing import Media, Namespace

MEDIUM_GPU = "GPU"

# What stands before a block's tokens in its identity: names, (digest, offset) of media, a salt.
ExtraKeys: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one prompt can be found from now on.

    `extra_keys` has an entry for each block, or is None if there is nothing to say of any: in this
    order the adapter's name, and its generation unless that is 0; (digest, offset) of the media that
    begin in the block; the salt, in the first block of a prompt. Whoever reads it learns salts.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None  # of the block before the first; None if a prompt begins here
    packed_tokens: bytes  # uint32, as this machine writes them
    block_size: int
    lora_id: int | None = None  # of an adapter that is a number
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    medium: str = MEDIUM_GPU
    group_idx: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of all the blocks. O(tokens)."""
        return tuple(array("I", self.packed_tokens))

    def as_dict(self) -> dict[str, Any]:
        """The event as vLLM's subscribers read it, for a serialiser such as msgpack. O(tokens)."""
        return {
            "type": "BlockStored",
            "block_hashes": list(self.block_hashes),
            "parent_block_hash": self.parent_block_hash,
            "token_ids": list(self.token_ids),
            "block_size": self.block_size,
            "lora_id": self.lora_id,
            "medium": self.medium,
            "lora_name": self.lora_name,
            "extra_keys": None if self.extra_keys is None else list(self.extra_keys),
            "group_idx": self.group_idx,
        }


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks cannot be found any more, no block before those that follow it."""

    block_hashes: tuple[bytes, ...]
    medium: str = MEDIUM_GPU
    group_idx: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The event as vLLM's subscribers read it."""
        return {
            "type": "BlockRemoved",
            "block_hashes": list(self.block_hashes),
            "medium": self.medium,
            "group_idx": self.group_idx,
        }


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""

    def as_dict(self) -> dict[str, Any]:
        """The event as vLLM's subscribers read it."""
        return {"type": "AllBlocksCleared"}


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """The events that nobody has asked for yet, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.waiting: list[Event] = []
        self.num_live = 0  # keys that can be found, by all events so far

    def take(self) -> list[Event]:
        """Hand out what waits. O(1)."""
        events, self.waiting = self.waiting, []
        return events

    def stored(
        self,
        namespace: Namespace,
        media: Iterable[Media],
        start: int,
        parent: list[bytes],
        *,
        hashes: list[bytes],
        tokens: bytes,
    ) -> None:
        """Note blocks that can be found from now on, the first of which has the index `start`.

        `parent` is the key of the block before them, if there is one.
        """
        adapter = namespace.adapter
        name = adapter.name if adapter else None
        self.waiting.append(
            BlockStored(
                tuple(hashes),
                parent[0] if parent else None,
                tokens,
                self._block_size,
                name if isinstance(name, int) else None,
                name if isinstance(name, str) else None,
                _extra_keys(namespace, media, start, len(hashes), self._block_size),
            )
        )
        self.num_live += len(hashes)

    def removed(self, hashes: Iterable[bytes]) -> None:
        """Note blocks that cannot be found any more, those that follow others first."""
        event = BlockRemoved(tuple(hashes))
        self.waiting.append(event)
        self.num_live -= len(event.block_hashes)

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self.waiting.append(AllBlocksCleared())
        self.num_live = 0


def _extra_keys(
    namespace: Namespace, media: Iterable[Media], start: int, num_blocks: int, block_size: int
) -> tuple[ExtraKeys | None, ...] | None:
    """What stands before each of some blocks, the first of which has the index `start`."""
    everywhere: ExtraKeys = ()
    if adapter := namespace.adapter:
        everywhere = tuple(adapter) if adapter.generation else (adapter.name,)
    here: dict[int, ExtraKeys] = {}
    for position, digest in media:
        index, offset = divmod(position, block_size)
        if start <= index < start + num_blocks:
            here[index] = (*here.get(index, ()), (digest, offset))
    if namespace.salt is not None and start == 0:
        here[0] = (*here.get(0, ()), namespace.salt)
    if not everywhere and not here:
        return None
    keys: list[ExtraKeys | None] = [everywhere or None] * num_blocks
    for index, extra in here.items():
        keys[index - start] = everywhere + extra
    return tuple(keys)
