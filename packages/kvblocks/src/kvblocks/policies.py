"""Which cached leaf is evicted first: a policy, chosen by name.

A policy ranks a leaf when it is given up, and the leaf with the lowest rank goes first. What holds
whatever a policy says: only leaves are evicted, a tail before its head, so that no cached block
outlives the block before it; blocks that cache nothing are taken before any that do.

| name | evicts first | as described in |
|---|---|---|
| lru | what was used longest ago | Mattson et al., 1970; the order of vLLM, leaf-first |
| lfu | what was found least often; among equals, lru | Aho, Denning, Ullman, 1971; counted while cached |
| fifo | what was begun first, however often it was found since | Belady, 1966 |
| slru | what was never found again, then the rest; lru in both | Karedla, Love, Wherry, 1994, with no bound on the second segment, as SGLang has it |
| span | what was used longest ago, where what was used over a time counts as used later, by three quarters of that time | measured in docs/simulate.md |
| priority | the lowest priority given to `allocate`; among equals, lru | TensorRT-LLM, SGLang |

Other packages add policies through the entry-point group `kvblocks.policies`: a name, and a class that
is called without arguments once for each manager.

Knows ranks and names. Does not know blocks, tokens or the queue.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvblocks.errors import InvalidConfig

ENTRY_POINTS = "kvblocks.policies"


class CachedRun(Protocol):
    """What a policy sees of a stretch of cached blocks. Times count events of its manager."""

    @property
    def last_used(self) -> int:
        """When it was given up by the last sequence that held it."""

    @property
    def created(self) -> int:
        """When its content was first there."""

    @property
    def num_hits(self) -> int:
        """How many prompts found it."""

    @property
    def priority(self) -> int:
        """The highest priority of all sequences that held it."""


class Policy(Protocol):
    """The order of eviction."""

    def rank(self, run: CachedRun) -> Any:
        """The rank of a leaf that is given up: the lowest goes first.

        Called once each time a leaf is given up, or becomes one: never for all that is cached. Ranks
        must be comparable, and may not fall when a run is used again. Must not raise. Equal ranks
        go in an order that is the same in every process.
        """


class LRU:
    """What was used longest ago goes first."""

    def rank(self, run: CachedRun) -> int:
        """When it was used last."""
        return run.last_used


class LFU:
    """What was found least often goes first."""

    def rank(self, run: CachedRun) -> tuple[int, int]:
        """Hits, then the time of the last use."""
        return run.num_hits, run.last_used


class FIFO:
    """What came first goes first."""

    def rank(self, run: CachedRun) -> int:
        """When it was created."""
        return run.created


class SLRU:
    """What was never found again goes before all that was: a scan evicts only itself."""

    def rank(self, run: CachedRun) -> tuple[bool, int]:
        """The segment, then the time of the last use."""
        return run.num_hits > 0, run.last_used


class Span:
    """What was used longest ago goes first, later the longer it has been in use.

    A conversation that has gone on for a while is the likelier to go on. The time from its first to
    its last use says so in the unit of the traffic itself, whatever its rate and the size of the pool.
    """

    def rank(self, run: CachedRun) -> tuple[int, int]:
        """Four times (the last use + 3/4 of the time from the first to it), then the last use."""
        return 7 * run.last_used - 3 * run.created, run.last_used


class Priority:
    """What matters least goes first."""

    def rank(self, run: CachedRun) -> tuple[int, int]:
        """The priority, then the time of the last use."""
        return run.priority, run.last_used


_OURS: dict[str, Callable[[], Policy]] = {
    "fifo": FIFO,
    "lfu": LFU,
    "lru": LRU,
    "priority": Priority,
    "slru": SLRU,
    "span": Span,
}


def make_policy(name: object) -> Policy:
    """The policy of a name, made anew. Our own names cannot be replaced. `InvalidConfig`.

    >>> make_policy("lru").rank.__qualname__
    'LRU.rank'
    """
    if isinstance(name, str) and name in _OURS:
        return _OURS[name]()
    # Importing this takes as long as all of kvblocks, and few need it.
    from importlib.metadata import entry_points  # noqa: PLC0415 -- see above

    theirs = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if not isinstance(name, str) or name not in theirs:
        names = ", ".join(sorted({*_OURS, *theirs}))
        raise InvalidConfig(f"policy must be one of {names}, got {name!r}")
    try:
        policy: Policy = theirs[name].load()()
    except Exception as error:
        raise InvalidConfig(f"policy {name!r} of {theirs[name].value} cannot be made") from error
    return policy
