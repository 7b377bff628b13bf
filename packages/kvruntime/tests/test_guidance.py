"""Structured outputs on a tiny random model, which left to itself writes nothing that makes sense."""

import json
import math
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from kvruntime import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    EngineConfig,
    InvalidRequest,
    MissingDependency,
    SamplingParams,
    StructuredOutputsParams,
)
from kvruntime.engine import Engine
from kvruntime.guidance import Guidance
from kvruntime.models import Llama
from kvruntime.weights import load_checkpoint

from .json_schemas import random_schema

MakeLLM = Callable[..., LLM]
PROMPT = [5, 60, 7, 80, 9, 100, 11]
EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Ever more ways to read the same text: too many to follow after some hundred letters.
AMBIGUOUS = 'start: s\ns: s s s | s s | "a"'


def guided(max_tokens: int = 120, seed: int = 1, **settings: Any) -> SamplingParams:
    """Sampling with one constraint; the other settings are those of sampling."""
    names = StructuredOutputsParams.__slots__
    constraint = {name: settings.pop(name) for name in list(settings) if name in names}
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**constraint),
        **settings,
    )


def token(llm: LLM, text: str) -> int:
    [token_id] = llm.tokenizer.encode(text)
    return token_id


def sample(llm: LLM, params: SamplingParams) -> CompletionOutput:
    [output] = llm.generate([PROMPT], params)
    return output.outputs[0]


# ── what is answered ─────────────────────────────────────────────────────────────────────────


def test_every_answer_that_stopped_is_valid_by_its_schema(make_llm: MakeLLM) -> None:
    chance = random.Random(20)  # noqa: S311 -- chosen to be repeatable
    schemas = [random_schema(chance) for _ in range(200)]
    whitespace: list[dict[str, Any]] = [
        {"disable_any_whitespace": True},
        {"whitespace_pattern": "[ \n]?"},
        {},
    ]
    params = [
        guided(200, seed, json=schema, **chance.choice(whitespace))
        for seed, schema in enumerate(schemas)
    ]
    outputs = make_llm(num_blocks=2000).generate([PROMPT] * 200, params)
    stopped = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            stopped += 1
            value = json.loads(answer.text)
            validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
            assert validator.is_valid(value), f"{answer.text} is not {schema}"
    assert stopped > 150


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"temperature": 2.5, "top_k": 5}])
def test_a_json_object_is_an_object(make_llm: MakeLLM, settings: dict[str, Any]) -> None:
    llm = make_llm()
    params = guided(200, json_object=True, logit_bias={token(llm, "}"): 4.0}, **settings)
    answer = sample(llm, params)
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize("pattern", [r"\d{4}-\d\d", "(ab|ba){3}", "[^/]{2,5}/x", "é+日?", r"\w{3}"])
def test_an_answer_matches_its_regex_with_ascii_classes(make_llm: MakeLLM, pattern: str) -> None:
    for seed in range(5):
        answer = sample(make_llm(), guided(regex=pattern, seed=seed, top_k=3))
        assert answer.finish_reason == "stop"
        assert re.fullmatch(
            pattern.replace(r"\d", "[0-9]").replace(r"\w", "[0-9a-zA-Z_]"), answer.text
        )


def test_an_answer_is_one_of_its_choices(make_llm: MakeLLM) -> None:
    choices = ["yes", "yes, but", 'say "no"\n', "naïve 日本"]
    llm = make_llm()
    answers = [sample(llm, guided(choice=choices, seed=seed)) for seed in range(24)]
    assert {answer.text for answer in answers} == set(choices)
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_an_answer_follows_its_grammar(make_llm: MakeLLM) -> None:
    balanced = 'start: "(" start ")" | "x"'
    llm = make_llm()
    for seed in range(5):
        params = guided(grammar=balanced, seed=seed, logit_bias={token(llm, "x"): 2.0})
        answer = sample(llm, params)
        depth = answer.text.count("(")
        assert answer.text == "(" * depth + "x" + ")" * depth


def test_a_complete_answer_ends_without_another_token(make_llm: MakeLLM) -> None:
    llm = make_llm()
    answer = sample(llm, guided(choice=["abc"]))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", None)
    assert EOS not in answer.token_ids


