"""How many blocks samples and beams share: the experiment of figure 15 of the PagedAttention paper.

Saved is what the paper calls so: the blocks that the tables of all sequences have beyond the blocks that
there are, as a share of what the tables have, summed over all steps. One request at a time, as sharing
is within a request.

Knows a `BlockManager` and lengths. Does not know a model: beams choose their parents by chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvblocks import BlockManager
from kvblocks.waste import Lengths, sharegpt_like

BLOCK_SIZE = 16
NUM_REQUESTS = 60
WIDTHS = (2, 4, 6)


@dataclass(frozen=True, slots=True)
class Sharing:
    """One row: how the answers to one prompt share its blocks."""

    load: str
    method: str  # parallel sampling, or beams
    width: int  # answers to one prompt, or beams
    saved: float


def alpaca_like(seed: int) -> Iterator[Lengths]:
    """Requests without end, of lengths as in Alpaca: log-normal, with the paper's means of 19 and 58."""
    rng = random.Random(seed)

    def draw(mean: float, spread: float) -> int:
        return max(1, int(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    while True:
        yield Lengths(draw(19.31, 0.5), draw(58.45, 0.8))


LOADS = {"ShareGPT-like": sharegpt_like, "Alpaca-like": alpaca_like}


def measure(load: str, method: str, width: int, num_requests: int = NUM_REQUESTS) -> Sharing:
    """Serve the first requests of a load, each with `width` answers."""
    requests = LOADS[load](seed=0)
    rng = random.Random(1)
    shared = total = 0
    for _ in range(num_requests):
        of_request = _serve(next(requests), width, rng if method == "beam search" else None)
        shared, total = shared + of_request[0], total + of_request[1]
    return Sharing(load, method, width, shared / total)


def _serve(lengths: Lengths, width: int, rng: random.Random | None) -> tuple[int, int]:
    """Blocks that were saved, and blocks in all tables, summed over the steps of one request."""
    manager = BlockManager(width * 200, BLOCK_SIZE, prefix_caching=False)
    manager.allocate(0, lengths.num_prompt)
    manager.append({0: lengths.num_prompt})
    manager.commit(0, lengths.num_prompt)
    for sample in range(1, width):
        manager.fork(0, sample)
    names, next_name = list(range(width)), width
    shared = total = 0
    for step in range(lengths.num_generated):
        num_tokens = lengths.num_prompt + step + 1
        if rng is not None and step:
            parents = rng.choices(names, k=width)
            children = []
            for parent in parents:
                if parent in children:  # the first child is its parent, one token longer
                    manager.fork(parent, next_name)
                    children.append(next_name)
                    next_name += 1
                else:
                    children.append(parent)
            for name in names:
                if name not in children:
                    manager.free(name)
            names = children
        manager.append(dict.fromkeys(names, 1))
        for name in names:
            manager.commit(name, num_tokens)
        in_tables = width * -(-num_tokens // BLOCK_SIZE)
        shared += in_tables - manager.stats().num_held_blocks
        total += in_tables
    manager.check()
    return shared, total
