"""Bias, minimal lengths, penalties and cuts, each against the processor of transformers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvruntime import SamplingParams
from kvruntime.logits_processors import History, process
from kvruntime.sampler import SamplingRow, _cut

hf: Any = transformers  # only some of its functions have types

PROMPT = [3, 7, 7, 11]
OUTPUT = [5, 7, 5, 5]
VOCAB_SIZE = 40


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


def history(stop: tuple[int, ...] = (), output: list[int] = OUTPUT, **params: Any) -> History:
    return History(SamplingParams(**params), PROMPT, output, frozenset(stop))


def by_transformers(processor: Any, scores: torch.Tensor) -> torch.Tensor:
    processed: torch.Tensor = processor(torch.tensor([PROMPT + OUTPUT]), scores.clone())
    return processed


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    expected = by_transformers(hf.RepetitionPenaltyLogitsProcessor(penalty), logits())
    assert torch.equal(process(logits(), [history(repetition_penalty=penalty)]), expected)


def test_logit_bias_equals_transformers() -> None:
    processor = hf.SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -1.0, (12,): float("-inf")})
    biased = process(logits(), [history(logit_bias={4: 2.5, 9: -1.0, 12: float("-inf")})])
    assert torch.equal(biased, by_transformers(processor, logits()))


@pytest.mark.parametrize("min_tokens", [4, 5])
def test_min_tokens_equals_transformers(min_tokens: int) -> None:
    processor = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [2, 8])
    ours = process(logits(), [history(stop=(2, 8), min_tokens=min_tokens)])
    assert torch.equal(ours, by_transformers(processor, logits()))


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    ours = process(logits(), [history(frequency_penalty=0.7, presence_penalty=-0.4)])
    expected = logits().numpy().astype(np.float64)
    for token_id in set(OUTPUT):
        expected[0, token_id] -= 0.7 * OUTPUT.count(token_id) - 0.4
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)


def test_a_row_that_asks_for_nothing_is_left_alone() -> None:
    rows = logits(3)
    ours = process(rows, [history(), history(logit_bias={1: 1.0}), history(output=[])])
    assert torch.equal(ours[::2], rows[::2])
    assert torch.equal(rows, logits(3))
    assert process(rows, [history()] * 3) is rows


def kept(params: dict[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """The probabilities that the cuts leave, by token id."""
    probabilities, order = _cut(scores, [SamplingRow(SamplingParams(**params), 0, 0, 0)])
    by_id = torch.zeros_like(probabilities).scatter(1, order, probabilities)
    return by_id / by_id.sum()


CUTS: list[tuple[dict[str, Any], Callable[[], list[Any]]]] = [
    ({"temperature": 0.7}, lambda: [hf.TemperatureLogitsWarper(0.7)]),
    ({"top_k": 5}, lambda: [hf.TopKLogitsWarper(5)]),
    ({"top_p": 0.8}, lambda: [hf.TopPLogitsWarper(0.8)]),
    ({"top_p": 0.01}, lambda: [hf.TopPLogitsWarper(0.01)]),
    ({"min_p": 0.1}, lambda: [hf.MinPLogitsWarper(0.1)]),
    ({"min_p": 1.0}, lambda: [hf.MinPLogitsWarper(1.0)]),
    (
        {"temperature": 2.0, "min_p": 0.05, "top_k": 9, "top_p": 0.7},
        lambda: [
            hf.TemperatureLogitsWarper(2.0),
            hf.MinPLogitsWarper(0.05),
            hf.TopKLogitsWarper(9),
            hf.TopPLogitsWarper(0.7),
        ],
    ),
]


@pytest.mark.parametrize(("params", "warpers"), CUTS, ids=[str(params) for params, _ in CUTS])
def test_what_is_drawn_from_equals_transformers(
    params: dict[str, Any], warpers: Callable[[], list[Any]]
) -> None:
    expected = logits()
    for warper in warpers():
        expected = by_transformers(warper, expected)
    torch.testing.assert_close(
        kept(params, logits()), expected.to(torch.float64).softmax(-1), rtol=0, atol=1e-6
    )
