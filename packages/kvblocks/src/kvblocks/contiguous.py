"""Contiguous memory without compaction: what paging is compared with.

Knows addresses, free runs and why a request is refused. Does not know requests, tokens or bytes: a unit
is whatever the caller counts in.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvblocks.errors import InvalidSize, InvariantViolation
from kvblocks.sizing import require


class Segment(NamedTuple):
    """Consecutive units that are all free or all in use."""

    size: int
    is_free: bool


class Fragmentation(NamedTuple):
    """What is free, in the runs that it lies in."""

    free_runs: tuple[int, ...]

    @property
    def num_free(self) -> int:
        """All that is free."""
        return sum(self.free_runs)

    @property
    def largest_run(self) -> int:
        """The most that can be had in one piece."""
        return max(self.free_runs, default=0)

    def fits(self, size: int) -> bool:
        """Whether a request for one piece can be served."""
        return size <= self.largest_run

    def is_fragmented_for(self, size: int) -> bool:
        """Whether enough is free, and not in one piece: external fragmentation."""
        return self.largest_run < size <= self.num_free


def fragmentation(segments: Iterable[Segment]) -> Fragmentation:
    """The free runs of segments in the order of their addresses; neighbours coalesce. `InvalidSize`.

    >>> found = fragmentation([Segment(128, True), Segment(64, False), Segment(128, True), Segment(64, True)])
    >>> found.free_runs, found.num_free, found.fits(256), found.is_fragmented_for(256)
    ((128, 192), 320, False, True)
    """
    runs = [0]
    for size, is_free in segments:
        require("the size of a segment", size, least=0)
        if is_free:
            runs[-1] += size
        else:
            runs.append(0)
    return Fragmentation(tuple(run for run in runs if run))


class Run(NamedTuple):
    """Units [address, address + size) that were handed out."""

    address: int
    size: int


class Contiguous(Protocol):
    """An allocator that hands out runs."""

    @property
    def num_units(self) -> int:
        """The size of the memory."""

    @property
    def num_free(self) -> int:
        """All that is free, in whatever pieces. O(1)."""

    def size_for(self, size: int) -> int:
        """What a request for so much would take, rounding included."""

    def allocate(self, size: int) -> Run | None:
        """A run of at least this size, or None where no free run is long enough. `InvalidSize`."""

    def release(self, run: Run) -> None:
        """Give a run back; it coalesces with its free neighbours. `InvalidSize` if it was not out."""

    def fragmentation(self) -> Fragmentation:
        """What is free. O(free runs)."""

    def check(self) -> None:
        """Prove that runs cover the memory once. `InvariantViolation`."""


class FirstFit:
    """The first free run that is long enough serves; nothing is moved.

    >>> memory = FirstFit(320)
    >>> a, b, c = (memory.allocate(size) for size in (128, 64, 128))
    >>> memory.release(a), memory.release(c)
    (None, None)
    >>> memory.num_free, memory.allocate(200)
    (256, None)
    """

    def __init__(self, num_units: int) -> None:
        require("num_units", num_units)
        self.num_units = self.num_free = num_units
        # Free runs by address, never adjacent: two lists, so that bisect finds a place.
        self._starts = [0]
        self._sizes = [num_units]
        self._out: dict[int, int] = {}

    def size_for(self, size: int) -> int:
        """Just that."""
        return size

    def allocate(self, size: int) -> Run | None:
        """The start of the first free run that is long enough. O(free runs). `InvalidSize`."""
        require("size", size)
        place = next((i for i, free in enumerate(self._sizes) if free >= size), None)
        if place is None:
            return None
        run = Run(self._starts[place], size)
        if self._sizes[place] == size:
            del self._starts[place], self._sizes[place]
        else:
            self._starts[place] += size
            self._sizes[place] -= size
        self._out[run.address] = size
        self.num_free -= size
        return run

    def release(self, run: Run) -> None:
        """Give a run back. O(free runs). `InvalidSize`."""
        require_out(self._out, run)
        del self._out[run.address]
        self.num_free += run.size
        #    ... | left | run | right | ...     the run lies between free runs, and may touch either
        place = bisect(self._starts, run.address)
        start, stop = run.address, run.address + run.size
        if place < len(self._starts) and self._starts[place] == stop:
            stop += self._sizes[place]
            del self._starts[place], self._sizes[place]
        if place and self._starts[place - 1] + self._sizes[place - 1] == start:
            self._sizes[place - 1] = stop - self._starts[place - 1]
        else:
            self._starts.insert(place, start)
            self._sizes.insert(place, stop - start)

    def fragmentation(self) -> Fragmentation:
        """What is free. O(free runs)."""
        return Fragmentation(tuple(self._sizes))

    def check(self) -> None:
        """Prove that runs cover the memory once. `InvariantViolation`."""
        free = list(zip(self._starts, self._sizes, strict=True))
        require_cover(self.num_units, free, self._out, self.num_free)
        if any(
            start + size == after
            for (start, size), after in zip(free, self._starts[1:], strict=False)
        ):
            raise InvariantViolation(f"free runs must not be adjacent, got {free}")


class Buddy:
    """Runs are powers of two at multiples of their size; a run coalesces with its buddy only.

    What Orca is taken to use (Kwon et al., 2023). A request is rounded up to a power of two, so that
    memory is lost inside of runs to keep it from being lost between them. A memory that is no power
    of two itself is several that are, the largest first.

    >>> memory = Buddy(16)
    >>> memory.allocate(5), memory.allocate(3), memory.num_free
    (Run(address=0, size=8), Run(address=8, size=4), 4)
    """

    def __init__(self, num_units: int) -> None:
        require("num_units", num_units)
        self.num_units = self.num_free = num_units
        self._free: dict[int, set[int]] = {}  # addresses by size
        self._out: dict[int, int] = {}
        #    0     | 4 units | 2 | 1 |     7 units: descending sizes lie at multiples of themselves
        for size in (1 << bit for bit in range(num_units.bit_length()) if num_units >> bit & 1):
            num_units -= size
            self._free[size] = {num_units}

    def size_for(self, size: int) -> int:
        """The next power of two."""
        return power_of_two(size)

    def allocate(self, size: int) -> Run | None:
        """The lowest of the smallest free runs that do. O(log units + free runs). `InvalidSize`."""
        require("size", size)
        size = power_of_two(size)
        larger = size
        while larger <= self.num_units and not self._free.get(larger):
            larger *= 2
        if larger > self.num_units:
            return None
        address = min(self._free[larger])
        self._free[larger].remove(address)
        #    | size | size |  2 * size  |    4 * size    |    what is cut off on the right is free
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, set()).add(address + larger)
        self._out[address] = size
        self.num_free -= size
        return Run(address, size)

    def release(self, run: Run) -> None:
        """Give a run back. O(log units). `InvalidSize`."""
        require_out(self._out, run)
        del self._out[run.address]
        self.num_free += run.size
        address, size = run
        while address ^ size in self._free.get(size, ()):
            self._free[size].remove(address ^ size)
            address &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(address)

    def fragmentation(self) -> Fragmentation:
        """What is free, in runs that can be handed out. O(free runs)."""
        return Fragmentation(
            tuple(
                size for _, size in sorted((a, n) for n, all_ in self._free.items() for a in all_)
            )
        )

    def check(self) -> None:
        """Prove that runs cover the memory once. `InvariantViolation`."""
        free = [(address, size) for size, all_ in self._free.items() for address in all_]
        require_cover(self.num_units, free, self._out, self.num_free)
        for address, size in free:
            if address % size or (address ^ size) in self._free[size]:
                raise InvariantViolation(
                    f"a free run must be aligned and alone, got {address}, {size}"
                )


def power_of_two(size: int) -> int:
    """The least power of two that is at least this.

    >>> [power_of_two(size) for size in (1, 2, 3, 200, 256)]
    [1, 2, 4, 256, 256]
    """
    return 1 << (size - 1).bit_length()


def require_out(out: dict[int, int], run: Run) -> None:
    """Refuse a run that is not handed out. `InvalidSize`."""
    if out.get(run.address) != run.size:
        raise InvalidSize(f"a run must be handed out to be released, got {run}")


def require_cover(
    num_units: int, free: Iterable[tuple[int, int]], out: dict[int, int], num_free: int
) -> None:
    """Prove that free and handed out runs cover [0, num_units) once. `InvariantViolation`."""
    free = list(free)
    place = 0
    for start, size in sorted([*free, *out.items()]):
        if start != place:
            raise InvariantViolation(
                f"runs must cover all addresses once, got {start} after {place}"
            )
        place += size
    if place != num_units or sum(size for _, size in free) != num_free:
        raise InvariantViolation(
            f"runs must cover {num_units} units, {num_free} of them free, got {place} and "
            f"{sum(size for _, size in free)}"
        )
