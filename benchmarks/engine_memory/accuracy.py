"""What fewer bits for keys and values change in the answers of SmolLM2, against float32.

Knows logits and tokens. Does not know how a cache keeps them.
"""

from __future__ import annotations

from typing import Any, get_args

import torch

from kvruntime import LLM, EngineConfig, SamplingParams
from kvruntime.engine_config import KVDtype
from kvruntime.weights import Checkpoint

QUESTIONS = (
    "What is the capital of France?",
    "What does a page table do in an operating system?",
    "Write a short story about a lighthouse keeper.",
    "Name three fruits and say how they taste.",
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "What should one see in Tokyo?",
    "Give two reasons to learn a second language.",
)
NUM_TOKENS = 48


def accuracy(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of each dtype: bytes, tokens that agree, and the largest difference of a log-probability.

    A greedy answer that once took another token goes on otherwise, so that tokens are counted up to
    the first that differs. Log-probabilities are those of the float32 answer's own tokens.
    """
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    reference = LLM(checkpoint, EngineConfig(num_blocks=256))
    texts = reference.chat(conversations, greedy)
    expected = [answer.outputs[0].token_ids for answer in texts]
    whole = [
        answer.prompt_token_ids + tokens for answer, tokens in zip(texts, expected, strict=True)
    ]
    found: dict[str, Any] = {}
    exact: list[torch.Tensor] = []
    for kv_dtype in get_args(KVDtype):
        llm = LLM(checkpoint, EngineConfig(num_blocks=256, kv_dtype=kv_dtype))
        answers = [answer.outputs[0].token_ids for answer in llm.chat(conversations, greedy)]
        logits = _logits(llm, whole)
        exact = exact or logits
        found[kv_dtype] = {
            "bytes a token": llm.engine.block_bytes // llm.engine.config.block_size,
            "tokens up to the first that differs": sum(
                _num_equal(a, b) for a, b in zip(answers, expected, strict=True)
            ),
            "of": len(QUESTIONS) * NUM_TOKENS,
            "likeliest tokens that agree": round(
                sum(
                    int((a.argmax(-1) == b.argmax(-1)).sum())
                    for a, b in zip(exact, logits, strict=True)
                )
                / sum(len(a) for a in exact),
                4,
            ),
            "largest difference of a logit": round(
                max(float((a - b).abs().max()) for a, b in zip(exact, logits, strict=True)), 4
            ),
            "mean difference of a logit": round(
                sum(float((a - b).abs().mean()) for a, b in zip(exact, logits, strict=True))
                / len(exact),
                5,
            ),
        }
    return found


def _logits(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The logits of every token of these texts, computed in small chunks from the cache."""
    rows: list[torch.Tensor] = []
    execute = llm.engine.runner.execute

    def noted(output: Any) -> Any:
        logits = execute(output)
        rows.extend(logits.whole)
        return logits

    llm.engine.runner.execute = noted  # type: ignore[method-assign]  # it keeps what it computes
    found = []
    for prompt in prompts:
        rows.clear()
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        found.append(torch.cat(rows))
    llm.engine.runner.execute = execute  # type: ignore[method-assign]
    return found


def _num_equal(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(ours))
