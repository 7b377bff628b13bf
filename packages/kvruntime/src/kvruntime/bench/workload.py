"""A load as a whole: which requests, and when they are due.

Knows how prompts and arrivals go together. Does not know servers, engines or clocks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvruntime.bench.arrivals import arrival_times
from kvruntime.bench.prompts import (
    Asked,
    Shape,
    as_text,
    prompts_of_file,
    prompts_of_trace,
    random_prompts,
)
from kvruntime.errors import InvalidRequest

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a shape, of a trace or of a file of prompts, and the times they are due.

    `request_rate` None means the trace's own times, `speed` times as fast, or everything at once.
    `is_text` sends words instead of token ids.
    """

    num_prompts: int = 100
    shape: Shape = field(default_factory=Shape)
    trace: Path | None = None
    length_scale: float = 1.0
    prompts: Path | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    speed: float = 1.0
    seed: int = 0
    is_text: bool = False

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise InvalidRequest(f"num_prompts must be at least 1, got {self.num_prompts}")
        if self.trace and self.prompts:
            raise InvalidRequest("prompts are those of a trace or of a file, not of both")
        if not self.speed > 0:
            raise InvalidRequest(f"speed must be above 0, got {self.speed}")

    def asked(self) -> list[Asked]:
        """The requests in order; fewer than `num_prompts` where a trace has no more."""
        if self.trace:
            asked = prompts_of_trace(
                self.trace,
                self.shape,
                num_requests=self.num_prompts,
                length_scale=self.length_scale,
                seed=self.seed,
            )
        elif self.prompts:
            asked = prompts_of_file(self.prompts, self.shape, num_requests=self.num_prompts)
        else:
            asked = random_prompts(self.num_prompts, self.shape, seed=self.seed)
        return [as_text(one) for one in asked] if self.is_text else asked

    def warm_up(self, count: int) -> list[Asked]:
        """Small requests with content of their own, to be answered before anything is measured."""
        shape = Shape(input_len=8, output_len=2, vocab_size=self.shape.vocab_size)
        asked = random_prompts(count, shape, seed=self.seed + 1)
        return [as_text(one) for one in asked] if self.is_text else asked

    def arrivals(self, asked: Sequence[Asked]) -> list[float]:
        """When each of them is due, in seconds from 0."""
        stated = [one.arrival for one in asked if one.arrival is not None]
        if self.request_rate is None and len(stated) == len(asked):
            return [time / self.speed for time in stated]
        return arrival_times(
            len(asked),
            math.inf if self.request_rate is None else self.request_rate,
            burstiness=self.burstiness,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """The settings for machines; an infinite rate is the text "inf"."""
        told = asdict(self)
        for key in ("trace", "prompts"):
            told[key] = told[key] and told[key].name
        if self.request_rate is not None and math.isinf(self.request_rate):
            told["request_rate"] = "inf"
        return told
