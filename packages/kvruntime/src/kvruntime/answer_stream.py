"""What a reader of a running engine gets: the new parts of answers, as they come.

Knows event loops and how pieces are put together for a reader that is slow. Does not know threads,
engines or who writes the pieces down.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvruntime.request import FinishReason
from kvruntime.sampler import TokenLogprobs

__all__ = ["AnswerStream", "Delta"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one answer: tokens, and text that no later token takes back.

    `index` is the answer's place among those of its request. The last delta of an answer, and no
    other, has a `finish_reason`. Text may come later than its tokens: a character that is not whole
    yet, or the beginning of what may become a stop text, is held back.

    >>> Delta(0, "block", (7,)).then(Delta(0, " table", (8, 9))).text
    'block table'
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def then(self, later: Self) -> "Delta":
        """Both as one."""
        return Delta(
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.stop_reason,
        )


class AnswerStream:
    """The deltas of one request, for one reader on the event loop that submitted it.

    Iterating ends when every answer has its `finish_reason`, and raises `EngineFailed` if the
    engine fails before. What a reader has not fetched yet is merged, one delta an answer, so that
    nobody waits for a slow one. Who leaves early calls `aclose` or `abort`.
    """

    def __init__(
        self, request_id: str, num_prompt_tokens: int, abort: Callable[["AnswerStream"], None]
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0  # known with the first delta
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # likewise, where asked for
        self.loop = asyncio.get_running_loop()
        self._tell_abort = abort
        self._pending: dict[int, Delta] = {}
        self._arrived = asyncio.Event()
        self._is_over = False
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will arrive; what has arrived may still be read."""
        return self._is_over

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._pending.pop(next(iter(self._pending)))

    async def aclose(self) -> None:
        """Stop reading. What still runs is aborted: its blocks are free before the next step."""
        self.abort()

    def abort(self) -> None:
        """Like `aclose`, for who cannot wait. Does nothing once the stream is over."""
        if not self._is_over:
            self._is_over = True
            self._pending.clear()
            self._arrived.set()
            self._tell_abort(self)

    def deliver(self, deltas: Sequence[Delta], *, is_over: bool) -> None:
        """Take what is new. For who produces the answers; on the event loop."""
        if self._is_over:
            return
        for delta in deltas:
            before = self._pending.get(delta.index)
            self._pending[delta.index] = delta if before is None else before.then(delta)
        self._is_over = is_over
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has arrived. For who produces the answers."""
        if not self._is_over:
            self._error, self._is_over = error, True
            self._arrived.set()
