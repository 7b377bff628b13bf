"""Text as its tokens come: whole characters, and stop texts that no reader ever sees."""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from kvruntime.detokenizer import Detokenizer
from kvruntime.tokenizer import Tokenizer

from .sentencepiece_like import sentencepiece_like

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return Tokenizer(sentencepiece_like(), {}, None)


def stream(tokenizer: Tokenizer, token_ids: list[int], *stop: str) -> tuple[Detokenizer, list[str]]:
    """Add tokens one by one; what could be streamed after each."""
    detokenizer = Detokenizer(tokenizer, stop)
    shown = []
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        shown.append(detokenizer.stable_text)
        if stopped:
            break
    detokenizer.finish()
    return detokenizer, [*shown, detokenizer.stable_text]


def assert_only_grows(shown: list[str]) -> None:
    for before, after in pairwise(shown):
        assert after.startswith(before)


@pytest.mark.parametrize("text", ["日本語 and été", "a 🙂 b 👩‍👩‍👧 c", "don't compute 12345 twice"])
def test_streamed_text_is_the_full_decoding_and_never_half_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    _, shown = stream(tokenizer, tokenizer.encode(text))
    assert shown[-1] == text
    assert not any(REPLACEMENT in piece for piece in shown)
    assert_only_grows(shown)


def test_a_character_cut_off_by_the_end_is_shown_as_in_a_full_decoding(
    tokenizer: Tokenizer,
) -> None:
    token_ids = tokenizer.encode("a 🙂")[:-1]
    detokenizer, shown = stream(tokenizer, token_ids)
    assert not any(REPLACEMENT in piece for piece in shown[:-1])
    assert detokenizer.text == tokenizer.decode(token_ids)
    assert detokenizer.text.endswith(REPLACEMENT)


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_stream_to_their_full_decoding(tokenizer: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
    token_ids = [chance.randrange(tokenizer.vocab_size) for _ in range(40)]
    _, shown = stream(tokenizer, token_ids)
    assert shown[-1] == tokenizer.decode(token_ids)
    assert_only_grows(shown)


class Counted(Tokenizer):
    """Counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        listed = list(ids)
        self.num_decoded += len(listed)
        return super().decode(listed, skip_special_tokens=skip_special_tokens)


def of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that stand for one byte each."""
    token_of = {
        tokenizer.token_bytes(token_id): token_id
        for token_id in reversed(range(tokenizer.vocab_size))
        if not tokenizer.is_left_out(token_id)
    }
    return [token_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_and_special_tokens_at_random_stream_to_their_full_decoding(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Characters in parts, parts of characters, and what decodes to nothing in between."""
    chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
    special = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    parts = [text.encode() for text in ("é", "日本", "🙂", "a", " ", REPLACEMENT)]
    parts += [b"\x80", b"\xe6", b"\xf0\x9f", b"\xf0\x9f\x99", b"\xff", b"\xed\xa0"]
    token_ids = []
    for _ in range(60):
        token_ids += [*of_bytes(tokenizer, chance.choice(parts)), *special * chance.randrange(2)]
    _, shown = stream(tokenizer, token_ids)
    assert shown[-1] == tokenizer.decode(token_ids)
    assert_only_grows(shown)
    for index, text in enumerate(shown[:-1]):
        assert len(text) >= len(tokenizer.decode(token_ids[: index + 1])) - 1


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_a_byte_fallback_stream_to_their_full_decoding(
    byte_fallback: Tokenizer, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
    runs = [
        "日本語".encode(),
        "🙂 é".encode(),
        b"\x80",
        b"\x80\x80\x80abc",
        b"\xe6\x97",
        b"\xff" * 9,
    ]
    vocabulary = byte_fallback.backend.get_vocab()
    pieces = [[vocabulary[piece]] for piece in ("▁", "▁ab", "a", "{")]
    token_ids = []
    for _ in range(30):
        token_ids += of_bytes(byte_fallback, chance.choice(runs)) if chance.randrange(2) else []
        token_ids += chance.choice(pieces) + [1] * chance.randrange(2)
    _, shown = stream(byte_fallback, token_ids)
    assert shown[-1] == byte_fallback.decode(token_ids)
    assert_only_grows(shown)


def test_whole_characters_stay_where_bytes_follow_that_are_none(byte_fallback: Tokenizer) -> None:
    token_ids = of_bytes(byte_fallback, "日".encode() + b"\x80\x80")
    _, shown = stream(byte_fallback, [*token_ids, byte_fallback.backend.get_vocab()["▁ab"]])
    assert shown[2:6] == [
        "日",
        f"日{REPLACEMENT}",
        f"日{REPLACEMENT * 2}",
        f"日{REPLACEMENT * 2} ab",
    ]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("filler", ["bytes that are none", "special tokens"])
def test_what_makes_no_characters_is_streamed_and_costs_no_more_as_it_grows(
    tokenizer: Tokenizer, byte_fallback: Tokenizer, kind: str, filler: str
) -> None:
    given = tokenizer if kind == "byte level" else byte_fallback
    counted = Counted(given.backend, {}, None)
    special = next(filter(counted.is_left_out, range(counted.vocab_size)))
    bad = of_bytes(counted, b"\x80")
    token_ids = bad * 3000 if filler == "bytes that are none" else [*bad, *[special] * 3000]
    counted.num_decoded = 0
    _, shown = stream(counted, token_ids)
    assert len(shown[-1]) == (3000 if filler == "bytes that are none" else 1)
    assert counted.num_decoded < 40 * len(token_ids)
    assert len(shown[100]) >= len(shown[-1]) * 100 // 3000 - 3


def test_a_stop_text_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the brown fox jumps")
    detokenizer, shown = stream(tokenizer, token_ids, "own fox")
    assert detokenizer.text == "the br"
    assert detokenizer.stop_reason == "own fox"
    assert not any("ow" in piece for piece in shown)
    assert_only_grows(shown)


def test_text_held_for_a_stop_that_does_not_come_is_released(tokenizer: Tokenizer) -> None:
    _, shown = stream(tokenizer, tokenizer.encode("the brown f"), "own fox")
    assert shown[-2] == "the b"
    assert shown[-1] == "the brown f"


def test_the_stop_that_is_complete_first_wins(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two three")
    detokenizer, _ = stream(tokenizer, token_ids, "two three", "o three", "wo")
    assert (detokenizer.text, detokenizer.stop_reason) == ("one t", "wo")
    longest, _ = stream(tokenizer, token_ids, "o", "two", "wo")
    assert (longest.text, longest.stop_reason) == ("", "o")
    equal_ends, _ = stream(tokenizer, token_ids, "wo", "two")
    assert equal_ends.text == "one "


def test_a_stop_text_can_be_kept(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("two",), include_stop=True)
    for token_id in tokenizer.encode("one two three"):
        if detokenizer.append(token_id):
            break
    assert detokenizer.text == "one two"


def test_a_stop_before_the_minimal_length_stops_nothing(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abab")
    assert len(token_ids) == 4
    detokenizer = Detokenizer(tokenizer, ("ab",), min_tokens=3)
    assert [detokenizer.append(token_id) for token_id in token_ids] == [False, False, False, True]
    assert detokenizer.text == "ab"
