"""Ways to give running requests memory, under one interface: contiguous ones, and the real paged one.

| name | asks for | of | grows |
|---|---|---|---|
| `reserve-max` | the longest request there may be | buddy | never |
| `pow2` | the prompt and the next power of two of the answer | buddy | never |
| `oracle` | what will be needed, which nobody knows | buddy | never |
| `first-fit` | what will be needed | first fit | never |
| `grow` | the prompt, in steps of fixed size | first fit | moves to a larger run |
| `paged` | the prompt, in blocks | `BlockManager` | takes a block |

The first three are Orca (Max), (Pow2) and (Oracle) of Kwon et al., *Efficient memory management for
large language model serving with PagedAttention*, SOSP 2023.

Knows what a request holds, and what it will and will not use of it. Does not know queues and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvblocks.contiguous import Buddy, Contiguous, FirstFit, Run, power_of_two
from kvblocks.errors import InvalidSize, OutOfBlocks
from kvblocks.manager import BlockManager
from kvblocks.sizing import require
from kvblocks.units import shorten


class Tenant:
    """A running request and the slots that it holds.

        | tokens | reserved | over-allocated | rounding |
        0        length     final length     usable     held

    `num_usable` is what it may write without asking, `num_held` is what nobody else can have.
    """

    __slots__ = ("final_length", "length", "num_held", "num_prompt", "num_usable", "run")

    def __init__(self, num_prompt: int, num_generated: int) -> None:
        require("num_prompt", num_prompt)
        require("num_generated", num_generated)
        self.num_prompt = num_prompt
        self.final_length = num_prompt + num_generated
        self.length = num_prompt  # tokens that are there
        self.num_usable = 0
        self.num_held = 0
        self.run: Run | None = None

    @property
    def num_reserved(self) -> int:
        """Slots that will be used later."""
        return min(self.num_usable, self.final_length) - self.length

    @property
    def num_over_allocated(self) -> int:
        """Slots that are never used: too many were asked for."""
        return max(0, self.num_usable - self.final_length)

    @property
    def num_rounding(self) -> int:
        """Slots that are never used: the rest of a chunk."""
        return self.num_held - self.num_usable


class Baseline(Protocol):
    """How memory is given to requests that come, grow and go."""

    @property
    def num_slots(self) -> int:
        """The memory, in tokens."""

    @property
    def num_moved_tokens(self) -> int:
        """Tokens copied to another place so that their request could grow."""

    def demand(self, tenant: Tenant) -> int:
        """The slots that it would ask for now, before rounding."""

    def admit(self, tenant: Tenant) -> bool:
        """Give it memory for its tokens, or change nothing."""

    def advance(self, tenants: Sequence[Tenant]) -> bool:
        """Let each write one token, or none of them where memory does not do."""

    def release(self, tenant: Tenant) -> None:
        """Take its memory back."""


class Reserving:
    """All that a request may ever take, at once and in one piece.

    >>> memory = Reserving(FirstFit(4096), lambda tenant: 2048)
    >>> tenant = Tenant(num_prompt=150, num_generated=50)
    >>> memory.admit(tenant), tenant.num_over_allocated
    (True, 1848)
    """

    def __init__(self, memory: Contiguous, demand: Callable[[Tenant], int]) -> None:
        self.memory = memory
        self.num_slots = memory.num_units
        self.num_moved_tokens = 0
        self._demand = demand

    def demand(self, tenant: Tenant) -> int:
        """What the strategy says, at least what is there already."""
        return max(self._demand(tenant), tenant.final_length)

    def admit(self, tenant: Tenant) -> bool:
        """One run, or nothing."""
        demand = self.demand(tenant)
        tenant.run = self.memory.allocate(demand)
        if tenant.run is None:
            return False
        tenant.num_usable, tenant.num_held = demand, tenant.run.size
        return True

    def advance(self, tenants: Sequence[Tenant]) -> bool:
        """Nothing to ask for."""
        for tenant in tenants:
            tenant.length += 1
        return True

    def release(self, tenant: Tenant) -> None:
        """The whole run."""
        assert tenant.run is not None, "it was admitted"
        self.memory.release(tenant.run)
        tenant.run = None


class Growing:
    """A run of whole steps, which moves to a longer one when it is full.

    `step` 1 is a cache that is concatenated for every token. Old and new run exist side by side
    while tokens are copied, as they do when a tensor is concatenated.

    >>> memory = Growing(64, step=16)
    >>> tenant = Tenant(num_prompt=15, num_generated=40)
    >>> memory.admit(tenant), tenant.num_usable
    (True, 16)
    >>> memory.advance([tenant]), memory.advance([tenant]), memory.num_moved_tokens
    (True, True, 16)
    """

    def __init__(self, num_slots: int, step: int) -> None:
        require("step", step)
        self.memory = FirstFit(num_slots)
        self.num_slots = num_slots
        self.num_moved_tokens = 0
        self._step = step

    def demand(self, tenant: Tenant) -> int:
        """Its tokens and one more, in whole steps."""
        return -(-(tenant.length + 1) // self._step) * self._step

    def admit(self, tenant: Tenant) -> bool:
        """A first run, or nothing."""
        tenant.run = self.memory.allocate(self.demand(tenant))
        if tenant.run is None:
            return False
        self._measure(tenant, tenant.run)
        return True

    def advance(self, tenants: Sequence[Tenant]) -> bool:
        """Move those whose run is full; those that moved stay moved if another cannot."""
        for tenant in tenants:
            if tenant.run is not None and tenant.length == tenant.run.size:
                run = self.memory.allocate(self.demand(tenant))
                if run is None:
                    return False
                self.num_moved_tokens += tenant.length
                self.memory.release(tenant.run)
                tenant.run = run
                self._measure(tenant, run)
        for tenant in tenants:
            tenant.length += 1
        return True

    def release(self, tenant: Tenant) -> None:
        """The whole run."""
        assert tenant.run is not None, "it was admitted"
        self.memory.release(tenant.run)
        tenant.run = None

    @staticmethod
    def _measure(tenant: Tenant, run: Run) -> None:
        # What is never used of the last step is its rest, not something that was asked for.
        tenant.num_usable, tenant.num_held = min(run.size, tenant.final_length), run.size


class Paged:
    """Blocks of the real `BlockManager`, without a prefix cache.

    >>> memory = Paged(num_blocks=4, block_size=16)
    >>> tenant = Tenant(num_prompt=15, num_generated=5)
    >>> memory.admit(tenant), tenant.num_held, memory.advance([tenant]), memory.advance([tenant])
    (True, 16, True, True)
    >>> tenant.num_held
    32
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=False)
        self.num_slots = num_blocks * block_size
        self.num_moved_tokens = 0

    def demand(self, tenant: Tenant) -> int:
        """Its tokens and one more: who is admitted can go on."""
        return tenant.length + 1

    def admit(self, tenant: Tenant) -> bool:
        """Blocks for its tokens, or nothing."""
        if not self.manager.can_allocate(self.demand(tenant)).is_now:
            return False
        self.manager.allocate(tenant, tenant.length)
        self.manager.append({tenant: tenant.length})
        self._measure(tenant)
        return True

    def advance(self, tenants: Sequence[Tenant]) -> bool:
        """One batch, all or nothing."""
        try:
            plan = self.manager.append(dict.fromkeys(tenants, 1))
        except OutOfBlocks:
            return False
        for tenant in tenants:
            tenant.length += 1
        for tenant in tenants:
            if tenant in plan.new_blocks:
                self._measure(tenant)
        return True

    def release(self, tenant: Tenant) -> None:
        """All its blocks."""
        self.manager.free(tenant)

    def _measure(self, tenant: Tenant) -> None:
        tenant.num_held = len(self.manager.block_table(tenant)) * self.manager.block_size
        tenant.num_usable = min(tenant.num_held, tenant.final_length)


