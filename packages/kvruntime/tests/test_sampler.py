"""Sampling rules, against plain NumPy, and chance that depends on nothing but its counter."""

from typing import Any

import numpy as np
import pytest
import torch

from kvruntime import BeamSearchParams, InvalidRequest, SamplingParams
from kvruntime.sampler import SamplingRow, sample


def row(position: int = 0, seed: int = 1, index: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, index, position)


def random_logits(rows: int, vocab_size: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


def draws(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    """Draw from one row of logits at many positions."""
    rows = [row(position, **params) for position in range(count)]
    return sample(logits.expand(count, -1), rows)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = random_logits(5)
    tokens = sample(logits, [row(temperature=0)] * 5)
    assert tokens == logits.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = random_logits(1, vocab_size=8)
    counts = np.bincount(draws(logits, 20_000, temperature=temperature), minlength=8)
    weights = np.exp(logits.numpy()[0].astype(np.float64) / temperature)
    expected = weights / weights.sum()
    # Five standard deviations of a binomial count.
    tolerance = 5 * np.sqrt(expected * (1 - expected) / 20_000) + 1e-4
    assert (np.abs(counts / 20_000 - expected) < tolerance).all()


def test_top_k_draws_only_from_the_k_likeliest() -> None:
    logits = random_logits(1)
    likeliest = set(logits.numpy()[0].argsort()[-3:].tolist())
    assert set(draws(logits, 2_000, top_k=3, temperature=5.0)) == likeliest


def test_top_p_draws_from_the_fewest_tokens_that_reach_p() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = probabilities.log()
    assert set(draws(logits, 2_000, top_p=0.79)) == {0, 1}
    assert set(draws(logits, 2_000, top_p=0.81)) == {0, 1, 2}
    assert set(draws(logits, 2_000, top_p=0.01)) == {0}
    assert set(draws(logits, 2_000, top_p=1.0)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-9, 1e-320])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float) -> None:
    logits = random_logits(1) * 1000
    assert set(draws(logits, 50, temperature=temperature)) == {int(logits.argmax())}


def test_cuts_wider_than_the_vocabulary_cut_nothing() -> None:
    logits = random_logits(1)
    assert draws(logits, 50, top_k=10**30) == draws(logits, 50)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(6)
    rows = [row(position=i, temperature=i / 2, top_k=i, index=i) for i in range(6)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(6)]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    base = row(position=3, seed=5, index=2).uniform()
    others = [
        row(position=4, seed=5, index=2).uniform(),
        row(position=3, seed=6, index=2).uniform(),
        row(position=3, seed=5, index=3).uniform(),
    ]
    assert base == row(position=3, seed=5, index=2).uniform()
    assert len({base, *others}) == 4


def test_the_largest_seed_is_a_seed() -> None:
    assert 0 <= row(seed=2**64 - 1).uniform() < 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or a finite number above it, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or a finite number above it"),
        ({"temperature": float("inf")}, "temperature must be 0 or a finite number above it"),
        ({"top_k": -1}, r"top_k must be 0 \(all\) or above, got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"max_tokens": float("inf")}, "max_tokens must be an integer, got inf"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"best_of": 1, "n": 2}, "best_of must be at least n, got 1 and 2"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"logprobs": -1}, "logprobs must be at least 0, got -1"),
        ({"prompt_logprobs": 0.5}, "prompt_logprobs must be an integer, got 0.5"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            r"min_tokens must be in \[0, max_tokens\], got 9 and 8",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a finite number, got nan"),
        ({"presence_penalty": None}, "presence_penalty must be a finite number, got None"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must name token ids, integers of at least 0"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must name token ids, integers of at least 0"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias must be a number below infinity, got inf"),
        ({"stop": [""]}, r"stop must be texts that are not empty, got \[''\]"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\), got -1"),
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_beams": 0}, "n must be at most num_beams, got 1 and 0"),
        ({"num_beams": 1.5}, "num_beams must be an integer, got 1.5"),
        ({"num_beams": 2, "n": 3}, "n must be at most num_beams, got 3 and 2"),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number, got inf"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or \"never\", got 'soon'"),
    ],
)
def test_impossible_beams_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BeamSearchParams(**params)


def test_one_stop_text_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
