"""How a request wants its tokens chosen. Knows the rules of the values, not how sampling works."""

from dataclasses import dataclass
from numbers import Integral

from kvruntime.errors import InvalidRequest

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling, in the field's names and order: temperature, top-k, top-p.

    Args:
        n: samples of one prompt; the prompt is computed once and its blocks are shared.
        max_tokens: tokens to generate at most, a sample.
        temperature: 0 chooses the likeliest token; above 0 divides the logits.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all.
        seed: equal seeds give equal samples, whatever else runs; None draws a new one.
        ignore_eos: go on after an end-of-text token.
    """

    n: int = 1
    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            is_unset = name == "seed" and value is None
            _require(
                is_unset or isinstance(value, Integral), f"{name} must be an integer, got {value!r}"
            )
        _require(self.n >= 1, f"n must be at least 1, got {self.n}")
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _require(
            0 <= self.temperature < float("inf"),
            f"temperature must be 0 or a finite number above it, got {self.temperature}",
        )
        _require(self.top_k >= 0, f"top_k must be 0 (all) or above, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed must be in [0, 2**64), got {self.seed}",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature == 0


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 -- reads as "require (this)"
    if not holds:
        raise InvalidRequest(message)
