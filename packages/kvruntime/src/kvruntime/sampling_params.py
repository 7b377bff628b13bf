"""How a request wants its tokens chosen. Knows the rules of the values, not how sampling works."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from kvruntime.errors import InvalidRequest
from kvruntime.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "GenerationParams", "SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What sampling and beam search share: how many, how long, and what changes the logits.

    Args:
        n: answers to one prompt; the prompt is computed once and its blocks are shared.
        max_tokens: tokens to generate at most, an answer.
        min_tokens: tokens to generate before an end-of-text or stop token may come.
        ignore_eos: go on after an end-of-text token.
        stop_token_ids: tokens that end an answer as an end-of-text token does.
        repetition_penalty: above 1 makes tokens of the prompt and the output less likely: a positive
            logit is divided by it, a negative one multiplied (Keskar et al., 2019).
        frequency_penalty: subtracted from a logit for each time the output has the token.
        presence_penalty: subtracted from a logit once if the output has the token.
        logit_bias: added to the logits of these token ids; -inf forbids a token.
        structured_outputs: what the text must be. An answer ends where it is complete, or at
            `max_tokens` before that. It goes before bias and `min_tokens` where those leave no token
            that is allowed. Not for beams.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _require_integers(self, "n", "max_tokens", "min_tokens")
        _require(self.n >= 1, f"n must be at least 1, got {self.n}")
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be in [0, max_tokens], got {self.min_tokens} and {self.max_tokens}",
        )
        _require_numbers(self, "repetition_penalty", "frequency_penalty", "presence_penalty")
        _require(
            self.repetition_penalty > 0,
            f"repetition_penalty must be above 0, got {self.repetition_penalty}",
        )
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        bias = dict(
            zip(_token_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True)
        )
        for token_id, value in bias.items():
            _require(
                _is_number(value) and value < math.inf,
                f"logit_bias must be a number below infinity, got {value!r} for {token_id}",
            )
        _set(self, "logit_bias", bias)
        _check_structured_outputs(self.structured_outputs, ignore_eos=self.ignore_eos)

    @property
    def num_sequences(self) -> int:
        """How many sequences run side by side once the prompt is computed."""
        return self.n

    @property
    def changes_logits(self) -> bool:
        """Whether anything but a draw stands between the model's logits and a token."""
        return (
            bool(self.logit_bias)
            or self.min_tokens > 0
            or self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(GenerationParams):
    """One request's sampling, in the field's names.

    Logits are changed in this order: bias, penalties, structured outputs, temperature, min-p, top-k,
    top-p.

    Args:
        best_of: samples to draw, of which the n with the highest log-probability a token are
            answered; None draws n.
        temperature: 0 chooses the likeliest token; above 0 divides the logits.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 keeps all.
        seed: equal seeds give equal samples, whatever else runs; None draws a new one.
        stop: texts that end a sample where the first of them is complete.
        include_stop_str_in_output: keep the stop text in the answer.
        logprobs: with each token its log-probability and this many of the likeliest tokens;
            before bias, penalties, structured outputs and temperature. None gives none.
        prompt_logprobs: the same for the tokens of the prompt; the first has none.
    """

    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        GenerationParams.__post_init__(self)  # super() knows the class before it had slots
        _require_integers(self, "top_k")
        _require_integers(self, "best_of", "seed", "logprobs", "prompt_logprobs", allows_none=True)
        _require(
            self.best_of is None or self.best_of >= self.n,
            f"best_of must be at least n, got {self.best_of} and {self.n}",
        )
        _require(
            0 <= self.temperature < math.inf,
            f"temperature must be 0 or a finite number above it, got {self.temperature}",
        )
        _require(self.top_k >= 0, f"top_k must be 0 (all) or above, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed must be in [0, 2**64), got {self.seed}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"{name} must be at least 0, got {value}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _require(
            all(map(_is_text, stop)),
            f"stop must be texts that are not empty, got {self.stop!r}",
        )
        _set(self, "stop", stop)

    @property
    def num_sequences(self) -> int:
        """How many samples are drawn."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(GenerationParams):
    """Beam search with the rules of Hugging Face's `generate(num_beams=...)`.

    A hypothesis scores its summed log-probability divided by its length to the power of
    `length_penalty`; the length counts generated tokens, the end-of-text token included.

    Args:
        num_beams: hypotheses that are followed at the same time; n of them are answered.
        length_penalty: above 0 favours long answers, below 0 short ones.
        early_stopping: True ends when `num_beams` answers are complete; False when the best open
            beam cannot beat the worst of them at its present length; "never" when it cannot at
            any length it may reach.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        GenerationParams.__post_init__(self)
        _require_integers(self, "num_beams")
        _require_numbers(self, "length_penalty")
        _require(self.structured_outputs is None, "beam search takes no structured_outputs")
        _require(
            self.n <= self.num_beams,
            f"n must be at most num_beams, got {self.n} and {self.num_beams}",
        )
        _require(
            self.early_stopping in (True, False, "never"),
            f'early_stopping must be True, False or "never", got {self.early_stopping!r}',
        )

    @property
    def num_sequences(self) -> int:
        """How many beams run side by side."""
        return self.num_beams


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 -- reads as "require (this)"
    if not holds:
        raise InvalidRequest(message)


def _check_structured_outputs(value: object, *, ignore_eos: bool) -> None:
    if value is None:
        return
    _require(
        isinstance(value, StructuredOutputsParams),
        f"structured_outputs must be StructuredOutputsParams, got {value!r}",
    )
    _require(
        not ignore_eos, "ignore_eos must be False where structured_outputs say where an answer ends"
    )


def _require_integers(params: object, *names: str, allows_none: bool = False) -> None:
    for name in names:
        value = getattr(params, name)
        is_unset = allows_none and value is None
        _require(
            is_unset or isinstance(value, Integral), f"{name} must be an integer, got {value!r}"
        )


def _require_numbers(params: object, *names: str) -> None:
    for name in names:
        value = getattr(params, name)
        _require(
            isinstance(value, Real) and math.isfinite(value),
            f"{name} must be a finite number, got {value!r}",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _token_ids(name: str, values: Iterable[object]) -> tuple[int, ...]:
    token_ids = []
    for value in values:
        if not isinstance(value, Integral) or value < 0:
            raise InvalidRequest(
                f"{name} must name token ids, integers of at least 0, got {value!r}"
            )
        token_ids.append(int(value))
    return tuple(token_ids)


def _set(params: object, name: str, value: object) -> None:
    """Store the form that a frozen value keeps of what it was given."""
    object.__setattr__(params, name, value)
