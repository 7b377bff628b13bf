"""How many tokens of a prompt must be found in a cache, by a model that shares no code with any.

Prompts come one after another; each is looked up, takes its blocks, publishes its full ones and is
freed before the next comes. Full blocks are found by their content and all content before them;
at least one token of a prompt is left to compute. Blocks that hold nothing findable are used first,
then the block that was given up longest ago; a sequence gives up its last block first.

Knows prompts. Does not know block ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


class LeastRecentlyUsed:
    """A prefix cache as a set of contents in the order in which they were given up."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._cached: OrderedDict[int, None] = OrderedDict()

    def num_cached_tokens(self, prompt: Sequence[int]) -> int:
        """Serve one prompt, and return how many of its tokens were cached. O(tokens)."""
        size, packed = self.block_size, array("I", prompt)
        num_full = len(packed) // size
        contents, content = [], 0
        for start in range(0, num_full * size, size):
            content = hash((content, packed[start : start + size].tobytes()))
            contents.append(content)

        num_hits = 0
        while num_hits < (len(packed) - 1) // size and contents[num_hits] in self._cached:
            num_hits += 1
        for content in contents[:num_hits]:
            del self._cached[content]
        num_new = -(-len(packed) // size) - num_hits
        num_unused = self.num_blocks - len(self._cached) - num_hits
        for _ in range(num_new - num_unused):
            self._cached.popitem(last=False)
        for content in reversed(contents):
            self._cached[content] = None
            self._cached.move_to_end(content)
        return num_hits * size


def expected_hits(prompts: Sequence[Sequence[int]], num_blocks: int, block_size: int) -> list[int]:
    """Cached tokens of each of several prompts, in their order."""
    model = LeastRecentlyUsed(num_blocks, block_size)
    return [model.num_cached_tokens(prompt) for prompt in prompts]
