"""A conversation: its messages, and what each answer cost.

Knows turns. Does not know who answers, or terminals.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

__all__ = ["Answerer", "Chat", "Message", "Turn"]

Message: TypeAlias = dict[str, str]


@dataclass(slots=True)
class Turn:
    """What one answer took: tokens of the prompt, those found in the cache, generated ones.

    `finish_reason` is "stop" or "length" of the model, or None where the answer was cut off.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    seconds: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that were not found."""
        return self.num_prompt_tokens - self.num_cached_tokens


class Answerer(Protocol):
    """Who answers: a model in this process, or a server."""

    def answer(self, messages: Sequence[Message], turn: Turn) -> Generator[str, None, None]:
        """Yield the pieces of an answer, noting in `turn` what they take; closing it stops it."""
        ...


@dataclass(slots=True)
class Chat:
    """One conversation. Each question is asked with all that went before it.

    A question that is refused changes nothing. An answer that is cut off is kept as far as it came, and
    with its question forgotten where nothing came.
    """

    answerer: Answerer
    system: str | None = None
    history: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the pieces of the answer to a question; closing the iterator stops it."""
        asked: Message = {"role": "user", "content": question}
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        turn, pieces = Turn(), [""]
        start = time.perf_counter()
        answer = self.answerer.answer([*first, *self.history, asked], turn)
        try:
            for piece in answer:
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            answer.close()
            self._keep(asked, pieces, turn, start)
            raise
        self._keep(asked, pieces, turn, start)

    def reset(self) -> None:
        """Forget what was said, but not what it cost."""
        self.history.clear()

    def _keep(self, asked: Message, pieces: Sequence[str], turn: Turn, start: float) -> None:
        turn.seconds = time.perf_counter() - start
        self.turns.append(turn)
        text = "".join(pieces)
        if text or turn.finish_reason is not None:
            self.history += [asked, {"role": "assistant", "content": text}]
