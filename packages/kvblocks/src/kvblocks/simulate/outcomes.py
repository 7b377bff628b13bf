"""What a replay answers, under the names that `--json` prints.

Knows the figures and their names. Does not know how they come about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Load:
    """How full a pool was while requests overlapped: all of them, measured or not."""

    peak_running_requests: int
    peak_held_blocks: int
    num_waited: int
    mean_wait_seconds: float
    longest_wait_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How often one pool hits under one policy, over the measured requests.

    `semantics` says what a hit is: see `kvblocks.simulate`. `refused_requests` did not fit the pool
    at all; their blocks and tokens count as looked for and not found.
    """

    policy: str
    semantics: str
    capacity: int
    hit_blocks: int
    total_blocks: int
    hit_tokens: int
    total_tokens: int
    evictions: int
    refused_requests: int = 0
    load: Load | None = None

    @property
    def hit_rate(self) -> float:
        """Hit tokens of all tokens, 0 where there are none."""
        return self.hit_tokens / self.total_tokens if self.total_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """The figures by name; `load` only where requests overlapped."""
        found = asdict(self)
        if self.load is None:
            del found["load"]
        return found
