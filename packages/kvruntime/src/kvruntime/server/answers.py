"""The answers to all prompts of one request of HTTP, as one stream of choices.

Knows how choices are numbered and tokens counted. Does not know JSON, text formats or endpoints.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvruntime.answer_stream import AnswerStream, Delta
from kvruntime.async_llm import AsyncLLM, Params
from kvruntime.request import FinishReason as EngineReason
from kvruntime.server.errors import APIError
from kvruntime.server.responses import FinishReason, PromptDetails, Usage

__all__ = ["Answers", "finish_reason"]


class Answers:
    """The deltas of n answers to each prompt: choice `prompt * n + answer`.

    Whoever has it closes it; then what still runs is aborted.
    """

    def __init__(self, streams: Sequence[AnswerStream], n: int) -> None:
        self.streams = streams
        self.n = n
        self._num_tokens = 0

    @classmethod
    async def open(
        cls,
        async_llm: AsyncLLM,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Params],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "Answers":
        """Submit every prompt, or none: what one of them is refused for is raised."""
        tasks = [
            asyncio.ensure_future(
                async_llm.submit(
                    prompt,
                    chosen,
                    request_id=f"{request_id}-{index}",
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
            for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True))
        ]
        try:
            return cls(await asyncio.gather(*tasks), params[0].n)
        except BaseException:
            for task in tasks:
                task.cancel()
            for stream in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(stream, AnswerStream):
                    stream.abort()
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield choices and what is new of them, of whichever prompt has something first.

        `APIError` for an answer that cannot go on, and what the streams raise.
        """
        reading = {
            asyncio.ensure_future(anext(stream, None)): (place, stream)
            for place, stream in enumerate(self.streams)
        }
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place, stream = reading.pop(task)
                    if (delta := task.result()) is None:
                        continue
                    reading[asyncio.ensure_future(anext(stream, None))] = place, stream
                    if delta.finish_reason is EngineReason.ERROR:
                        # The same request would come to the same end.
                        raise APIError(400, str(delta.stop_reason), code="generation_failed")
                    self._num_tokens += len(delta.token_ids)
                    yield place * self.n + delta.index, delta
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def usage(self) -> Usage:
        """Count the tokens; of the answers, those that have been read."""
        num_prompt_tokens = sum(stream.num_prompt_tokens for stream in self.streams)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(stream.num_cached_tokens for stream in self.streams)
            ),
        )

    def close(self) -> None:
        """Abort what still runs."""
        for stream in self.streams:
            stream.abort()


def finish_reason(delta: Delta) -> FinishReason | None:
    """Return why an answer ended, in the words of the API; None while it goes on."""
    match delta.finish_reason:
        case None:
            return None
        case EngineReason.STOP:
            return "stop"
        case EngineReason.LENGTH:
            return "length"
        case EngineReason.ERROR:
            raise AssertionError("an answer that failed is raised where it is read")
