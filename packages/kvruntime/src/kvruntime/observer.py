"""What may be told of an engine while it runs.

Knows what there is to tell. Does not know who listens, or to what end.
"""

from kvruntime.engine import Engine

__all__ = ["Observer"]


class Observer:
    """What is told of requests and steps, on the engine's thread; by itself it does nothing.

    Subclasses do, quickly. Seconds are of a monotonic clock. What they raise ends the engine.
    """

    def admitted(self, seconds: float) -> None:
        """A request has its first blocks, so long after it was submitted."""

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it was submitted."""

    def next_token(self, seconds: float) -> None:
        """An answer has one more token, so long after the one before."""

    def ended(self, seconds: float, reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """A request ended, so long after it was submitted: "stop", "length", "abort" or "error".

        `num_tokens` were generated for all its answers.
        """

    def stepped(self, engine: Engine, seconds: float) -> None:
        """The engine took a step, which lasted so long."""
