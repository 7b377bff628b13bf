"""Prefixes that are never evicted: pins hold runs, as sequences do, on behalf of nobody.

Knows names, the runs they hold, and how many blocks may be held so. Does not know sequences.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from kvblocks.errors import InvalidConfig, InvalidPin, PinLimit
from kvblocks.results import PinName
from kvblocks.runs import Found, Run, path_of
from kvblocks.tree import RunTree
from kvblocks.windows import Windows


def max_pinned_blocks(limit: object, num_blocks: int) -> int:
    """A number of blocks, or a fraction of `num_blocks`, as a number. `InvalidConfig`."""
    if isinstance(limit, float) and 0 <= limit <= 1:
        return int(limit * num_blocks)
    if isinstance(limit, int) and 0 <= limit <= num_blocks:
        return limit
    raise InvalidConfig(
        f"pin_limit must be a number of blocks up to {num_blocks} or a fraction from 0.0 to 1.0, "
        f"got {limit!r}"
    )


class Pins:
    """The pins of one manager. Each call is O(runs of all pinned paths)."""

    def __init__(self, runs: RunTree, windows: Windows, max_blocks: int) -> None:
        self._runs = runs
        self._windows = windows
        self.max_blocks = max_blocks
        self.num_blocks = 0  # those that several pins hold count once
        self.held: dict[
            PinName, tuple[bytes, Run]
        ] = {}  # the key of its namespace, the end of its path
        self.companions: Counter[int] = Counter()  # window block -> how many pins hold it

    def pin(self, name: PinName, key: bytes, found: Found, num_full: int) -> None:
        """Hold what was found of `num_full` blocks under a name. `InvalidPin`, `PinLimit`."""
        if name in self.held:
            raise InvalidPin(f"a pin {name!r} exists already; unpin it first")
        if not 0 < len(found.blocks) == num_full:
            raise InvalidPin(
                f"a pin needs at least 1 full block and all of them cached, got {num_full}, of "
                f"which {len(found.blocks)} are cached"
            )
        num_news = len(found.blocks) - self.num_pinned(found.run, found.num_blocks)
        companions = self._companions_of(found.blocks)
        num_news += len(companions) - self.num_pinned_companions(companions)
        num_blocks = self.num_blocks + num_news
        if num_blocks > self.max_blocks:
            raise PinLimit(
                f"pins may hold at most {self.max_blocks} blocks, got {num_blocks} with {name!r}"
            )
        self.held[name] = key, self._runs.hold(found, found.run.priority)
        self._windows.hold(companions)
        self.companions.update(companions)
        self.num_blocks = num_blocks

    def unpin(self, name: PinName) -> None:
        """Give up what a name holds. `InvalidPin`."""
        if name not in self.held:
            raise InvalidPin(f"no pin {name!r}")
        _, run = self.held.pop(name)
        blocks = array("i")
        for above in reversed([*path_of(run)]):
            blocks += above.blocks
        self._runs.release(run, 0)
        companions = self._companions_of(blocks)
        self._windows.give_up(companions, 0)
        self.companions -= Counter(companions)
        num_full = sum(len(run.blocks) for run in self._pinned_runs())
        self.num_blocks = num_full + len(self.companions)

    def forget(self, key: bytes) -> None:
        """Unpin what is of the namespaces whose keys begin so."""
        for name in [name for name, pin in self.held.items() if pin[0].startswith(key)]:
            self.unpin(name)

    def num_pinned(self, run: Run, num_blocks: int) -> int:
        """How many blocks are pinned of a path that ends after the first `num_blocks` of `run`."""
        if not self.held:
            return 0
        pinned = self._pinned_runs()
        beyond = len(run.blocks) - num_blocks if run in pinned else 0
        return sum(len(each.blocks) for each in path_of(run) if each in pinned) - beyond

    def num_pinned_of(self, runs: Mapping[Run, int]) -> int:
        """How many blocks are pinned of the first so many of each of these runs."""
        if not self.held:
            return 0
        pinned = self._pinned_runs()
        return sum(num_blocks for run, num_blocks in runs.items() if run in pinned)

    def num_pinned_companions(self, blocks: Iterable[int]) -> int:
        """How many of these window blocks are pinned."""
        return sum(block in self.companions for block in blocks)

    @property
    def blocks(self) -> set[int]:
        """The blocks that are pinned."""
        of_runs = (block for run in self._pinned_runs() for block in run.blocks)
        return {*of_runs, *self.companions}

    def state(self) -> list[tuple[object, ...]]:
        """All that matters from now on, for comparison."""
        return [(name, key, self._runs.path_tokens(run)) for name, (key, run) in self.held.items()]

    def _companions_of(self, blocks: array[int]) -> list[int]:
        """What a prompt that goes on after these full blocks reads in the windows."""
        return [*chain.from_iterable(self._windows.companions_of(blocks))]

    def _pinned_runs(self) -> set[Run]:
        return {run for _, end in self.held.values() for run in path_of(end)}
