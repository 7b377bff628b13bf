"""The text of a sample as its tokens come, and where a stop text ends it.

Knows tokens and characters: nothing is shown before its characters are whole, nor before it is
certain that no stop text begins in it. Does not know requests, samplers or who reads the text.
"""

from collections.abc import Sequence

from kvruntime.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns token ids into text, one at a time; O(tokens since the last whole character) each.

    Once it is finished, `text` is what decoding all ids at once gives, cut at the first stop text:
    of several the one that is complete first, and the longest of those.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        # ids[: _read] have become text; the text of ids[_prefix : _read] is the context in which
        # the next are decoded, since a decoder may treat the beginning of a text in its own way.
        self._prefix = 0
        self._read = 0
        self._text = ""
        self._search_from = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """Every whole character so far, a stop text and what follows it left out."""
        return self._text

    @property
    def stable_text(self) -> str:
        """The part of `text` that no later token can take back: what may be streamed."""
        if self._is_finished or self._include_stop or not self._stop:
            return self._text
        return self._text[: max(0, len(self._text) - max(map(len, self._stop)) + 1)]

    def append(self, token_id: int) -> bool:
        """Add a token; whether a stop text is complete now, which finishes the text.

        What comes before `min_tokens` tokens stops nothing.
        """
        self._ids.append(token_id)
        context = self._tokenizer.decode(self._ids[self._prefix : self._read])
        longer = self._tokenizer.decode(self._ids[self._prefix :])
        if len(longer) > len(context) and not longer.endswith("\N{REPLACEMENT CHARACTER}"):
            self._text += longer[len(context) :]
            self._prefix, self._read = self._read, len(self._ids)
        if len(self._ids) < self._min_tokens:
            self._search_from = len(self._text)
        return self._find_stop()

    def finish(self) -> None:
        """No token follows: characters that are not whole become U+FFFD, as in a full decoding."""
        if not self._is_finished:
            context = self._tokenizer.decode(self._ids[self._prefix : self._read])
            self._text += self._tokenizer.decode(self._ids[self._prefix :])[len(context) :]
            self._is_finished = True

    def _find_stop(self) -> bool:
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := self._text.find(stop, self._search_from)) >= 0
        ]
        if not found:
            return False
        end, start, self.stop_reason = min(found)
        self._text = self._text[: end if self._include_stop else start]
        self._is_finished = True
        return True
