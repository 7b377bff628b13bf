"""Text as its tokens come: whole characters, and stop texts that no reader ever sees."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kvruntime.detokenizer import Detokenizer
from kvruntime.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_checkpoint("llama"))


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
