"""The engine on tiny models made by transformers: the same logits, the same tokens, nothing lost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvkernels
from kvruntime import LLM, EngineConfig, InvalidRequest, RequestOutput, SamplingParams
from kvruntime import attention as attention_module
from kvruntime.request import Request

FAMILIES = [
    "llama",
    "llama-tied",
    "llama-llama3-rope",
    "llama-linear-rope",
    "llama-multi-head",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral",
    "mistral-window",
]
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_k=40, seed=11, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 380, (length,), generator=generator).tolist()


PROMPTS = [prompt(length, seed=length) for length in (1, 5, 16, 17, 33, 47)]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def assert_at_rest(llm: LLM) -> None:
    llm.engine.manager.check()
    assert llm.stats.num_leaked_blocks == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str,
    make_llm: MakeLLM,
    tiny_checkpoint: Callable[[str], Path],
    reference_logits: Callable[[Path, list[int]], torch.Tensor],
) -> None:
    engine = make_llm(family, max_num_batched_tokens=20).engine
    token_ids = prompt(45)
    engine.add(Request(0, "", token_ids, GREEDY, seed=0))
    logits = torch.empty(0)
    while not len(logits):  # chunks of the prompt come first
        output = engine.scheduler.schedule()
        logits = engine.runner.execute(output).last
        engine.scheduler.complete(output)
    expected = reference_logits(tiny_checkpoint(family), token_ids)[-1]
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(
    family: str, make_llm: MakeLLM, tiny_checkpoint: Callable[[str], Path]
) -> None:
    llm = make_llm(family)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(family), dtype=torch.float32
    )
    expected = []
    for token_ids in PROMPTS:
        known = list(token_ids)
        for _ in range(GREEDY.max_tokens):
            with torch.inference_mode():
                known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
        expected.append([known[len(token_ids) :]])
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert_at_rest(llm)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
class TestTokensDoNotDependOnWhatElseRuns:
    """A request alone is the measure of all the ways in which it may run."""

    def alone(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> list[Any]:
        return [
            tokens_of(make_llm(family).generate([token_ids], params))[0] for token_ids in PROMPTS
        ]

    def test_batched(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> None:
        llm = make_llm(family)
        assert tokens_of(llm.generate(PROMPTS, params)) == self.alone(make_llm, family, params)

    def test_chunked(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> None:
        llm = make_llm(family, max_num_batched_tokens=7)
        assert tokens_of(llm.generate(PROMPTS, params)) == self.alone(make_llm, family, params)
        assert llm.stats.num_steps > sum(map(len, PROMPTS)) // 7

    def test_cached(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> None:
        llm = make_llm(family)
        llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)
        assert tokens_of(again) == self.alone(make_llm, family, params)
        assert [output.num_cached_tokens for output in again] == [0, 0, 0, 16, 32, 32]

    def test_preempted(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> None:
        llm = make_llm(family, num_blocks=8, block_size=16)
        assert tokens_of(llm.generate(PROMPTS, params)) == self.alone(make_llm, family, params)
        assert llm.stats.num_preemptions_recompute > 0
        assert_at_rest(llm)

    def test_in_small_blocks(self, make_llm: MakeLLM, family: str, params: SamplingParams) -> None:
        llm = make_llm(family, block_size=4)
        outputs = llm.generate(PROMPTS, params)
        expected = make_llm(family, block_size=4).generate(PROMPTS[-1:], params)
        assert tokens_of(outputs)[-1:] == tokens_of(expected)


def test_a_sample_is_the_same_whatever_n_is(make_llm: MakeLLM) -> None:
    def samples(n: int) -> list[list[int]]:
        params = SamplingParams(n=n, max_tokens=12, seed=3, ignore_eos=True)
        return tokens_of(make_llm().generate([prompt(21)], params))[0]

    four = samples(4)
    assert four[:1] == samples(1)
    assert four[:2] == samples(2)
    assert len({tuple(sample) for sample in four}) == 4


def test_forked_samples_survive_preemption(make_llm: MakeLLM) -> None:
    params = SamplingParams(n=4, max_tokens=30, seed=3, ignore_eos=True)
    llm = make_llm(num_blocks=9)
    assert tokens_of(llm.generate([prompt(40)], params)) == tokens_of(
        make_llm().generate([prompt(40)], params)
    )
    assert llm.stats.num_preemptions_recompute > 0
    assert_at_rest(llm)


def test_n_samples_compute_the_prompt_once_and_share_its_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate([prompt(35)], SamplingParams(n=4, max_tokens=6, seed=0, ignore_eos=True))
    stats = llm.stats
    assert stats.num_prefill_tokens == 35
    assert (stats.num_forks, stats.num_copies) == (3, 3)
    assert stats.peak_blocks == 2 + 4
    assert stats.tail_waste_slots == 4 * (3 * 16 - 36)  # as soon as there were six blocks
    assert stats.contiguous_slots == 4 * llm.engine.max_model_len


def test_samples_of_a_prompt_that_fills_its_blocks_copy_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate([prompt(32)], SamplingParams(n=3, max_tokens=6, seed=0, ignore_eos=True))
    assert (llm.stats.num_forks, llm.stats.num_copies) == (2, 0)


def test_every_token_goes_through_the_paged_kernel(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def counted(q: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(q))
        return attend(q, *args, **kwargs)

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("dense attention was called")

    attend = kvkernels.paged_attention
    monkeypatch.setattr(attention_module, "paged_attention", counted)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refused)
    llm = make_llm()
    params = SamplingParams(n=2, max_tokens=5, seed=0, ignore_eos=True)
    llm.generate(PROMPTS, params)
    num_layers = llm.engine.runner.model.config.num_layers
    num_decoded = len(PROMPTS) * 2 * (params.max_tokens - 1)  # the last is never computed
    assert len(rows) == llm.stats.num_steps * num_layers
    assert sum(rows) == (llm.stats.num_prefill_tokens + num_decoded) * num_layers
    assert llm.stats.num_prefill_tokens + llm.stats.num_cached_tokens == sum(map(len, PROMPTS))


def test_an_end_of_text_token_ends_a_sample(make_llm: MakeLLM) -> None:
    free = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    unended = tokens_of(make_llm().generate([prompt(9)], free))[0][0]
    llm = make_llm()
    llm.engine._eos_token_ids = frozenset({unended[7]})
    first = unended.index(unended[7])
    output = llm.generate([prompt(9)], SamplingParams(max_tokens=60, seed=5))[0].outputs[0]
    assert output.token_ids == unended[: first + 1]
    assert output.finish_reason == "stop"


def test_output_ends_where_the_pool_does(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=3)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    output = llm.generate([prompt(40)], params)[0].outputs[0]
    assert len(output.token_ids) == 8
    assert output.finish_reason == "length"
    assert_at_rest(llm)


@pytest.mark.parametrize(
    ("config", "length", "message"),
    [
        ({}, 0, "the prompt is empty"),
        ({"num_blocks": 2}, 32, "the prompt has 32 tokens, but the pool holds 32"),
        ({}, 512, "the prompt has 512 tokens, but the model's context holds 512"),
        ({"max_model_len": 20}, 20, "the prompt has 20 tokens, but max_model_len holds 20"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_at_once(
    make_llm: MakeLLM, config: dict[str, int], length: int, message: str
) -> None:
    llm = make_llm(**config)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([prompt(4), prompt(length)], GREEDY)
    assert not llm.engine.has_work


def test_token_ids_outside_the_vocabulary_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match=r"token ids must be in \[0, 400\), got 400"):
        make_llm().generate([[1, 400]], GREEDY)
    with pytest.raises(InvalidRequest, match=r"token ids must be in \[0, 400\), got -1"):
        make_llm().generate([[-1]], GREEDY)
    for named in ({"stop_token_ids": [400]}, {"logit_bias": {400: 1.0}}):
        with pytest.raises(InvalidRequest, match=r"token ids must be in \[0, 400\), got 400"):
            make_llm().generate([[1]], SamplingParams(**named))


def test_more_samples_than_seats_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="n must be at most max_num_seqs, got 5 and 4"):
        make_llm(max_num_seqs=4).generate([[1]], SamplingParams(n=5))


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"max_num_batched_tokens": 0},
        {"kv_memory_bytes": -1},
        {"num_blocks": 2.5},
    ],
)
def test_settings_that_are_no_integer_of_at_least_one_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be an integer of at least 1, got"):
        EngineConfig(**config)


def test_a_pool_smaller_than_a_block_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest, match="kv_memory_bytes must hold at least one block"):
        make_llm(num_blocks=None, kv_memory_bytes=100)


@pytest.mark.parametrize("num_blocks", [10**11, 10**15])
def test_a_pool_beyond_all_memory_is_refused(make_llm: MakeLLM, num_blocks: int) -> None:
    with pytest.raises(InvalidRequest, match=f"must fit into memory, got {num_blocks} blocks of"):
        make_llm(num_blocks=num_blocks)


def test_a_shared_tail_wastes_its_slots_once(make_llm: MakeLLM) -> None:
    """One token a step: the other samples' next tokens have no slot yet that they could fill."""
    llm = make_llm(block_size=2, max_num_batched_tokens=1)
    llm.generate([prompt(1)], SamplingParams(n=4, max_tokens=1, seed=0))
    assert llm.stats.tail_waste_slots == 1
    full = make_llm(block_size=2, num_blocks=2, max_num_batched_tokens=1)
    full.generate([prompt(2)], SamplingParams(n=4, max_tokens=2, seed=0, ignore_eos=True))
    assert full.stats.tail_waste_slots == 1
    forked = make_llm(block_size=4, max_num_batched_tokens=1)
    forked.generate([prompt(1)], SamplingParams(n=4, max_tokens=2, seed=0, ignore_eos=True))
    assert forked.stats.peak_blocks == 2
    assert forked.stats.tail_waste_slots == 2 + 2


def test_statistics_of_the_cache_count_tokens_of_prompts_only(make_llm: MakeLLM) -> None:
    """A preempted sequence finds generated tokens again, and its own prompt."""
    llm = make_llm(num_blocks=9, block_size=4)
    outputs = llm.generate([prompt(6, seed=1), prompt(6, seed=2)], GREEDY)
    stats = llm.stats
    assert stats.num_preemptions_recompute == 1
    assert stats.num_prefill_tokens + stats.num_cached_tokens == 3 * 6
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
