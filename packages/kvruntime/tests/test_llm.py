"""Prompts in, texts out: every form a prompt may have, and what a call that fails leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvkernels
from kvruntime import LLM, InvalidRequest, SamplingParams
from kvruntime.model_runner import StepLogits
from kvruntime.steps import SchedulerOutput

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def test_one_text_one_list_of_ids_and_a_batch_are_all_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    text = "the cache"
    ids = llm.tokenizer.encode(text)
    [from_text] = llm.generate(text, GREEDY)
    [from_ids] = llm.generate(ids, GREEDY)
    both: list[str | list[int]] = [text, ids]
    batch = llm.generate(both, GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in (from_text, from_ids, *batch)}) == 1
    assert from_ids.prompt == text


def test_one_conversation_and_a_list_of_them_are_answered(make_llm: MakeLLM) -> None:
    llm = make_llm()
    conversation = [{"role": "user", "content": "the cache"}]
    [single] = llm.chat(conversation, GREEDY)
    [listed] = llm.chat([conversation], GREEDY)
    assert single.outputs == listed.outputs
    assert single.prompt.startswith("<|im_start|>user\nthe cache<|im_end|>")


def test_no_prompts_have_no_answers(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


def test_equal_prompts_have_equal_answers(make_llm: MakeLLM) -> None:
    first, second = make_llm().generate([[5, 6, 7]] * 2, GREEDY)
    assert first.outputs == second.outputs


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6, 7]),
        [np.int64(5), np.int32(6), np.uint8(7)],
        [np.array([5, 6, 7])],
        np.array([[5, 6, 7]]),
        [torch.tensor([5, 6, 7])],
        range(5, 8),
    ],
    ids=["array", "numpy integers", "arrays", "matrix", "tensors", "range"],
)
def test_token_ids_may_be_of_any_integer_type(make_llm: MakeLLM, prompts: Any) -> None:
    llm = make_llm()
    [expected] = llm.generate([[5, 6, 7]], GREEDY)
    [output] = llm.generate(prompts, GREEDY)
    assert output.outputs == expected.outputs
    assert output.prompt_token_ids == [5, 6, 7]
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("prompts", [[[5.0, 6.0]], [None], [5.0], torch.tensor([5, 6])])
def test_what_is_no_prompt_is_refused(make_llm: MakeLLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be a text or a sequence of token ids"):
        make_llm().generate(prompts, GREEDY)


def test_a_text_that_is_no_unicode_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match=r"must be valid Unicode, got '\\udcff'"):
        llm.generate("a\udcffb", GREEDY)
    with pytest.raises(InvalidRequest, match=r"must be valid Unicode, got '\\udcff'"):
        llm.chat([{"role": "user", "content": "a\udcffb"}], GREEDY)


@pytest.mark.parametrize("conversations", ["hello", ["hello"], [[]], [["hello"]]])
def test_what_is_no_conversation_is_refused(make_llm: MakeLLM, conversations: Any) -> None:
    with pytest.raises(InvalidRequest, match="a conversation must be a list of messages"):
        make_llm().chat(conversations, GREEDY)


class TestACallThatFailsLeavesNothingBehind:
    """Whatever ends a call, the next one runs as if it had never been."""

    def assert_fresh(self, llm: LLM, make_llm: MakeLLM) -> None:
        assert not llm.engine.has_work
        assert llm.stats.num_leaked_blocks == 0
        llm.engine.manager.check()
        before = llm.stats.num_steps
        [output] = llm.generate([[9, 8, 7]], GREEDY)
        [expected] = make_llm().generate([[9, 8, 7]], GREEDY)
        assert output.outputs == expected.outputs
        assert llm.stats.num_steps - before == GREEDY.max_tokens

    @pytest.mark.parametrize("failing_step", [1, 2, 5])
    def test_in_the_midst_of_a_step(
        self, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, failing_step: int
    ) -> None:
        llm = make_llm(num_blocks=10, block_size=4, max_num_batched_tokens=16)
        execute = llm.engine.runner.execute

        def interrupted(output: SchedulerOutput) -> StepLogits:
            if output.step == failing_step:
                raise KeyboardInterrupt
            return execute(output)

        monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
        prompts = [[5, 6, 7, i] * 3 for i in range(5)]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, SamplingParams(n=3, max_tokens=20, seed=0, ignore_eos=True))
        self.assert_fresh(llm, make_llm)

    def test_between_steps(self, make_llm: MakeLLM) -> None:
        llm = make_llm()

        def progress(description: str, done: int, total: int) -> None:
            raise RuntimeError(f"{description}: {done} of {total}")

        llm._progress = progress
        with pytest.raises(RuntimeError, match="generating tokens: 1 of 8"):
            llm.generate([[5, 6, 7]], GREEDY)
        llm._progress = None
        self.assert_fresh(llm, make_llm)

    def test_refused(self, make_llm: MakeLLM) -> None:
        llm = make_llm()
        with pytest.raises(InvalidRequest):
            llm.generate([[5, 6, 7], [5, 1000]], GREEDY)
        self.assert_fresh(llm, make_llm)


def test_many_requests_leave_nothing_in_memory(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=16, block_size=4)
    for i in range(60):
        llm.generate([[i, 6, 7, 8, 9]], SamplingParams(n=2, max_tokens=4, seed=i))
    pool = llm.engine.manager.stats()
    assert pool.num_sequences == 0
    assert pool.num_free_blocks + pool.num_cached_blocks == 16
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting


def test_fewer_than_one_thread_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidRequest, match="num_threads must be at least 1, got 0"):
        LLM(tiny_checkpoint("llama"), num_threads=0)


def test_threads_are_those_of_torch_and_of_the_kernels(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    for num_threads in (2, 1):
        LLM(tiny_checkpoint("llama"), num_threads=num_threads)
        assert torch.get_num_threads() == kvkernels.get_num_threads() == num_threads
