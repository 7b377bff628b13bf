"""What the replays of a prefix index are compared with: sets, and no thought of speed."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, takewhile

from kvblocks.traces import Request, Trace

Prefix = tuple[str, ...]  # a block is all names up to its own
Times = dict[Prefix, int]
Rank = Callable[[Prefix, Times, Times, Times], object]  # a leaf; last uses, hits, beginnings


def trace_of(prompts: Iterable[Sequence[str]], block_size: int = 1) -> Trace:
    """A trace of prompts whose blocks are all full."""
    requests = (Request(None, block_size * len(prompt), 0, prompt) for prompt in prompts)
    return Trace("mooncake", block_size, tuple(requests))


def prefixes_of(prompt: Sequence[str]) -> list[Prefix]:
    return [tuple(prompt[:length]) for length in range(1, len(prompt) + 1)]


def leaf_first_hits(prompts: Sequence[Sequence[str]], capacity: int, rank: Rank) -> list[int]:
    """Blocks found by each prompt where the leaf that ranks lowest goes first."""
    used: dict[Prefix, int] = {}  # what is cached
    num_hits: dict[Prefix, int] = {}
    created: dict[Prefix, int] = {}
    found = []
    for now, prompt in enumerate(prompts):
        path = prefixes_of(prompt)
        hits = list(takewhile(used.__contains__, path))
        found.append(len(hits))
        for prefix in hits:
            used[prefix] = now
            num_hits[prefix] += 1
        for prefix in path[len(hits) :]:
            if len(used) == capacity:
                parents = {cached[:-1] for cached in used}
                leaves = [leaf for leaf in used if leaf not in parents and leaf not in path]
                if not leaves:
                    break
                used.pop(min(leaves, key=lambda leaf: rank(leaf, used, num_hits, created)))  # type: ignore[arg-type, return-value]  # ranks compare
            goes_on = prefix[:-1] in used and all(other[:-1] != prefix[:-1] for other in used)
            created[prefix] = created[prefix[:-1]] if goes_on else now
            used[prefix] = now
            num_hits[prefix] = 0
    return found


def block_fifo_hits(prompts: Sequence[Sequence[str]], capacity: int) -> list[int]:
    """Blocks found by each prompt where the block that came first goes first."""
    cached: list[Prefix] = []
    found = []
    for prompt in prompts:
        path = prefixes_of(prompt)
        found.append(len(list(takewhile(cached.__contains__, path))))
        for prefix in path:
            if prefix not in cached:
                cached = [*cached, prefix][-capacity:]
    return found


def most_hits(prompts: Sequence[Sequence[str]], capacity: int) -> int:
    """The most that any cache could find: every choice after every prompt is tried."""
    best: dict[frozenset[Prefix], int] = {frozenset(): 0}
    for prompt in prompts:
        path = prefixes_of(prompt)
        after: dict[frozenset[Prefix], int] = {}
        for cached, hits in best.items():
            hits += len(list(takewhile(cached.__contains__, path)))  # noqa: PLW2901 -- a sum
            for kept in _kept(cached | set(path), capacity):
                after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


def _kept(blocks: frozenset[Prefix], capacity: int) -> Iterable[frozenset[Prefix]]:
    """The largest sets of blocks without gaps that fit: to keep less is never better."""
    for number in range(min(capacity, len(blocks)), 0, -1):
        fitting = [
            frozenset(chosen)
            for chosen in combinations(sorted(blocks), number)
            if all(len(prefix) == 1 or prefix[:-1] in chosen for prefix in chosen)
        ]
        if fitting:
            return fitting
    return [frozenset()]
