"""What a person can see of the policies: the step log, the story of a request, `--verbose`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvruntime import LLM, SamplingParams, StepRecord
from kvruntime.report import show_stats, show_steps

from .test_cli import kvruntime

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPTS = [list(range(3 + i, 60, 3 + i)) for i in range(5)]


@pytest.fixture
def pressed(make_llm: MakeLLM) -> LLM:
    """An engine whose five requests do not fit together."""
    return make_llm(num_blocks=12, block_size=4)


def test_a_request_tells_its_waits_preemptions_and_end(pressed: LLM) -> None:
    answers = pressed.generate(PROMPTS, PARAMS)
    stories = [pressed.explain(answer).splitlines() for answer in answers]
    assert stories[0][0] == (
        "request 0: 19 prompt tokens, 0 of them cached, 20 generated, "
        "ran in 20 logged steps, 1 to 20"
    )
    assert stories[0][1] == "  step 1: 0.0 admitted: 0 of 19 tokens cached"
    assert stories[0][-1] == "  step 20: 0.0 finished: length"
    told = "\n".join(line for story in stories for line in story)
    assert " deferred: blocks needed: " in told
    assert " preempted, to be recomputed: blocks needed: 1, available: 0" in told


def test_the_step_log_has_every_token_and_every_event(pressed: LLM) -> None:
    answers = pressed.generate(PROMPTS, PARAMS)
    log = pressed.step_log
    assert [record.step for record in log] == list(range(1, pressed.stats.num_steps + 1))
    of_the_first = sum(n for record in log for seq_id, n in record.scheduled if seq_id == (0, 0))
    assert of_the_first == 19 + 20 - 1  # the last token is never computed
    events = [event for record in log for event in record.events]
    assert sorted(events) == sorted(event for answer in answers for event in answer.events)
    for record in log:
        assert record.num_free_blocks + record.num_cached_blocks + record.num_held_blocks == 12
        assert all(event.step == record.step for event in record.events)
    kinds = [event.kind for event in events]
    assert kinds.count("preempted, to be recomputed") == pressed.stats.num_preemptions_recompute > 0
    assert kinds.count("deferred") == pressed.stats.num_deferrals > 0


def test_equal_requests_on_a_fresh_engine_have_the_same_log(make_llm: MakeLLM) -> None:
    logs: list[tuple[StepRecord, ...]] = []
    for _ in range(2):
        llm = make_llm(num_blocks=12, block_size=4)
        llm.generate(PROMPTS, PARAMS)
        logs.append(llm.step_log)
    assert logs[0] == logs[1]


def test_the_log_keeps_the_last_steps(make_llm: MakeLLM) -> None:
    llm = make_llm(log_steps=3)
    llm.generate(PROMPTS[:1], PARAMS)
    assert [record.step for record in llm.step_log] == [18, 19, 20]


def test_steps_are_shown_where_something_happened(
    pressed: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    pressed.generate(PROMPTS, PARAMS)
    show_steps(pressed)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 1: 0.0+19 " in shown.err
    assert "\n  0.0 finished: length\n" in shown.err
    assert "\nstep 2: " not in shown.err
    show_stats(pressed)
    table = capsys.readouterr().out
    for label in ("deferred", "evicted", "preempted"):
        assert label in table


def test_pressure_is_not_in_the_table_where_there_was_none(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm()
    llm.generate(PROMPTS, PARAMS)
    show_stats(llm)
    assert "deferred" not in capsys.readouterr().out


def test_verbose_tells_on_standard_error_and_leaves_the_answers_as_they_are(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    arguments = ["generate", "--model", str(tiny_checkpoint("llama")), "--json"]
    for text in ("The cache keeps", "blocks of tokens", "what they have left behind"):
        arguments += ["--prompt", text]
    arguments += ["--max-tokens", "30", "--block-size", "4", "--no-prefix-caching"]
    roomy = kvruntime(*arguments)
    pressed = kvruntime(*arguments, "--num-blocks", "22", "--verbose")
    assert roomy.stderr == ""
    assert "preempted, to be recomputed" in pressed.stderr
    assert "deferred: blocks needed" in pressed.stderr
    assert pressed.stdout.partition('"stats"')[0] == roomy.stdout.partition('"stats"')[0]
