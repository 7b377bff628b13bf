"""A real checkpoint through paged memory, against transformers and against itself."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvruntime import LLM, EngineConfig, RequestOutput, SamplingParams
from kvruntime.weights import Checkpoint

pytestmark = pytest.mark.smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences what a page table is.",
    "Write a haiku about autumn leaves.",
    "Name three fruits.",
]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
# Long enough to outgrow a small pool.
LONG_GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG_SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM(smollm2, EngineConfig(num_blocks=128))


def prompts(llm: LLM) -> list[list[int]]:
    system = {"role": "system", "content": "Answer in plain words and keep it short, please."}
    texts = [
        llm.tokenizer.apply_chat_template([system, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_greedy_text_equals_transformers(llm: LLM, smollm2_folder: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_folder, dtype=torch.float32
    )
    expected = []
    for token_ids in prompts(llm):
        output = model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            pad_token_id=2,
        )
        expected.append([output[0, len(token_ids) :].tolist()])
    assert tokens_of(llm.generate(prompts(llm), GREEDY)) == expected


@pytest.mark.parametrize("params", [LONG_GREEDY, LONG_SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_the_same_alone_batched_cached_chunked_and_preempted(
    smollm2: Checkpoint, llm: LLM, params: SamplingParams
) -> None:
    batch = prompts(llm)
    fresh = LLM(smollm2, EngineConfig(num_blocks=128, prefix_caching=False))
    alone = [tokens_of(fresh.generate([token_ids], params))[0] for token_ids in batch]

    assert tokens_of(llm.generate(batch, params)) == alone
    cached = llm.generate(batch, params)
    assert tokens_of(cached) == alone
    assert all(output.num_cached_tokens for output in cached)
    for config in (
        EngineConfig(num_blocks=128, max_num_batched_tokens=24),
        EngineConfig(num_blocks=8),
    ):
        pressed = LLM(smollm2, config)
        assert tokens_of(pressed.generate(batch, params)) == alone
        assert pressed.stats.num_leaked_blocks == 0
    assert pressed.stats.num_preemptions_recompute > 0


def test_32_mixed_requests_get_the_same_tokens_and_logprobs_whatever_is_done_for_room(
    smollm2: Checkpoint,
) -> None:
    """Greedy and seeded, of several lengths, some in two samples, some sharing a prefix."""
    reference = LLM(smollm2, EngineConfig(num_blocks=256))
    asked = _mixed_requests(reference)
    expected = _answers(reference, asked)
    # Alone: the last of each kind of parameters.
    for one in asked[-4:]:
        [output] = LLM(smollm2, EngineConfig(num_blocks=64)).generate([one[0]], one[1])
        assert _samples(output) == expected[asked.index(one)]
    tiny = {"num_blocks": 14}
    variants: list[tuple[dict[str, Any], list[str]]] = [
        ({"num_blocks": 64, "max_num_seqs": 2}, []),
        ({"num_blocks": 256, "max_num_batched_tokens": 24, "prefix_caching": False}, []),
        (tiny, ["num_preemptions_recompute", "num_evicted_blocks", "num_deferrals"]),
        (
            {**tiny, "preemption": "swap"},
            ["num_preemptions_swap", "num_swapped_out_blocks", "num_swapped_in_blocks"],
        ),
        ({**tiny, "preemption": "swap", "num_host_blocks": 1}, ["num_swap_fallbacks"]),
    ]
    for config, counters in variants:
        llm = LLM(smollm2, EngineConfig(**config))
        assert _answers(llm, asked) == expected, config
        for counter in counters:
            assert getattr(llm.stats, counter) > 0, (config, counter)
        assert llm.stats.num_leaked_blocks == 0
        assert llm.stats.num_forks > 0


def _mixed_requests(llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    heads = prompts(llm)
    asked = []
    for number in range(32):
        head = heads[number % 4]
        token_ids = head[: 20 + number % 12] if number % 3 else head
        params = SamplingParams(
            max_tokens=4 + number % 9,
            temperature=0.9 if number % 2 else 0,
            n=2 if number % 5 == 1 else 1,
            seed=number,
            logprobs=1,
            ignore_eos=True,
        )
        asked.append((token_ids, params))
    return asked


def _answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    outputs = llm.generate([one for one, _ in asked], [params for _, params in asked])
    return [_samples(output) for output in outputs]


def _samples(output: RequestOutput) -> list[Any]:
    return [(sample.token_ids, sample.logprobs) for sample in output.outputs]


def test_forked_samples_are_what_each_would_be_alone(llm: LLM) -> None:
    [token_ids, *_] = prompts(llm)
    four = SamplingParams(n=4, max_tokens=16, temperature=0.9, seed=5)
    two = SamplingParams(n=2, max_tokens=16, temperature=0.9, seed=5)
    before = llm.stats
    samples = tokens_of(llm.generate([token_ids], four))[0]
    assert samples[:2] == tokens_of(llm.generate([token_ids], two))[0]
    assert len({tuple(sample) for sample in samples}) == 4
    assert llm.stats.num_forks - before.num_forks == 4


def test_the_examples_of_the_readme_run(
    smollm2: Checkpoint, smollm2_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smollm2.name == "smollm2"  # converted by now
    monkeypatch.setenv("KVRUNTIME_CACHE", str(smollm2_cache))
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for part in readme.split("```python\n")[1:]:
            exec(part.split("```")[0], names)  # noqa: S102 -- it is ours
    lines = printed.getvalue().splitlines()
    assert lines[0] == "0 The capital of France is Paris."
    assert any(line.startswith("3 ") for line in lines)
