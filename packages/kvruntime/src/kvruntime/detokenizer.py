"""The text of a sample as its tokens come, and where a stop text ends it.

Knows tokens and characters: nothing is shown before its characters are whole, nor before it is
certain that no stop text begins in it. Does not know requests, samplers or who reads the text.
"""

from collections.abc import Sequence

from kvruntime.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 3  # tokens: a character that is not whole has at most as many bytes


class Detokenizer:
    """Turns token ids into text, one at a time; each costs as much as decoding a few.

    Once it is finished, `text` is what decoding all ids at once gives, cut at the first stop text:
    of several the one that is complete first, and the longest of those. A decoder with byte
    fallback takes whole characters back when bytes follow them that are none: here they stay.
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
        self._num_tokens = 0
        self._ids: list[int] = []  # those that a decoder makes anything of
        # No character goes across _read. The text of ids[_prefix : _read] is the context in which
        # the next are decoded, since a decoder may treat the beginning of a text in its own way.
        self._prefix = 0
        self._read = 0
        self._num_shown = 0  # characters of the text of ids[_prefix:] that are in `text`
        self._bytes: _ByteRun | None = None  # the tokens of byte fallback that came last
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
        self._num_tokens += 1
        if not self._tokenizer.is_left_out(token_id):
            byte = self._tokenizer.byte_token(token_id)
            if (byte is None) != (self._bytes is None):
                self._release()
                self._bytes = None if byte is None else _ByteRun()
            self._ids.append(token_id)
            if byte is None or self._bytes is None:
                self._add_piece()
            else:
                self._text += self._bytes.append(byte)
                self._prefix, self._read = len(self._ids) - 1, len(self._ids)
        if self._num_tokens < self._min_tokens:
            self._search_from = len(self._text)
        return self._find_stop()

    def finish(self) -> None:
        """No token follows: characters that are not whole become U+FFFD, as in a full decoding."""
        if not self._is_finished:
            self._release()
            self._is_finished = True

    def _add_piece(self) -> None:
        """Show what the last token makes certain; of its text only the end can be uncertain."""
        text = self._decode(self._prefix)
        num_held = int(text.endswith(_REPLACEMENT))
        self._show(text[: len(text) - num_held])
        if not num_held:
            if context := self._decode(self._read):
                self._prefix, self._read = self._read, len(self._ids)
                self._num_shown = len(context)
        elif len(self._ids) - self._read > _MOST_HELD:
            self._begin_window_later(text)

    def _begin_window_later(self, text: str) -> None:
        """Decode no more than is needed for what is held: from a token where a character begins."""
        last = len(self._ids) - 1
        for at in range(last, max(self._read, last - _MOST_HELD), -1):
            if self._decode(self._prefix, at) + self._decode(at) == text:
                self._prefix, self._read = self._read, at
                self._num_shown = len(self._decode(self._prefix)) - 1
                return

    def _release(self) -> None:
        """Show what is held as it is."""
        if self._bytes is None:
            self._show(self._decode(self._prefix))
        else:
            self._text += self._bytes.finish()
            self._num_shown = len(self._decode(self._prefix))

    def _show(self, text: str) -> None:
        """Show this much of the text of ids[_prefix:]."""
        self._text += text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))

    def _decode(self, start: int, stop: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:stop])

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


class _ByteRun:
    """Tokens of byte fallback that follow one another, as such a decoder makes text of them.

    They are UTF-8, or from where they are not each byte is U+FFFD.
    """

    def __init__(self) -> None:
        self._held = b""  # the bytes of a character that is not whole
        self._is_broken = False

    def append(self, byte: int) -> str:
        """Return what a byte completes."""
        self._held += bytes([byte])
        if not self._is_broken:
            try:
                text = self._held.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return ""
                self._is_broken = True
            else:
                self._held = b""
                return text
        return self.finish()

    def finish(self) -> str:
        """Return the text of what is held."""
        text = _REPLACEMENT * len(self._held)
        self._held = b""
        return text
