"""The content index: which block holds which tokens after which prefix, and what is evicted first.

A block is found under (its parent, its own tokens), where the parent is the block before it or, for
the first block, the root of its namespace. A key names its parent's *block*, and no block leaves the
index before its children have, so a match follows the true prefix by construction: nothing is
hashed to find content, and nothing can collide.

Knows keys and the order of eviction. Does not know sequences, or who holds a block.
"""

from collections.abc import Iterable
from typing import TypeAlias

from kvblocks.pool import BlockPool

Parent: TypeAlias = int | bytes


class PrefixIndex:
    """Full, committed blocks by content. One block a content, one content a block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[tuple[Parent, bytes], int] = {}
        self._key_of: dict[int, tuple[Parent, bytes]] = {}
        self.num_evicted = 0

    def match(self, root: bytes, blocks: Iterable[bytes]) -> list[int]:
        """The longest run of indexed blocks that hold `blocks`. One dict look-up a block."""
        found: list[int] = []
        parent: Parent = root
        for tokens in blocks:
            block = self._block_of.get((parent, tokens))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def publish(self, parent: Parent, tokens: bytes, block: int) -> int:
        """Make `block` findable and return it, or return the block that holds this content already."""
        key = (parent, tokens)
        known = self._block_of.setdefault(key, block)
        if known == block:
            self._key_of[block] = key
            self._pool.keep(block)
        return known

    def evict(self, num_blocks: int) -> None:
        """Free the cached blocks that were given up longest ago. O(num_blocks).

        Sequences give up their tails first and hold whole prefixes, so the oldest cached block
        never has a cached child: eviction is leaf-first.
        """
        for _ in range(num_blocks):
            block = self._pool.drop_oldest()
            del self._block_of[self._key_of.pop(block)]
        self.num_evicted += num_blocks

    def items(self) -> Iterable[tuple[int, tuple[Parent, bytes]]]:
        """Every indexed block with its key."""
        return self._key_of.items()

    def find(self, key: tuple[Parent, bytes]) -> int | None:
        """The block under a key."""
        return self._block_of.get(key)

    def __len__(self) -> int:
        return len(self._block_of)
