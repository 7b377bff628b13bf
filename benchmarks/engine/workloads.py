"""The requests of each workload, fixed by name and round.

Prompts are random token ids, so that a prefix cache finds nothing and greedy outputs run to their
full length. Every round has new prompts, the same for all engines; lengths are the same always.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Ids of SmolLM2's vocabulary that are no control tokens.
VOCABULARY = range(20, 49_000)


@dataclass(frozen=True)
class Asked:
    """One request: a prompt, and how many tokens it is answered with."""

    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs, all there at once."""

    name: str
    about: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are asked for."""
        return sum(output for _, output in self.lengths)

    def requests(self, number: int) -> list[Asked]:
        """The requests of a round."""
        chance = random.Random(f"{self.name} {number}")
        return [
            Asked([chance.choice(VOCABULARY) for _ in range(prompt)], output)
            for prompt, output in self.lengths
        ]


def _mixed() -> tuple[tuple[int, int], ...]:
    """Outputs have a long tail, as those of people's questions do."""
    chance = random.Random(0)
    return tuple(
        (chance.randint(8, 64), min(48, 4 + int(chance.expovariate(1 / 14)))) for _ in range(32)
    )


WORKLOADS = (
    Workload("mixed-32", "32 requests, prompts of 8 to 64 tokens, outputs of 4 to 48", _mixed()),
    Workload("equal-32", "32 requests, prompts of 40 tokens, outputs of 24", ((40, 24),) * 32),
    Workload("equal-8", "8 requests, prompts of 40 tokens, outputs of 24", ((40, 24),) * 8),
    Workload("single", "1 request, a prompt of 40 tokens, an output of 24", ((40, 24),)),
)
