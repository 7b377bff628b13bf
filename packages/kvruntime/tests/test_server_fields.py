"""Every field of a request does what it says, and a field that does nothing is refused."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from kvruntime import LLM, BeamSearchParams, InvalidRequest, SamplingParams
from kvruntime.server.protocol import ChatCompletionRequest, CompletionRequest

from .serving import LiveServer, events, live_server

MakeLLM = Callable[..., LLM]

MESSAGES: list[Any] = [{"role": "user", "content": "the cache keeps"}]


@pytest.fixture(scope="module")
def server(make_llm: MakeLLM) -> Iterator[LiveServer]:
    with live_server(make_llm(policy="priority", max_model_len=128)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def llm(make_llm: MakeLLM) -> LLM:
    """Return the same model without a server: the oracle."""
    return make_llm()


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "tiny", "prompt": "a", **fields}
    return CompletionRequest.model_validate_json(json.dumps(body))


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    return ChatCompletionRequest.model_validate_json(json.dumps(body))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"n": 3}, {"n": 3}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {5: -100.0, 7: 1.5}}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"user": "somebody", "temperature": None}, {}),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else None,
)
def test_a_field_becomes_the_engines_parameter(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=9, **expected)
    assert completion(**fields).params(9) == params
    assert chat(**fields).params(9) == params


def test_beam_search_has_its_own_parameters() -> None:
    asked = completion(use_beam_search=True, num_beams=4, n=2, length_penalty=0.5)
    expected = BeamSearchParams(n=2, num_beams=4, length_penalty=0.5, max_tokens=9)
    assert asked.params(9) == expected
    never = chat(use_beam_search=True, n=3, early_stopping="never", temperature=0)
    assert never.params(9) == BeamSearchParams(
        n=3, num_beams=3, early_stopping="never", max_tokens=9
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_beam_search": True, "temperature": 0.7}, "temperature cannot go with"),
        ({"use_beam_search": True, "seed": 1}, "seed cannot go with"),
        ({"use_beam_search": True, "stop": "a"}, "stop cannot go with"),
        ({"num_beams": 4}, "num_beams needs use_beam_search"),
        ({"length_penalty": 1.0}, "length_penalty needs use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    for ask in (completion, chat):
        with pytest.raises(ValidationError, match=message):
            ask(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_beam_search": True, "logprobs": 0}, "logprobs cannot go with"),
        ({"use_beam_search": True, "best_of": 2}, "best_of cannot go with"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, or echo must be true"),
        ({"best_of": 1, "n": 2}, "best_of must be at least n, got 1 and 2"),
    ],
)
def test_fields_of_completions_that_do_not_go_together(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        completion(**fields)


def test_fields_of_chats_that_do_not_go_together() -> None:
    with pytest.raises(ValidationError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=2)
    with pytest.raises(ValidationError, match=r"are the same, got 1 and 2"):
        chat(max_tokens=1, max_completion_tokens=2)
    assert chat(max_tokens=3).limit == chat(max_completion_tokens=3).limit == 3


def test_a_bias_of_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias must name token ids"):
        completion(logit_bias={"the": 1}).params(9)


def test_every_form_of_prompt_has_its_answers_in_order(client: openai.OpenAI, llm: LLM) -> None:
    ids = [llm.encode("the cache"), llm.encode("keeps blocks")]
    [first, second] = llm.generate(ids, SamplingParams(max_tokens=6, temperature=0))
    texts = [first.outputs[0].text, second.outputs[0].text]
    prompts: list[tuple[Any, list[str]]] = [
        ("the cache", texts[:1]),
        (ids[0], texts[:1]),
        (["the cache", "keeps blocks"], texts),
        (ids, texts),
    ]
    for prompt, expected in prompts:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_several_prompts_have_n_answers_each(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the", "cache"], n=2, seed=1, max_tokens=5
    )
    expected = llm.generate(["the", "cache"], SamplingParams(n=2, seed=1, max_tokens=5))
    assert [choice.text for choice in answer.choices] == [
        output.text for one in expected for output in one.outputs
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in expected)


def test_the_best_of_several_is_answered(client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"prompt": "the", "n": 1, "best_of": 4, "seed": 1, "max_tokens": 5}
    [expected] = llm.generate("the", SamplingParams(best_of=4, seed=1, max_tokens=5))
    [choice] = client.completions.create(model="tiny", **asked).choices
    chunks = list(client.completions.create(model="tiny", **asked, stream=True))
    assert choice.text == expected.outputs[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_beams_are_answered_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    beams = BeamSearchParams(num_beams=4, n=2, max_tokens=6)
    [expected] = llm.generate("the", beams)
    answer = client.completions.create(
        model="tiny",
        prompt="the",
        n=2,
        max_tokens=6,
        extra_body={"use_beam_search": True, "num_beams": 4},
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in expected.outputs]


def test_a_stop_text_that_comes_in_parts_is_never_shown(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=2)
    [whole] = llm.generate("the", params)
    text = whole.outputs[0].text
    stop = text[15:19]
    asked: dict[str, Any] = {"prompt": "the", "max_tokens": 40, "seed": 2, "stop": [stop]}
    [choice] = client.completions.create(model="tiny", **asked).choices
    chunks = list(client.completions.create(model="tiny", **asked, stream=True))
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra == {"stop_reason": stop}
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_a_character_of_several_tokens_comes_whole(client: openai.OpenAI, llm: LLM) -> None:
    text = "a 🙂 b 👩‍👩‍👧 é"
    assert len(llm.encode("🙂")) > 1
    asked: dict[str, Any] = {
        "prompt": "the",
        "max_tokens": 60,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    [choice] = client.completions.create(model="tiny", **asked).choices
    chunks = client.completions.create(model="tiny", **asked, stream=True)
    parts = [chunk.choices[0].text for chunk in chunks]
    assert choice.text == "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_what_is_cut_off_in_a_character_is_streamed_as_it_is_answered(
    client: openai.OpenAI, llm: LLM
) -> None:
    """The model is made to say the bytes of an emoji in any order."""
    asked: dict[str, Any] = {
        "prompt": "the",
        "logit_bias": {str(token_id): 100 for token_id in llm.encode("🙂")},
        "max_tokens": 30,
        "seed": 0,
        "temperature": 5.0,
    }
    [choice] = client.completions.create(model="tiny", **asked).choices
    chunks = client.completions.create(model="tiny", **asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert "\N{REPLACEMENT CHARACTER}" in choice.text


def test_logprobs_of_a_chat_are_those_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    [expected] = llm.chat(MESSAGES, params)
    noted = expected.outputs[0].logprobs
    assert noted is not None
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole is not None
    assert whole.content is not None
    for entry, one in zip(whole.content, noted, strict=True):
        assert entry.logprob == one.logprob
        assert entry.bytes is not None
        assert bytes(entry.bytes) == llm.tokenizer.token_bytes(one.token_id)
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in one.top]
    assert [entry.model_dump() for entry in streamed] == [
        entry.model_dump() for entry in whole.content
    ]


def test_logprobs_of_a_completion_name_where_each_token_begins(
    client: openai.OpenAI, llm: LLM
) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="the cache",
        max_tokens=12,
        temperature=0,
        logprobs=1,
        echo=True,
        extra_body={"ignore_eos": True},
    )
    [choice] = answer.choices
    noted = choice.logprobs
    assert noted is not None
    assert noted.tokens is not None
    assert noted.token_logprobs is not None
    assert noted.text_offset is not None
    [expected] = llm.generate(
        "the cache",
        SamplingParams(
            max_tokens=12, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True
        ),
    )
    assert choice.text == "the cache" + expected.outputs[0].text
    rows = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    assert noted.token_logprobs == [None if one is None else one.logprob for one in rows]
    for token, offset in zip(noted.tokens, noted.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)
    first, *others = noted.model_dump()["top_logprobs"]
    assert first is None
    assert all(token in top for token, top in zip(noted.tokens[1:], others, strict=True))


def test_a_prompt_can_be_scored_without_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the cache", max_tokens=0, echo=True, logprobs=0
    )
    [choice] = answer.choices
    assert choice.text == "the cache"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens == answer.usage.total_tokens


def test_a_streamed_echo_shows_each_prompt_once(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "prompt": ["the cache", "keeps"],
        "n": 2,
        "seed": 0,
        "max_tokens": 3,
        "echo": True,
        "logprobs": 0,
    }
    whole = server.post("/v1/completions", body).json()["choices"]
    *chunks, _ = events(server.post("/v1/completions", {**body, "stream": True}))
    for index, expected in enumerate(whole):
        parts = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            together = [entry for part in parts for entry in part["logprobs"][name]]
            assert together == expected["logprobs"][name]


def cached_tokens(client: openai.OpenAI, prompt: list[int], **extra: Any) -> int:
    *_, last = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    return last.usage.prompt_tokens_details.cached_tokens or 0


def test_usage_counts_what_was_cached_and_salts_keep_it_apart(client: openai.OpenAI) -> None:
    prompt = list(range(100, 140))
    assert cached_tokens(client, prompt) == 0
    assert cached_tokens(client, prompt) == 32
    assert cached_tokens(client, prompt, cache_salt="mine") == 0
    assert cached_tokens(client, prompt, cache_salt="mine") == 32
    assert cached_tokens(client, prompt, cache_salt="yours") == 0


def test_only_a_stream_that_asks_for_it_has_usage(server: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}),
    ):
        plain = events(server.post(path, {**body, "stream": True}))
        assert all("usage" not in chunk for chunk in plain[:-1])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        counted = events(server.post(path, {**body, **options}))
        assert [chunk["usage"] for chunk in counted[:-2]] == [None] * (len(counted) - 2)


def test_a_chat_ends_where_the_context_does(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True}, seed=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


def test_content_may_come_in_parts_of_text(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"type": "text", "text": "the"}, {"type": "text", "text": "cache"}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    in_parts = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], **asked
    )
    as_one = client.chat.completions.create(
        messages=[{"role": "user", "content": "the\ncache"}], **asked
    )
    assert in_parts.choices[0].message.content == as_one.choices[0].message.content
