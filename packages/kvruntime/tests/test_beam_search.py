"""Beam search against `generate(num_beams=...)` of transformers, and under pressure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvruntime import LLM, BeamSearchParams, InvalidRequest, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPTS = [[5, 60, 7, 80, 9, 100, 11], [150, 16], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
# Ends the tiny models often enough that every rule of stopping matters.
ENDS_OFTEN = {2: 6.0}


@pytest.fixture(scope="module")
def by_transformers(
    tiny_checkpoint: Callable[[str], Path],
) -> Callable[..., list[tuple[list[int], float]]]:
    models: dict[str, Any] = {}

    def generate(
        family: str, prompt: list[int], n: int, **settings: Any
    ) -> list[tuple[list[int], float]]:
        if family not in models:
            models[family] = transformers.AutoModelForCausalLM.from_pretrained(
                tiny_checkpoint(family), dtype=torch.float32
            )
        settings = {"eos_token_id": 2, "pad_token_id": 0, **settings}
        output = models[family].generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_return_sequences=n,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        answers = []
        for row, score in zip(output.sequences, output.sequences_scores, strict=True):
            token_ids = row[len(prompt) :].tolist()
            ends = [i for i, token in enumerate(token_ids) if token == settings["eos_token_id"]]
            answers.append((token_ids[: ends[0] + 1] if ends else token_ids, float(score)))
        return [
            # What is shorter than the longest is padded.
            (token_ids[: len(token_ids) - _num_padding(token_ids)], score)
            for token_ids, score in answers
        ]

    return generate


def _num_padding(token_ids: list[int]) -> int:
    return next((i for i, token in enumerate(reversed(token_ids)) if token != 0), len(token_ids))


def answers(output: RequestOutput) -> list[tuple[list[int], float]]:
    return [(sample.token_ids, sample.cumulative_logprob or 0.0) for sample in output.outputs]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_equals_transformers(
    make_llm: MakeLLM,
    by_transformers: Callable[..., list[tuple[list[int], float]]],
    early_stopping: Any,
    length_penalty: float,
) -> None:
    params = BeamSearchParams(
        num_beams=4,
        n=4,
        max_tokens=14,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        logit_bias=ENDS_OFTEN,
    )
    outputs = make_llm().generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = by_transformers(
            "llama",
            prompt,
            n=4,
            num_beams=4,
            max_new_tokens=14,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            sequence_bias=[[[2], 6.0]],
        )
        assert [ids for ids, _ in answers(output)] == [ids for ids, _ in expected]
        scores = [score for _, score in answers(output)]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("num_beams", [1, 2, 7])
def test_equals_transformers_in_other_families_and_widths(
    make_llm: MakeLLM,
    by_transformers: Callable[..., list[tuple[list[int], float]]],
    family: str,
    num_beams: int,
) -> None:
    if num_beams == 1:  # transformers calls one beam greedy search, which has no score
        params = BeamSearchParams(num_beams=1, max_tokens=9, ignore_eos=True)
        greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        beam, line = (make_llm(family).generate(PROMPTS, one) for one in (params, greedy))
        assert [a.outputs[0].token_ids for a in beam] == [a.outputs[0].token_ids for a in line]
        return
    params = BeamSearchParams(num_beams=num_beams, n=2, max_tokens=12, repetition_penalty=1.3)
    for prompt, output in zip(PROMPTS, make_llm(family).generate(PROMPTS, params), strict=True):
        expected = by_transformers(
            family, prompt, n=2, num_beams=num_beams, max_new_tokens=12, repetition_penalty=1.3
        )
        assert [ids for ids, _ in answers(output)] == [ids for ids, _ in expected]


def test_an_answer_says_how_it_ended(make_llm: MakeLLM) -> None:
    params = BeamSearchParams(num_beams=4, n=4, max_tokens=6, logit_bias={2: 3.0})
    for output in make_llm().generate(PROMPTS, params):
        for answer in output.outputs:
            ended = answer.token_ids[-1] == 2
            assert answer.finish_reason == ("stop" if ended else "length")
            assert ended or len(answer.token_ids) == 6


LONG = BeamSearchParams(num_beams=4, n=4, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 3},
        {"max_num_seqs": 4},
        {"prefix_caching": False},
        {"num_blocks": 20},
        {"num_blocks": 9},
        {"num_blocks": 9, "prefix_caching": False},
        {"num_blocks": 9, "max_num_batched_tokens": 2},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_what_else_runs(make_llm: MakeLLM, config: dict[str, Any]) -> None:
    roomy = make_llm(block_size=4)
    expected = [roomy.generate([prompt], LONG)[0].outputs for prompt in PROMPTS]
    llm = make_llm(**{"block_size": 4, **config})
    assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
    assert llm.stats.num_forks > 0
    assert bool(llm.stats.num_preemptions_recompute) == (config.get("num_blocks", 99) < 21)
    llm.engine.manager.check()
    assert llm.stats.num_leaked_blocks == 0


def test_beams_share_the_blocks_of_what_they_have_in_common(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=4, prefix_caching=False)
    llm.generate([list(range(3, 35))], LONG)
    copies = 4 * -(-(32 + 24) // 4)
    assert llm.stats.peak_blocks < copies / 2


def test_more_beams_than_seats_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="num_beams must be at most max_num_seqs, got 5 and 4"):
        make_llm(max_num_seqs=4).generate([[1]], BeamSearchParams(num_beams=5))
