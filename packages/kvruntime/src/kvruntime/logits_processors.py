"""What changes the logits of a row before a token is chosen: bias, minimal lengths, penalties.

Knows logits, parameters and the tokens so far; everything is derived from those each time, so that
no state can be lost or counted twice. Does not know chance, beams or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvruntime.sampling_params import GenerationParams

__all__ = ["History", "process"]


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that a row's next one follows, and the tokens that would end it."""

    params: GenerationParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def changes_logits(self) -> bool:
        """Whether any processor has something to do."""
        params = self.params
        return (
            bool(params.logit_bias)
            or self.is_below_minimum
            or params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    @property
    def is_below_minimum(self) -> bool:
        """Whether the row must not end yet."""
        return len(self.output_token_ids) < self.params.min_tokens and bool(self.stop_token_ids)


def process(logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
    """Return the logits [R, vocab_size] to choose from; the rows given are not changed.

    The order is that of vLLM: minimal length, bias, repetition, frequency and presence penalty.
    O(tokens so far) for a row that asks for any of them, and nothing for the others.
    """
    changed = [index for index, history in enumerate(histories) if history.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _process_row(logits[index], histories[index])
    return logits


def _process_row(row: torch.Tensor, history: History) -> None:
    params = history.params
    if history.is_below_minimum:
        row[sorted(history.stop_token_ids)] = -torch.inf
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    if params.repetition_penalty != 1:
        seen = np.unique([*history.prompt_token_ids, *history.output_token_ids])
        scores = row[seen]
        row[seen] = torch.where(
            scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty
        )
    if history.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        seen, counts = np.unique(history.output_token_ids, return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[seen] -= torch.from_numpy(penalty).to(row.dtype)
