"""Log-probabilities as the two endpoints write them. Knows tokens and their bytes, no requests."""

import codecs
from collections.abc import Iterable, Sequence

from kvruntime.sampler import TokenLogprobs
from kvruntime.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from kvruntime.tokenizer import Tokenizer

__all__ = ["CompletionLogprobsWriter", "chat_logprobs", "token_text"]

# What a token that can never follow is given: JSON has no infinity.
LOWEST = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token's text; one that is no whole character as OpenAI does, `bytes:\xf0\x9f`."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, noted: Iterable[TokenLogprobs]) -> ChatLogprobs:
    """Return the log-probabilities of an answer's tokens."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=token_text(tokenizer, one.token_id),
                logprob=max(one.logprob, LOWEST),
                bytes=list(tokenizer.token_bytes(one.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=token_text(tokenizer, token_id),
                        logprob=max(logprob, LOWEST),
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in one.top
                ],
            )
            for one in noted
        ]
    )


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one text, in as many parts as it comes in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], noted: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Return the next part; the first token of a prompt has None.

        A token is always among the likeliest of its own entry, as OpenAI allows.
        """
        return CompletionLogprobs(
            tokens=[token_text(self._tokenizer, token_id) for token_id in token_ids],
            token_logprobs=[None if one is None else max(one.logprob, LOWEST) for one in noted],
            top_logprobs=[None if one is None else _top(self._tokenizer, one) for one in noted],
            text_offset=[self._next_offset(token_id) for token_id in token_ids],
        )

    def _next_offset(self, token_id: int) -> int:
        """Where a token's text begins, in whole characters."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def _top(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, float]:
    pairs = (*one.top, (one.token_id, one.logprob))
    return {token_text(tokenizer, token_id): max(logprob, LOWEST) for token_id, logprob in pairs}