NAMES = ("reserve-max", "pow2", "oracle", "first-fit", "grow", "paged")


def make_baseline(
    name: str, num_slots: int, *, max_length: int, block_size: int = 16, step: int = 256
) -> Baseline:
    """A way of `NAMES` over so many slots, which hold a request of `max_length`. `InvalidSize`.

    >>> make_baseline("grow", 4096, max_length=2048).num_slots
    4096
    """
    require("num_slots", num_slots)
    require("max_length", max_length)
    if name == "paged":
        require("block_size", block_size)
        _require_room(name, max_length, num_slots - num_slots % block_size)
        return Paged(num_slots // block_size, block_size)
    if name == "grow":
        require("step", step)
        _require_room(name, -(-max_length // step) * step, num_slots)
        return Growing(num_slots, step)

    def next_power(tenant: Tenant) -> int:
        num_generated = tenant.final_length - tenant.num_prompt
        return min(max_length, tenant.num_prompt + power_of_two(num_generated))

    demands: dict[str, Callable[[Tenant], int]] = {
        "reserve-max": lambda _tenant: max_length,
        "pow2": next_power,
        "oracle": lambda tenant: tenant.final_length,
        "first-fit": lambda tenant: tenant.final_length,
    }
    if name not in demands:
        raise InvalidSize(f"a baseline must be one of {', '.join(NAMES)}, got {shorten(name)}")
    memory = FirstFit(num_slots) if name == "first-fit" else Buddy(num_slots)
    _require_room(name, memory.size_for(max_length), memory.fragmentation().largest_run)
    return Reserving(memory, demands[name])


def _require_room(name: str, needed: int, largest: int) -> None:
    if needed > largest:
        raise InvalidSize(
            f"{name} needs {needed:,} slots for a request of max_length, got {largest:,}"
        )
