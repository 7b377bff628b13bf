"""Structured outputs with the kinds of tokenizers that checkpoints have."""

import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers

from kvruntime import LLM, EngineConfig, InvalidRequest, SamplingParams, StructuredOutputsParams
from kvruntime.guidance import Guidance
from kvruntime.tokenizer import Tokenizer
from kvruntime.weights import Checkpoint, load_checkpoint

from .sentencepiece_like import sentencepiece_like

PERSON = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
)


def follow(
    backend: tokenizers.Tokenizer, params: StructuredOutputsParams, vocab_size: int, eos: int
) -> list[int]:
    """Draw tokens at random among those that are allowed, until the answer is complete."""
    tokenizer = Tokenizer(backend, {}, None)
    guidance = Guidance(tokenizer, vocab_size=vocab_size, eos_token_ids=[eos])
    matcher = guidance.constraint(params).matcher()
    chance = np.random.default_rng(5)
    token_ids: list[int] = []
    while not matcher.is_finished:
        allowed = matcher.allowed()
        assert allowed.shape == (vocab_size,)
        token_ids.append(int(chance.choice(np.flatnonzero(allowed))))
        matcher.advance(token_ids[-1])
        assert not matcher.error
    return token_ids


def test_pieces_and_bytes_of_sentencepiece_make_the_text() -> None:
    backend = sentencepiece_like()
    for pattern in ("(ab){2,4} é?b", "[a-b1]{3,9}", '\\{"a":1{1,4}\\}'):
        token_ids = follow(
            backend, StructuredOutputsParams(regex=pattern), backend.get_vocab_size(), 2
        )
        text = backend.decode(token_ids)
        assert re.fullmatch(pattern, text), text


def test_columns_of_logits_without_a_token_are_never_allowed() -> None:
    backend = sentencepiece_like()
    size = backend.get_vocab_size()
    token_ids = follow(backend, StructuredOutputsParams(regex="[^x]{40}"), size + 300, 2)
    assert max(token_ids) < size


def test_a_tokenizer_that_cannot_be_read_is_refused_by_name() -> None:
    model: Any = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")  # noqa: S106 - a token of text
    tokenizer = Tokenizer(tokenizers.Tokenizer(model), {}, None)
    with pytest.raises(InvalidRequest, match="structured outputs are not available with this"):
        Guidance(tokenizer, vocab_size=2, eos_token_ids=[1])


def test_special_tokens_are_no_text(tiny_checkpoint: Any) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    guidance = Guidance(
        checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size, eos_token_ids=[2]
    )
    allowed = guidance.constraint(StructuredOutputsParams(regex="(.|\n)*")).matcher().allowed()
    letter = checkpoint.tokenizer.encode("a")
    assert allowed[[0, 1, 2, *letter]].tolist() == [False, False, True, True]  # 2 ends the text


@pytest.mark.smollm2
def test_smollm2_answers_in_json(smollm2: Checkpoint) -> None:
    llm = LLM(smollm2, EngineConfig(num_blocks=64))
    question = "What is the capital of France, and how many people live there? Answer in JSON."
    [output] = llm.chat(
        [{"role": "user", "content": question}],
        SamplingParams(max_tokens=60, temperature=0, structured_outputs=PERSON),
    )
    [answer] = output.outputs
    value = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert value["city"] == "Paris"
    assert 0 <= value["population"] <= 50_000_000