def test_an_answer_that_may_go_on_ends_by_an_end_of_text_token(make_llm: MakeLLM) -> None:
    answer = sample(make_llm(), guided(regex="a+", logit_bias={EOS: 100.0}))
    assert answer.text == "a"
    assert (answer.token_ids[-1], answer.finish_reason) == (EOS, "stop")


def test_an_answer_that_is_cut_off_ends_with_length(make_llm: MakeLLM) -> None:
    answer = sample(make_llm(), guided(3, regex="[ab]{50}"))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)


def test_an_answer_that_is_complete_at_max_tokens_stopped(make_llm: MakeLLM) -> None:
    answer = sample(make_llm(), guided(1, choice=["a"]))
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_json_has_no_whitespace_where_that_is_disabled(make_llm: MakeLLM) -> None:
    for seed in range(5):
        params = guided(json=PERSON, disable_any_whitespace=True, seed=seed)
        text = sample(make_llm(), params).text
        assert text.startswith('{"name":"')
        assert '","age":' in text


def test_whitespace_between_the_tokens_of_json_is_bounded(make_llm: MakeLLM) -> None:
    llm = make_llm()
    spaces = {
        token_id: 50.0 for token_id in range(400) if llm.tokenizer.decode([token_id]).isspace()
    }
    answer = sample(llm, guided(200, json=PERSON, temperature=0, logit_bias=spaces))
    assert 0 < max(map(len, re.findall(r"\s+", answer.text))) <= 32
    assert answer.finish_reason == "stop"


# ── with what sampling does ──────────────────────────────────────────────────────────────────


def test_the_likeliest_token_that_is_allowed_is_taken(make_llm: MakeLLM) -> None:
    llm = make_llm()
    answer = sample(llm, guided(regex="[ab]{40}", temperature=0, logprobs=400))
    assert answer.logprobs is not None
    for noted in answer.logprobs[:20]:
        texts = [(token_id, llm.tokenizer.decode([token_id])) for token_id, _ in noted.top]
        allowed = [token_id for token_id, text in texts if re.fullmatch("[ab]+", text)]
        assert noted.token_id == allowed[0]


def test_logprobs_are_those_of_the_model_itself(make_llm: MakeLLM) -> None:
    llm = make_llm()
    free = sample(llm, SamplingParams(max_tokens=1, temperature=0, logprobs=400))
    answer = sample(llm, guided(1, regex="[ab]{8}", temperature=0, logprobs=400))
    assert answer.logprobs is not None
    assert free.logprobs is not None
    assert answer.logprobs[0].top == free.logprobs[0].top
    assert answer.logprobs[0].logprob == dict(free.logprobs[0].top)[answer.token_ids[0]]


def test_penalties_choose_among_what_is_allowed(make_llm: MakeLLM) -> None:
    plain = sample(make_llm(), guided(regex="[abc]{12}", temperature=0))
    penalised = sample(make_llm(), guided(regex="[abc]{12}", temperature=0, frequency_penalty=50))
    counts = [penalised.text.count(letter) for letter in "abc"]
    assert plain.text != penalised.text
    assert max(counts) - min(counts) <= 2


def test_what_is_allowed_goes_before_minimal_lengths_and_bias(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for forbidding in ({"min_tokens": 9}, {"logit_bias": {token(llm, "a"): -math.inf}}):
        answer = sample(llm, guided(9, regex="a|ab?", temperature=0, **forbidding))
        assert re.fullmatch("a|ab?", answer.text)
        assert answer.finish_reason == "stop"


def test_a_stop_text_ends_a_guided_answer(make_llm: MakeLLM) -> None:
    answer = sample(make_llm(), guided(regex="abcdef", stop=["cd"]))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "cd")


# ── whatever else happens ────────────────────────────────────────────────────────────────────

