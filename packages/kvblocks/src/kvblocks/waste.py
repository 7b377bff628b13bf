"""How much of the memory for keys and values holds tokens, under each way to hand it out.

The experiment of the memory figure of Kwon et al., SOSP 2023: requests wait in a queue that never runs
dry, each is admitted as soon as it gets memory, in order, and all that run write a token a step. What
differs is who hands out memory (`kvblocks.baselines`); the stream of requests is the same. Who cannot go
on takes memory from the request that came last, which is computed again later.

A slot is in exactly one state:

| state | a slot |
|---|---|
| tokens | holds a token |
| reserved | will be used by the request that has it |
| over-allocated | is never used: more was asked for than needed |
| rounding | is never used: the rest of a chunk or block |
| external | is free, and the next request is refused although as much as it asks for is free |
| idle | is free, and less than the next request asks for |

The paper's words: reservation = reserved, internal fragmentation = over-allocated + rounding, external
fragmentation and others = external + idle.

Knows a queue and steps. Does not know time: a step of a large batch takes longer, so that more requests
at once are not as many times the throughput.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvblocks.baselines import Baseline, Tenant
from kvblocks.errors import InvalidSize
from kvblocks.simulate.progress import Progress, silent
from kvblocks.sizing import require

STATES = ("tokens", "reserved", "over_allocated", "rounding", "external", "idle")


class Lengths(NamedTuple):
    """Tokens of one request, at least one each."""

    num_prompt: int
    num_generated: int


def sharegpt_like(seed: int, max_length: int = 2048) -> Iterator[Lengths]:
    """Requests without end, of lengths as in ShareGPT: log-normal, means 161 and 338 before cutting.

    The means are those of the paper's text; the spreads are ours. Prompt and answer are at least 4
    tokens, and at most half of `max_length` each. `InvalidSize`.

    >>> next(sharegpt_like(seed=0)) == next(sharegpt_like(seed=0))
    True
    """
    require("max_length", max_length, least=8)
    rng = random.Random(seed)  # noqa: S311 -- a simulation, and the same one for the same seed

    def draw(mean: float, spread: float) -> int:
        tokens = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return min(max_length // 2, max(4, int(tokens)))

    while True:
        yield Lengths(draw(161, 1.2), draw(338, 0.9))


@dataclass(frozen=True, slots=True)
class Waste:
    """What became of memory, on average over the measured steps. The six shares add up to 1."""

    tokens: float
    reserved: float
    over_allocated: float
    rounding: float
    external: float
    idle: float
    mean_batch: float  # requests at once
    num_steps: int
    num_finished: int
    num_preempted: int
    num_refused: int  # larger than the whole memory
    num_moved_tokens: int  # copied so that a request could grow

    @property
    def internal(self) -> float:
        """What the paper calls internal fragmentation."""
        return self.over_allocated + self.rounding


def measure_waste(
    baseline: Baseline,
    requests: Iterable[Lengths],
    *,
    max_steps: int,
    progress: Progress = silent,
) -> Waste:
    """Serve requests until none is left or `max_steps` are done; the first quarter warms up.

    Each step is looked at when all have been admitted that can be, so that what waits was refused
    just now. A request larger than the whole memory is counted and left out. O(steps * requests at
    once). `InvalidSize`.

    >>> from kvblocks.baselines import make_baseline
    >>> memory = make_baseline("reserve-max", 4096, max_length=2048)
    >>> waste = measure_waste(memory, [Lengths(100, 100)] * 100, max_steps=1000)
    >>> waste.mean_batch, round(waste.tokens, 3), round(waste.over_allocated, 3)
    (2.0, 0.074, 0.902)
    """
    require("max_steps", max_steps)
    queue = _Queue(baseline, requests)
    totals = dict.fromkeys(STATES, 0)
    num_measured = num_steps = batch = 0
    for step in range(max_steps):
        progress(step)
        if not queue.admit():
            break
        if step >= max_steps // 4:
            num_measured += 1
            batch += len(queue.running)
            for name, slots in queue.slots().items():
                totals[name] += slots
        queue.advance()
        queue.release_finished()
        num_steps += 1
    if not num_measured:
        raise InvalidSize(
            f"the queue must be full for longer than the {max_steps // 4} steps that warm up, got "
            f"{num_steps} steps; more requests or fewer steps are needed"
        )
    shares = {name: slots / num_measured / baseline.num_slots for name, slots in totals.items()}
    return Waste(
        **shares,
        mean_batch=batch / num_measured,
        num_steps=num_steps,
        num_finished=queue.num_finished,
        num_preempted=queue.num_preempted,
        num_refused=queue.num_refused,
        num_moved_tokens=baseline.num_moved_tokens,
    )


class _Queue:
    """Requests that wait and requests that run, in the order in which they came."""

    def __init__(self, baseline: Baseline, requests: Iterable[Lengths]) -> None:
        self._baseline = baseline
        self._requests = iter(requests)
        self._waiting: deque[Tenant] = deque()  # those that were preempted, and the next one
        self.running: list[Tenant] = []
        self.num_finished = self.num_preempted = self.num_refused = 0

    def admit(self) -> bool:
        """Admit in order until one has to wait; whether one does."""
        while self._next() is not None:
            tenant = self._waiting[0]
            if self._baseline.admit(tenant):
                self.running.append(tenant)
            elif self.running:
                return True
            else:  # alone it has all the memory there is
                self.num_refused += 1
            self._waiting.popleft()
        return False

    def _next(self) -> Tenant | None:
        if not self._waiting:
            self._waiting.extend(Tenant(*lengths) for lengths in islice(self._requests, 1))
        return self._waiting[0] if self._waiting else None

    def advance(self) -> None:
        """A token for everyone that runs; the last to come gives way where memory does not do."""
        while self.running and not self._baseline.advance(self.running):
            # Also one that is alone: computed again, it starts where more is free behind it.
            last = self.running.pop()
            self._baseline.release(last)
            self._waiting.appendleft(last)
            self.num_preempted += 1

    def release_finished(self) -> None:
        """Those that have all their tokens."""
        for tenant in self.running:
            if tenant.length >= tenant.final_length:
                self._baseline.release(tenant)
                self.num_finished += 1
        self.running = [tenant for tenant in self.running if tenant.length < tenant.final_length]

    def slots(self) -> dict[str, int]:
        """How many slots are in each state."""
        free = self._baseline.num_slots - sum(tenant.num_held for tenant in self.running)
        is_external = self._baseline.demand(self._waiting[0]) <= free
        return {
            "tokens": sum(tenant.length for tenant in self.running),
            "reserved": sum(tenant.num_reserved for tenant in self.running),
            "over_allocated": sum(tenant.num_over_allocated for tenant in self.running),
            "rounding": sum(tenant.num_rounding for tenant in self.running),
            "external": free if is_external else 0,
            "idle": 0 if is_external else free,
        }
