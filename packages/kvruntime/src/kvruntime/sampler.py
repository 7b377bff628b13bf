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

__all__ = ["SamplingRow", "sample"]


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


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return one token id a row of logits, float32 [R, vocab_size].

    Greedy rows take the first of the likeliest tokens. The others are divided by their temperature,
    cut to the top k, then to the top p, and drawn by the row's number. O(R * vocab * log(vocab)).
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        chosen = _draw(logits[drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    return tokens


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    vocab_size = logits.shape[-1]
    ordered, order = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    # Differences to the likeliest stay finite, however small the temperature.
    ordered = (ordered - ordered[:, :1]) / column([row.params.temperature for row in rows])
    rank = torch.arange(vocab_size)
    ordered[rank >= column([row.params.top_k or vocab_size for row in rows])] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities[before >= column([row.params.top_p for row in rows])] = 0
    cumulative = probabilities.cumsum(dim=-1)
    # The last sum of a row is the whole that is left after the cuts; it need not be 1.
    target = column([row.uniform() for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=vocab_size - 1)
    chosen: list[int] = order.gather(1, place).squeeze(1).tolist()
    return chosen
