"""What a terminal is shown, and what it is spared."""

from collections.abc import Callable

import pytest

from kvruntime import LLM, CompletionOutput, FinishReason, RequestOutput, SamplingParams
from kvruntime.report import progress_bars, show_answers, show_stats


def answer(text: str, *, samples: int = 1) -> RequestOutput:
    outputs = tuple(CompletionOutput(i, text, [5], FinishReason.LENGTH) for i in range(samples))
    return RequestOutput(0, "", [1, 2], 0, outputs)


def test_samples_are_numbered_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    show_answers([("why", answer("because")), ("how", answer("so", samples=2))])
    shown = capsys.readouterr().out
    assert "why  [2 tokens, 0 from the cache]\n  because" in shown
    assert "how  [2 tokens, 0 from the cache]\nsample 0\n  so\nsample 1\n  so" in shown


def test_control_characters_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_answers([("a\x1b]0;title\x07b", answer("c\x1b[31md\re\x9bf\tg\nh"))])
    shown = capsys.readouterr().out
    assert {"\x1b", "\x07", "\r", "\x9b"}.isdisjoint(shown)
    assert "c\ufffd[31md\ufffde\ufffdf" in shown


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_terminal_without_width_still_shows_the_table(
    make_llm: Callable[..., LLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    llm = make_llm()
    llm.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0))
    monkeypatch.setenv("COLUMNS", columns)
    show_stats(llm)
    assert "tail waste" in capsys.readouterr().out


def test_there_are_no_bars_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a pipe a terminal for rich
    with progress_bars() as progress:
        assert progress is None
    assert capsys.readouterr().err == ""
