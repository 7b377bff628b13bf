"""Prompts: seeded, and equal in every process.

Knows token ids and the Mooncake trace. Does not know block managers.
"""

from __future__ import annotations

import json
import random
from itertools import chain

from benchmarks.environment import TRACES

MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"
MOONCAKE_TOKENS = 512  # that one hash of the trace stands for
# One object a token id, as a tokenizer's table would give: a prompt is a list of references.
VOCABULARY = list(range(32_000))


class MissingTraceError(Exception):
    """A trace is not on this machine."""


def random_tokens(seed: str, num_tokens: int) -> list[int]:
    """Token ids that depend on the seed alone."""
    return random.Random(seed).choices(VOCABULARY, k=num_tokens)  # noqa: S311 -- no secret


def chats(*, num_chats: int = 200, num_turns: int = 10, turn: int = 300) -> list[list[int]]:
    """Chats whose every turn sends all that was said before, interleaved at random."""
    said = [random_tokens(f"W5 {chat}", num_turns * turn) for chat in range(num_chats)]
    order = list(range(num_chats)) * num_turns
    random.Random("W5 order").shuffle(order)  # noqa: S311 -- no secret
    turns = [0] * num_chats
    prompts = []
    for chat in order:
        turns[chat] += 1
        prompts.append(said[chat][: turns[chat] * turn])
    return prompts


def mooncake(num_requests: int) -> list[list[int]]:
    """The first requests of the Mooncake conversation trace, with made-up tokens for its hashes."""
    if not MOONCAKE.is_file():
        raise MissingTraceError(f"no {MOONCAKE}; KVBLOCKS_TRACES names the folder of traces")
    tokens_of: dict[int, list[int]] = {}
    prompts = []
    with MOONCAKE.open(encoding="utf-8") as lines:
        for _, line in zip(range(num_requests), lines, strict=False):
            request = json.loads(line)
            for key in request["hash_ids"]:
                tokens_of.setdefault(key, random_tokens(f"W5m {key}", MOONCAKE_TOKENS))
            tokens = chain.from_iterable(tokens_of[key] for key in request["hash_ids"])
            prompts.append(list(tokens)[: request["input_length"]])
    return prompts