MIXED = [
    guided(30, n=3, json=PERSON, disable_any_whitespace=True),
    SamplingParams(max_tokens=30, n=2, seed=5, ignore_eos=True),
    guided(30, regex="([a-z]{1,3} )+", temperature=0),
    guided(30, n=2, best_of=3, grammar='start: "(" start ")" | "x" "é"*'),
    guided(30, json_object=True, repetition_penalty=1.3),
    guided(30, choice=["a" * 20, "ab" * 10, "abc" * 8], n=4),
]
PROMPTS = [PROMPT, PROMPT[::-1], PROMPT * 2, PROMPT[2:], PROMPT, PROMPT[1:]]
UNDER_PRESSURE: dict[str, dict[str, Any]] = {
    "batched": {"num_blocks": 256},
    "recomputed": {"num_blocks": 14, "block_size": 4},
    "swapped": {"num_blocks": 14, "block_size": 4, "preemption": "swap"},
    "chunked": {"num_blocks": 256, "max_num_batched_tokens": 5, "prefix_caching": False},
    "auto": {"num_blocks": 16, "block_size": 4, "preemption": "auto", "num_host_blocks": 6},
}


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Callable[[str], Any]) -> list[tuple[CompletionOutput, ...]]:
    answers = []
    for prompt, params in zip(PROMPTS, MIXED, strict=True):
        llm = LLM(tiny_checkpoint("llama"), EngineConfig(num_blocks=256))
        answers.append(llm.generate([prompt], params)[0].outputs)
    return answers


@pytest.mark.parametrize("name", UNDER_PRESSURE)
def test_answers_are_the_same_alone_batched_and_preempted(
    make_llm: MakeLLM, alone: list[tuple[CompletionOutput, ...]], name: str
) -> None:
    llm = make_llm(**UNDER_PRESSURE[name])
    assert [output.outputs for output in llm.generate(PROMPTS, MIXED)] == alone
    stats = llm.stats
    assert stats.num_preemptions_recompute or name != "recomputed"
    assert stats.num_preemptions_swap or name not in {"swapped", "auto"}
    assert stats.num_leaked_blocks == 0


def test_samples_of_one_prompt_follow_their_own_text(make_llm: MakeLLM) -> None:
    [output] = make_llm().generate([PROMPT], guided(n=6, regex="[ab]{3}[01]{3}"))
    texts = [answer.text for answer in output.outputs]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[ab]{3}[01]{3}", text) for text in texts)


def test_a_constraint_that_becomes_too_complex_ends_its_answer_alone(make_llm: MakeLLM) -> None:
    llm = make_llm()
    hard = guided(400, grammar=AMBIGUOUS, temperature=0, logit_bias={EOS: -1000.0})
    plain = guided(20, regex="[ab]{20}")
    failed, other = llm.generate([PROMPT, PROMPT], [hard, plain])
    answer = failed.outputs[0]
    assert answer.finish_reason == "error"
    assert "Current row has" in str(answer.stop_reason)
    assert set(answer.text) == {"a"}
    assert other.outputs[0].finish_reason == "stop"
    assert llm.stats.num_leaked_blocks == 0


