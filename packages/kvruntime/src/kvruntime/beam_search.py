"""Beam search, by the rules of Hugging Face's `generate(num_beams=...)`.

Knows scores, tokens and lengths: which candidates go on, which are complete, when it is over. Does
not know logits processors, blocks or which sequence computes what.

The arithmetic is float32 and in the order of the original, so that equal logits give equal answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvruntime.sampling_params import BeamSearchParams

__all__ = ["BeamSearch", "Candidates", "Continuation", "Hypothesis"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of one beam: log-probabilities float32 [K] and ids int64 [K]."""

    logprobs: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam goes on with a token; `parent` is its place among the beams so far."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer; `score` is the summed log-probability after the length penalty."""

    score: float
    token_ids: list[int]
    is_stopped: bool  # by a token, not by its length


class BeamSearch:
    """The state of one search: the scores of its open beams, and its best complete answers."""

    def __init__(
        self, params: BeamSearchParams, *, stop_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self.finished: list[Hypothesis] = []  # the best first, num_beams at most
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._scores = [0.0]

    @property
    def num_candidates(self) -> int:
        """How many candidates are looked at: enough that as many as there are beams can go on."""
        return self._params.num_beams * max(2, 1 + len(self._stop_token_ids))

    def candidates(self, logprobs: torch.Tensor) -> Candidates:
        """Return what of one beam's log-probabilities, float32 [vocab_size], can matter."""
        best = logprobs.topk(min(self.num_candidates, len(logprobs)))
        return Candidates(best.values, best.indices)

    def advance(
        self, beams: Sequence[Sequence[int]], candidates: Sequence[Candidates]
    ) -> list[Continuation]:
        """Take one step from the open beams' outputs; the beams that go on, the best first.

        There are none when the search is over: `finished` has the answers then.
        """
        params = self._params
        length = len(beams[0]) + 1
        best = self._best(candidates)
        goes_on = [
            length < self._max_tokens and one.token_id not in self._stop_token_ids for one in best
        ]
        complete = [
            one
            for one, is_open in zip(best[: params.num_beams], goes_on, strict=False)
            if not is_open
        ]
        self._keep(beams, complete, length)
        going = [one for one, is_open in zip(best, goes_on, strict=True) if is_open]
        going = going[: params.num_beams]
        if not going or self._is_over(going[0].score, length):
            return []
        self._scores = [one.score for one in going]
        return going

    def _best(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """The best candidates of all beams together, by the sum of their log-probabilities."""
        scores = torch.tensor(self._scores, dtype=torch.float32)
        totals = torch.stack([one.logprobs for one in candidates]) + scores[:, None]
        token_ids = torch.stack([one.token_ids for one in candidates])
        best = totals.flatten().topk(min(self.num_candidates, totals.numel()))
        return [
            Continuation(place // totals.shape[1], token_id, score)
            for place, token_id, score in zip(
                best.indices.tolist(),
                token_ids.flatten()[best.indices].tolist(),
                best.values.tolist(),
                strict=True,
            )
            if score > -torch.inf
        ]

    def _keep(
        self, beams: Sequence[Sequence[int]], complete: Sequence[Continuation], length: int
    ) -> None:
        """Add complete answers, and keep the best."""
        new = [
            Hypothesis(
                self._penalised(one.score, length),
                [*beams[one.parent], one.token_id],
                one.token_id in self._stop_token_ids,
            )
            for one in complete
        ]
        ranked = sorted([*self.finished, *new], key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self._params.num_beams]

    def _is_over(self, best_open_score: float, length: int) -> bool:
        """Whether no open beam is expected to beat the complete answers."""
        params = self._params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        at_its_best = params.early_stopping == "never" and params.length_penalty > 0
        reachable = self._penalised(best_open_score, self._max_tokens if at_its_best else length)
        return reachable <= self.finished[-1].score

    def _penalised(self, score: float, length: int) -> float:
        total = torch.tensor(score, dtype=torch.float32)
        return float(total / length**self._params.length_penalty)
