"""A real checkpoint answers alike one at a time, on two threads, in any chunks and beside whoever leaves.

`test_smollm2.py` has the policies on 32 mixed requests; here is what else must not matter. Each test
sees that what it is about has happened.
"""

from collections.abc import Callable
from typing import Any

import pytest

import kvkernels
from kvruntime import LLM, EngineConfig, SamplingParams, attention
from kvruntime.request import Request, Sequence
from kvruntime.weights import Checkpoint

pytestmark = pytest.mark.smollm2

TEXTS = (
    "The old lighthouse keeper opened the door and saw a young girl who",
    "A page table is a data structure that an operating system uses to",
    "In the spring the river rises over the meadows, and",
)


def asked(llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    """12 requests: greedy and seeded, of several lengths, some with a common beginning."""
    heads = [llm.tokenizer.encode(text) for text in TEXTS]
    found = []
    for number in range(12):
        head = heads[number % 3]
        token_ids = head * 2 if number % 4 == 3 else head[: 6 + number % 7]
        params = SamplingParams(
            max_tokens=3 + number % 5,
            temperature=0.9 if number % 2 else 0,
            seed=number,
            logprobs=1,
            ignore_eos=True,
        )
        found.append((token_ids, params))
    return found


def answers(llm: LLM) -> list[Any]:
    requests = asked(llm)
    outputs = llm.generate([ids for ids, _ in requests], [params for _, params in requests])
    assert llm.stats.num_leaked_blocks == 0
    return [(one.token_ids, one.logprobs) for output in outputs for one in output.outputs]


def make(checkpoint: Checkpoint, num_threads: int = 1, **settings: Any) -> LLM:
    return LLM(checkpoint, EngineConfig(**settings), num_threads=num_threads)


@pytest.fixture(scope="module")
def expected(smollm2: Checkpoint) -> list[Any]:
    return answers(make(smollm2, num_blocks=64))


def test_one_at_a_time(smollm2: Checkpoint, expected: list[Any]) -> None:
    llm = make(smollm2, num_blocks=64, max_num_seqs=1)
    assert answers(llm) == expected
    # Nobody shared a step with anybody.
    assert llm.stats.num_steps == llm.stats.num_generated_tokens
    assert llm.stats.contiguous_slots == llm.engine.max_model_len


@pytest.mark.parametrize("budget", [1, 5])
def test_in_chunks_of_any_size(smollm2: Checkpoint, expected: list[Any], budget: int) -> None:
    llm = make(smollm2, num_blocks=64, max_num_batched_tokens=budget)
    assert answers(llm) == expected
    assert llm.stats.num_steps >= llm.stats.num_prefill_tokens / budget


def test_on_two_threads_as_alone_on_two_threads(smollm2: Checkpoint) -> None:
    """Other threads add up in another order, so that two are compared with two."""
    llm = make(smollm2, 2, block_size=4, num_blocks=64, prefix_caching=False)
    alone = [llm.generate([token_ids], params)[0].outputs[0] for token_ids, params in asked(llm)]
    pressed = make(
        smollm2,
        2,
        block_size=4,
        num_blocks=14,
        max_num_batched_tokens=17,
        preemption="swap",
        prefix_caching=False,
    )
    assert answers(pressed) == [(one.token_ids, one.logprobs) for one in alone]
    assert pressed.stats.num_deferrals > 0
    assert pressed.stats.num_preemptions_swap > 0
    assert pressed.stats.num_swapped_in_blocks > 0


def test_behind_a_prefix_that_is_read_once(
    smollm2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(smollm2, num_blocks=200, max_num_batched_tokens=2048)
    prefix = (llm.tokenizer.encode(TEXTS[0]) * 80)[:1040]
    prompts = [prefix + llm.tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    shared: list[int] = []

    def noted(*arguments: Any, num_shared_tokens: int, **others: Any) -> None:
        shared.append(num_shared_tokens)
        kvkernels.cascade_attention(*arguments, num_shared_tokens=num_shared_tokens, **others)

    alone = [llm.generate([prompt], params)[0].outputs for prompt in prompts]
    monkeypatch.setattr(attention, "cascade_attention", noted)
    assert [output.outputs for output in llm.generate(prompts, params)] == alone
    assert set(shared) == {1040}


STATES: dict[str, Callable[[Sequence], bool]] = {
    "waiting": lambda s: not s.has_run,
    "prefilling": lambda s: 0 < s.num_computed_tokens < len(s.request.prompt_token_ids),
    "decoding": lambda s: s.num_output_tokens == 2,
    "preempted": lambda s: s.request.num_preemptions > 0 and not s.is_swapped,
    "swapped": lambda s: s.is_swapped,
}


@pytest.mark.parametrize("state", STATES)
def test_beside_a_neighbour_that_leaves(
    smollm2: Checkpoint, expected: list[Any], state: str
) -> None:
    preemption = "swap" if state == "swapped" else "recompute"
    # Small steps let it be seen in the midst of its prompt; large ones, before the others have ended.
    budget = 64 if state in {"preempted", "swapped"} else 19
    llm = make(
        smollm2,
        block_size=4,
        num_blocks=15,
        max_num_batched_tokens=budget,
        preemption=preemption,
    )
    engine = llm.engine
    staying = [
        Request(number, "", token_ids, params, seed=number)
        for number, (token_ids, params) in enumerate(asked(llm))
    ]
    # Before the last of them, so that it is preempted for the sake of the others.
    for request in staying[:3]:
        engine.add(request)
    neighbour = _leaver(llm)
    engine.add(neighbour)
    [sequence] = neighbour.sequences
    while not STATES[state](sequence):
        engine.step()
        assert not neighbour.is_finished
    engine.abort(neighbour)
    assert sequence.seq_id not in engine.manager
    for request in staying[3:]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    got = [(s.output_token_ids, tuple(s.logprobs)) for r in staying for s in r.sequences]
    assert got == expected
    assert engine.stats().num_leaked_blocks == 0
    counter = {"preempted": "num_preemptions_recompute", "swapped": "num_preemptions_swap"}
    assert getattr(engine.stats(), counter.get(state, "num_deferrals")) > 0


def _leaver(llm: LLM) -> Request:
    """A request that would go on for long."""
    token_ids = llm.tokenizer.encode("Once upon a time there was a city in which nobody slept, for")
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    return Request(100, "", token_ids * 2, params, seed=0)
