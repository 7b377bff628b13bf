"""Sampling through the engine: log-probabilities, penalties, stops, best-of, salts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvruntime import LLM, InvalidRequest, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPT = [5, 60, 7, 80, 9, 100, 11, 120, 13, 140, 15, 160, 17, 180, 19, 200, 21, 220]


@pytest.fixture(scope="module")
def logprobs_by_transformers(
    tiny_checkpoint: Callable[[str], Path],
) -> Callable[[list[int]], torch.Tensor]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("llama"), dtype=torch.float32
    )

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logprobs: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        return logprobs

    return compute


def only(outputs: list[RequestOutput]) -> RequestOutput:
    [output] = outputs
    return output


def test_logprobs_of_the_output_equal_transformers(
    make_llm: MakeLLM, logprobs_by_transformers: Callable[[list[int]], torch.Tensor]
) -> None:
    params = SamplingParams(max_tokens=6, seed=1, logprobs=3, temperature=3.0, ignore_eos=True)
    sample = only(make_llm().generate([PROMPT], params)).outputs[0]
    rows = logprobs_by_transformers(PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1]
    assert sample.logprobs is not None
    for row, token, noted in zip(rows, sample.token_ids, sample.logprobs, strict=True):
        best = row.topk(3)
        assert noted.token_id == token
        assert noted.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert noted.rank == int((row > row[token]).sum()) + 1
        assert [token_id for token_id, _ in noted.top] == best.indices.tolist()
        assert [value for _, value in noted.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert sample.cumulative_logprob == pytest.approx(sum(n.logprob for n in sample.logprobs))


def test_each_request_gets_as_many_logprobs_as_it_asks_for(make_llm: MakeLLM) -> None:
    params = [SamplingParams(max_tokens=2, temperature=0, logprobs=k) for k in (0, 4, None)]
    none, four, unasked = make_llm().generate([PROMPT] * 3, params)
    assert [len(n.top) for n in none.outputs[0].logprobs or ()] == [0, 0]
    assert [len(n.top) for n in four.outputs[0].logprobs or ()] == [4, 4]
    assert unasked.outputs[0].logprobs is None
    assert unasked.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("n", [1, 3])
def test_logprobs_of_the_prompt_equal_transformers_whatever_is_cached(
    make_llm: MakeLLM,
    logprobs_by_transformers: Callable[[list[int]], torch.Tensor],
    budget: int,
    n: int,
) -> None:
    llm = make_llm(max_num_batched_tokens=budget, block_size=4)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, n=n)
    first = only(llm.generate([PROMPT], params))
    again = only(llm.generate([PROMPT], params))
    assert first.prompt_logprobs is not None
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.outputs == first.outputs
    assert again.num_cached_tokens == 0
    assert llm.stats.num_evicted_blocks == 0
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(PROMPT)
    for row, token, noted in zip(
        logprobs_by_transformers(PROMPT), PROMPT[1:], first.prompt_logprobs[1:], strict=False
    ):
        assert noted is not None
        assert noted.token_id == token
        assert noted.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert len(noted.top) == 2
    llm.engine.manager.check()


def test_prompts_that_give_logprobs_fill_the_cache_for_others(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=4)
    llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    plain = only(llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0)))
    assert plain.num_cached_tokens == 16


def test_logprobs_of_a_prompt_survive_preemption(make_llm: MakeLLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=1, ignore_eos=True)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:] + PROMPT[:3]]
    pressed = make_llm(num_blocks=12, block_size=4, max_num_batched_tokens=9)
    assert pressed.generate(prompts, params) == make_llm(block_size=4).generate(prompts, params)
    assert pressed.stats.num_preemptions_recompute > 0


def test_a_prompt_of_one_token_has_one_entry(make_llm: MakeLLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    assert only(make_llm().generate([[5]], params)).prompt_logprobs == (None,)


def test_penalties_equal_those_of_transformers_step_by_step(
    make_llm: MakeLLM, tiny_checkpoint: Callable[[str], Path]
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("llama"), dtype=torch.float32
    )
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=24,
        min_new_tokens=24,
        repetition_penalty=1.8,
        sequence_bias=[[[40], 2.0], [[41], -3.0]],
        pad_token_id=0,
    )[0, len(PROMPT) :]
    params = SamplingParams(
        max_tokens=24,
        min_tokens=24,
        temperature=0,
        repetition_penalty=1.8,
        logit_bias={40: 2.0, 41: -3.0},
    )
    output = only(make_llm().generate([PROMPT], params)).outputs[0]
    assert output.token_ids == expected.tolist()
    plain = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    assert output.token_ids != only(make_llm().generate([PROMPT], plain)).outputs[0].token_ids


def test_a_stop_token_ends_a_sample_and_is_its_reason(make_llm: MakeLLM) -> None:
    free = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
    unended = only(make_llm().generate([PROMPT], free)).outputs[0].token_ids
    stop = unended[9]
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, stop_token_ids=[stop])
    output = only(make_llm().generate([PROMPT], params)).outputs[0]
    assert output.token_ids == unended[: unended.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_text_ends_a_sample_where_it_is_complete(make_llm: MakeLLM) -> None:
    llm = make_llm()
    free = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)
    unended = only(llm.generate([PROMPT], free)).outputs[0]
    stop = unended.text[10:14]
    params = SamplingParams(max_tokens=30, seed=4, ignore_eos=True, stop=[stop, "never there"])
    output = only(make_llm().generate([PROMPT], params)).outputs[0]
    assert output.text == unended.text[: unended.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == unended.token_ids[: len(output.token_ids)]
    assert stop in llm.tokenizer.decode(output.token_ids)
    assert stop not in llm.tokenizer.decode(output.token_ids[:-1])


def test_no_sample_ends_before_min_tokens(make_llm: MakeLLM) -> None:
    often = {2: 5.0}
    short = SamplingParams(n=4, max_tokens=20, seed=3, logit_bias=often)
    lengths = [len(s.token_ids) for s in only(make_llm().generate([PROMPT], short)).outputs]
    assert min(lengths) < 8
    long = SamplingParams(n=4, max_tokens=20, seed=3, logit_bias=often, min_tokens=8)
    for sample in only(make_llm().generate([PROMPT], long)).outputs:
        assert len(sample.token_ids) >= 8
        assert 2 not in sample.token_ids[:7]


def test_best_of_answers_the_likeliest_samples(make_llm: MakeLLM) -> None:
    params = SamplingParams(n=5, max_tokens=8, seed=6, logprobs=0)
    drawn = only(make_llm().generate([PROMPT], params)).outputs
    ranked = sorted(
        drawn, key=lambda s: (s.cumulative_logprob or 0.0) / len(s.token_ids), reverse=True
    )
    best = SamplingParams(n=2, best_of=5, max_tokens=8, seed=6)
    outputs = only(make_llm().generate([PROMPT], best)).outputs
    assert [s.token_ids for s in outputs] == [s.token_ids for s in ranked[:2]]
    assert [s.index for s in outputs] == [0, 1]
    assert [s.logprobs for s in outputs] == [None, None]


def test_salts_share_no_cached_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=4)
    params = SamplingParams(max_tokens=2, temperature=0)

    def num_cached(salt: str | None) -> int:
        return only(llm.generate([PROMPT], params, cache_salt=salt)).num_cached_tokens

    assert [num_cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 16, 16, 16]


def test_equal_prompts_of_two_salts_do_not_wait_for_each_other(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=4)
    params = SamplingParams(max_tokens=1, temperature=0)
    for salt in ("a", "b"):
        llm.generate([PROMPT], params, cache_salt=salt)
    assert llm.stats.num_steps == 2


def test_params_and_priorities_are_one_or_one_a_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = [SamplingParams(max_tokens=k, temperature=0, ignore_eos=True) for k in (2, 5)]
    outputs = llm.generate([PROMPT, PROMPT], params, priority=[1, 0])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(InvalidRequest, match="params must be one, or one a prompt, got 2 for 1"):
        llm.generate([PROMPT], params)
    with pytest.raises(InvalidRequest, match="priority must be one, or one a prompt, got 1 for 2"):
        llm.generate([PROMPT] * 2, priority=[0])
