"""Calls of tools: found in text however it comes, written by templates, enforced by constraints."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvruntime import LLM, EngineConfig, InvalidRequest, SamplingParams
from kvruntime.guidance import Guidance
from kvruntime.tokenizer import Tokenizer
from kvruntime.tools import ToolCall, ToolFormat, ToolParser, call_constraint, tool_format
from kvruntime.weights import load_checkpoint

from .conftest import train_tokenizer
from .tool_templates import CALLS, TEMPLATES

NAMES = {"weather", "time"}
EXPECTED = [
    ToolCall("weather", json.dumps({"city": "Zürich </tool_call>", "days": 2})),
    ToolCall("time", "{}"),
]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 6}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]


def known_format(name: str) -> ToolFormat:
    found = tool_format(TEMPLATES[name])
    assert found is not None
    assert found.name == name
    return found


def parse(name: str, chunks: Sequence[str]) -> list[str | ToolCall]:
    """The pieces of a text, texts that follow each other put together."""
    parser = ToolParser(known_format(name), NAMES)
    pieces = [piece for chunk in chunks for piece in parser.append(chunk)] + parser.finish()
    joined: list[str | ToolCall] = []
    for piece in pieces:
        assert piece, "a piece says something"
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_in_text_that_comes_in_pieces(name: str, size: int) -> None:
    text = CALLS[name]
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    before: list[str | ToolCall] = [] if name == "llama3_json" else ["I look it up.\n"]
    assert parse(name, chunks) == before + EXPECTED


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "time", "arguments": {}}', "<tool",
     '{"name": "other"}', " ", "\n", "[", "]", "{", "}", ";", ",", '"', "text", "<|python_tag|>", "é"]
), max_size=12), st.data())  # fmt: skip
def test_what_is_found_does_not_depend_on_where_text_is_cut(
    name: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    chunks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, [text])
    assert parse(name, chunks) == whole
    if not any(isinstance(piece, ToolCall) for piece in whole):
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Plain words, a < b and <tool> too."),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": "no object"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["time"]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {'),
        ("hermes", "<tool_call>" + "[" * 1500),
        ("hermes", "ends with <tool_ca"),
        ("llama3_json", '{"city": "Bern"}'),
        ("llama3_json", '{"name": "time", "parameters"'),
        ("llama3_json", ' \n {"name": "Ann", "parameters": {}} said so'),
        ("llama3_json", 'It is {"name": "time", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}}, {"name": "unknown"}]'),
        ("mistral", "[TOOL_CALLS] []"),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert parse(name, list(text)) == [text]


def test_text_is_not_held_back_longer_than_it_may_become_a_call() -> None:
    parser = ToolParser(known_format("hermes"), NAMES)
    assert parser.append("a < b <to") == ["a < b "]
    assert parser.append("ad>") == ["<toad>"]
    assert parser.append('<tool_call>{"name": "time", "arguments": {}}') == []
    assert parser.append("</tool_call>") == [ToolCall("time", "{}")]
    assert parser.append("\n ") == []
    assert parser.append("done") == ["done"]
    assert parser.finish() == []


def test_a_call_after_one_that_is_broken_is_found() -> None:
    broken = '<tool_call>{"name": "time", </tool_call>'
    whole = f'{broken}<tool_call>{{"name": "time"}}</tool_call>'
    assert parse("hermes", [whole]) == [broken, ToolCall("time", "{}")]


def test_arguments_that_are_text_of_json_count_as_json() -> None:
    text = '[TOOL_CALLS]{"name": "time", "arguments": "{\\"zone\\": \\"\\ud800\\"}"}'
    [call] = parse("mistral", [text])
    assert call == ToolCall("time", '{"zone": "\\ud800"}')


# ── templates ────────────────────────────────────────────────────────────────────────────────


def test_templates_without_tools_or_with_another_form_have_no_format() -> None:
    assert tool_format("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert tool_format("<tool_call>\n<function=name>\n<parameter=x>") is None


def tokenizer_with(template: str, tool_template: str | None = None) -> Tokenizer:
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        tokenizers.Tokenizer(tokenizers.models.BPE()), settings, template, tool_template
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_tools_calls_and_results(name: str) -> None:
    call_id = "a1b2c3d4e"
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "Rain."},
        {"role": "user", "content": "And tomorrow?"},
    ]
    prompt = tokenizer_with(TEMPLATES[name]).apply_chat_template(messages, tools=TOOLS)
    assert '"name": "time"' in prompt
    assert "Rain." in prompt
    before = prompt[: prompt.index("Rain.")]
    call = before[max(before.rfind(key) for key in ('[{"name"', '{"name"')) :]
    assert f'"{known_format(name).arguments}": {{"city": "Bern"}}' in call
    assert messages[1]["tool_calls"] == [{"id": call_id, "type": "function", "function": function}]


def test_a_checkpoint_may_have_a_template_of_its_own_for_tools() -> None:
    tokenizer = tokenizer_with("plain {{ messages[0].content }}", TEMPLATES["hermes"])
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "plain x"
    assert "<tools>" in tokenizer.apply_chat_template(messages, tools=TOOLS)
    assert tokenizer.tool_format == known_format("hermes")


def test_tools_are_refused_where_the_template_knows_none() -> None:
    with pytest.raises(InvalidRequest, match="tools need a chat template that knows them"):
        tokenizer_with("{{ messages[0].content }}").apply_chat_template(
            [{"role": "user", "content": "x"}], tools=TOOLS
        )


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 100_000])
def test_arguments_in_a_message_must_be_an_object(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(
        InvalidRequest, match=r"^the arguments of a tool call must be a JSON object"
    ):
        tokenizer_with(TEMPLATES["hermes"]).apply_chat_template(messages, tools=TOOLS)


def test_tags_that_are_special_tokens_are_decoded(tmp_path: Path) -> None:
    backend = train_tokenizer(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_special_tokens(["[TOOL_CALLS]", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": TEMPLATES["mistral"]},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("a [TOOL_CALLS]b</s>")
    assert ids == backend.encode("a [TOOL_CALLS]b</s>").ids
    assert tokenizer.decode(ids) == "a [TOOL_CALLS]b"
    assert backend.decode(ids) == "a b"


def test_a_chat_shows_tools_to_the_model(tiny_checkpoint: Callable[[str], Path]) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    template = "{{ messages[0].content }}{% if tools %} <tool_call> {{ tools[1].function.name }}{% endif %}"
    checkpoint = dataclasses.replace(
        checkpoint, tokenizer=Tokenizer(checkpoint.tokenizer.backend, {}, template)
    )
    llm = LLM(checkpoint, EngineConfig(num_blocks=16))
    messages = [{"role": "user", "content": "x"}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=1), tools=TOOLS)
    assert output.prompt == "x <tool_call> time"


# ── constraints ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_must_call_calls(name: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    functions: list[tuple[str, dict[str, Any] | None]] = [("weather", WEATHER), ("time", WEATHER)]
    llm = LLM(load_checkpoint(tiny_checkpoint("llama")), EngineConfig(num_blocks=256))
    for is_parallel in (True, False):
        constraint = call_constraint(
            known_format(name), functions, is_required=True, is_parallel=is_parallel
        )
        params = SamplingParams(n=8, max_tokens=400, seed=1, structured_outputs=constraint)
        [output] = llm.generate([[5, 60, 7]], params)
        ended = [answer for answer in output.outputs if answer.finish_reason == "stop"]
        assert len(ended) >= (2 if is_parallel else 6)
        counts = set()
        for answer in ended:
            pieces = parse(name, [answer.text])
            counts.add(len(pieces))
            for piece in pieces:
                assert isinstance(piece, ToolCall)
                arguments = json.loads(piece.arguments)
                assert len(arguments["city"]) <= 6
                assert arguments.keys() <= {"city", "days"}
        assert (counts == {1}) is not is_parallel


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_may_call_is_free_until_it_does(
    name: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama"))
    guidance = Guidance(
        checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size, eos_token_ids=[2]
    )

    def follows(text: str, *, is_parallel: bool = True) -> bool:
        """Whether an answer may begin so."""
        functions: list[tuple[str, dict[str, Any] | None]] = [("weather", WEATHER), ("time", None)]
        matcher = guidance.constraint(
            call_constraint(
                known_format(name), functions, is_required=False, is_parallel=is_parallel
            )
        ).matcher()
        for token_id in checkpoint.tokenizer.encode(text):
            if not matcher.allowed()[token_id]:
                return False
            matcher.advance(token_id)
        return True

    good = CALLS[name].replace("Zürich </tool_call>", "Bern")
    assert follows("A < b, and <tool> or [TOOL] are words.")
    assert follows(good.replace("; ", ";"))
    assert not follows(good.replace("; ", ";"), is_parallel=False)
    assert not follows(good.replace("Bern", "Reykjavik"))
    assert not follows(good.replace('"weather"', '"wealth"'))
    assert not follows(good.replace('"days"', '"nights"'))


def test_a_function_without_a_schema_takes_any_object() -> None:
    constraint = call_constraint(
        known_format("hermes"), [("time", None)], is_required=True, is_parallel=False
    )
    assert constraint.grammar is not None
    assert '%json {"type": "object"' in constraint.grammar
