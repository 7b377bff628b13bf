"""An engine without a model: all that is left of a step is scheduling and bookkeeping.

Knows how an engine is driven. Does not know what is measured.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from kvruntime import EngineConfig, SamplingParams
from kvruntime.config import ModelConfig
from kvruntime.engine import Engine
from kvruntime.model_runner import StepLogits
from kvruntime.request import Request
from kvruntime.steps import SchedulerOutput

VOCABULARY = range(20, 49_000)
_CONFIG = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}


class _Runner:
    """Scores nothing: the likeliest token is always the same one of a small vocabulary."""

    def execute(self, output: SchedulerOutput) -> StepLogits:
        return StepLogits(torch.zeros(sum(item.completes for item in output.scheduled), 32))


def engine_without_model(**settings: Any) -> Engine:
    """An engine that schedules, and computes nothing."""
    model: Any = SimpleNamespace(config=ModelConfig.from_huggingface(_CONFIG))
    engine = Engine(model, EngineConfig(**settings))
    engine.runner = _Runner()  # type: ignore[assignment]  # it does what the engine asks of one
    return engine


def request(number: int, num_prompt: int, num_output: int, **params: Any) -> Request:
    """A request of random tokens that is answered to its full length."""
    chance = random.Random(f"engine-memory {number}")
    prompt = [chance.choice(VOCABULARY) for _ in range(num_prompt)]
    chosen = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True, **params)
    return Request(number, "", prompt, chosen, seed=number)