def test_a_batch_compiles_each_constraint_once(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = Guidance._compile
    compiled = []

    def note(guidance: Guidance, params: StructuredOutputsParams) -> Any:
        compiled.append(params)
        return compile_(guidance, params)

    monkeypatch.setattr(Guidance, "_compile", note)
    words = ["a" * number for number in range(1, 51)]
    answers = make_llm().generate([PROMPT] * 50, [guided(choice=[word]) for word in words])
    assert [answer.outputs[0].text for answer in answers] == words
    assert len(compiled) == 50


def test_matchers_of_one_constraint_know_nothing_of_each_other(
    tiny_checkpoint: Callable[[str], Any],
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    guidance = Guidance(checkpoint.tokenizer, vocab_size=400, eos_token_ids=[EOS])
    params = StructuredOutputsParams(regex="ab")
    one, other = guidance.constraint(params).matcher(), guidance.constraint(params).matcher()
    first = one.allowed()
    one.advance(checkpoint.tokenizer.encode("a")[0])
    assert (one.allowed() != first).any()
    assert (other.allowed() == first).all()


@pytest.mark.parametrize("is_held", [False, True])
def test_what_others_have_used_up_does_not_end_an_answer(
    tiny_checkpoint: Callable[[str], Any], *, is_held: bool
) -> None:
    """Neither of a request that comes later nor of one that has its constraint already."""
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    letters = [checkpoint.tokenizer.encode(letter)[0] for letter in "abcd"]
    chance = random.Random(0)  # noqa: S311 -- chosen to be repeatable

    def guidance() -> Guidance:
        return Guidance(checkpoint.tokenizer, vocab_size=400, eos_token_ids=[EOS])

    # Two such answers need nearly all that is kept of one constraint.
    params = StructuredOutputsParams(regex="(.*a.{15}|.*b.{13}|.*c.{11}|.*d.{9})*x")
    shared = guidance()
    held = shared.constraint(params)
    for _ in range(4):
        constraint = held if is_held else shared.constraint(params)
        matcher, alone = (
            constraint.matcher(),
            guidance().constraint(params).matcher(),
        )
        for token_id in chance.choices(letters, k=190):
            assert (matcher.allowed() == alone.allowed()).all()
            matcher.advance(token_id)
            alone.advance(token_id)
        assert not matcher.error


# ── what is refused ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .*, got json and regex"),
        ({"json": "{"}, "a json schema must be JSON: "),
        ({"json": "[]"}, r"a json schema must be an object, got \[\]"),
        ({"json": "false"}, "a json schema must be an object, got false"),
        ({"json": {"x": object()}}, "a json schema must be JSON: "),
        ({"json": {"x": float("nan")}}, "a json schema must be JSON: "),
        ({"json": "[" * 50_000 + "]" * 50_000}, "at most 65536 bytes, got 100000"),
        ({"json": "[" * 30_000 + "]" * 30_000}, "a json schema must not be nested so deeply"),
        ({"regex": "a" * 65_537}, "regex must have at most 65536 bytes, got 65537"),
        ({"regex": "é" * 32_769}, "regex must have at most 65536 bytes, got 65538"),
        ({"regex": "\ud800"}, "regex must be valid Unicode"),
        ({"regex": 5}, "regex must be a text, got 5"),
        ({"choice": []}, r"choice must be texts that are not empty, got \[\]"),
        ({"choice": ["a", ""]}, "choice must be texts that are not empty"),
        ({"choice": "abc"}, "choice must be texts that are not empty, got 'abc'"),
        ({"json_object": 1}, "json_object must be true or false, got 1"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern is about JSON, got it with",
        ),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern must not be given where disable_any_whitespace is",
        ),
    ],
)
def test_a_constraint_that_says_nothing_is_refused(
    constraint: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputsParams(**constraint)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "foo"}}, "the json schema cannot be followed: Invalid type: foo"),
        ({"json": {"not": {}}}, 'the json schema cannot be followed: Unimplemented keys: \\["not"'),
        ({"json": {"$ref": "http://example.org/x"}}, "does not fetch resources"),
        ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "recursion limit exceeded"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"regex": "("}, "the regex cannot be followed: .*unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        (
            {"grammar": 'start: "a" | other'},
            'the grammar cannot be followed: .*unknown name: "other"',
        ),
        ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "too deeply nested"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_a_constraint_that_means_nothing_is_refused_with_the_reason(
    make_llm: MakeLLM, constraint: dict[str, Any], message: str
) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match=f"(?s){message}"):
        llm.generate([PROMPT], guided(**constraint))
    assert llm.stats.num_rejections == 1
    assert not llm.engine.has_work


def test_beams_take_no_structured_outputs() -> None:
    with pytest.raises(InvalidRequest, match="beam search takes no structured_outputs"):
        BeamSearchParams(structured_outputs=StructuredOutputsParams(json_object=True))


def test_structured_outputs_end_where_they_end() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos must be False where structured_outputs"):
        guided(regex="a", ignore_eos=True)
    with pytest.raises(InvalidRequest, match=r"must be StructuredOutputsParams, got \{\}"):
        SamplingParams(structured_outputs={})  # type: ignore[arg-type]  # which is the mistake


def test_an_engine_without_a_tokenizer_refuses_structured_outputs(
    tiny_checkpoint: Callable[[str], Any],
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    engine = Engine(Llama(checkpoint.config, checkpoint.tensors), EngineConfig(num_blocks=8))
    with pytest.raises(InvalidRequest, match="structured outputs need a tokenizer"):
        engine.check_request(PROMPT, guided(regex="a"))


def test_a_missing_library_is_named_with_the_command(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kvruntime\[guided\]'"):
        make_llm().generate([PROMPT], guided(regex="a"))
