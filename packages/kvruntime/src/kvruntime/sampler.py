"""Choosing the next token of each row from its logits.

Chance is counted, not drawn from a stream: the number behind a token is a function of the request's
seed, the sample's index and the token's position. Nothing else that runs, and no order in which it
runs, can change a sample.

Knows logits and sampling parameters. Does not know requests, text or why a sample ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvruntime.sampling_params import SamplingParams

__all__ = ["SamplingRow", "TokenLogprobs", "sample", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled, and the counter of its chance."""

    params: SamplingParams
    seed: int
    index: int
    position: int

    def uniform(self) -> float:
        """The number in [0, 1) that decides this token (Philox; Salmon et al., SC'11)."""
        key = np.array([self.seed, self.index], dtype=np.uint64)
        bits = np.random.Philox(key=key, counter=self.position)
        return float(np.random.Generator(bits).random())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability and rank (1 is the likeliest), beside those that led its row.

    `top` has the likeliest tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow | None]) -> list[int]:
    """Return one token id a row of logits, float32 [R, vocab_size].

    Greedy rows, or None, take the first of the likeliest tokens. The others are divided by their
    temperature, cut by min-p, to the top k, then to the top p, and drawn by the row's number.
    O(R * vocab * log(vocab)).
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = {
        index: row for index, row in enumerate(rows) if row is not None and not row.params.is_greedy
    }
    if drawn:
        chosen = _draw(logits[list(drawn)], list(drawn.values()))
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    return tokens


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return the log-probability of one token a row of logits, float32 [R, vocab_size].

    Each with the `num_top` likeliest of its row. O(R * vocab).
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token_id, logprob, rank, top_ids, top_values in zip(
            token_ids,
            chosen[:, 0].tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            strict=True,
        )
    ]


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    probabilities, order = _cut(logits, rows)
    cumulative = probabilities.cumsum(dim=-1)
    # The last sum of a row is the whole that is left after the cuts; it need not be 1.
    target = _column([row.uniform() for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    chosen: list[int] = order.gather(1, place).squeeze(1).tolist()
    return chosen


def _cut(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities that the cuts leave, likeliest first, and the token ids behind them."""
    vocab_size = logits.shape[-1]
    ordered, order = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    # Differences to the likeliest stay finite, however small the temperature.
    ordered = (ordered - ordered[:, :1]) / _column([row.params.temperature for row in rows])
    ordered[ordered.exp() < _column([row.params.min_p for row in rows])] = -torch.inf
    rank = torch.arange(vocab_size)
    ordered[rank >= _column([row.params.top_k or vocab_size for row in rows])] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities[before >= _column([row.params.top_p for row in rows])] = 0
    return probabilities, order


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
