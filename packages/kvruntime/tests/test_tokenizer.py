"""The tokenizer and its chat template, against transformers on the same folder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from kvruntime.errors import InvalidRequest
from kvruntime.tokenizer import Tokenizer

hf: Any = transformers

HARD_TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  two spaces before and after  ",
    "tabs\tand\r\nlines\n\n\n and blanks \n",
    "It's they're we've I'll he'd DON'T can't",
    "0 12 345 6789 3.14159 1,000,000 ½ ²",
    "日本語のテキスト 中文字符 한국어",
    "e\u0301 is not \u00e9",
    "family 👨‍👩‍👧‍👦 flag 🇯🇵 face 🙂",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "half <|im_ a token",
    "Ünïcödé ẞ ﬁ \u200b zero width",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a page table?"},
    {"role": "assistant", "content": "A map."},
    {"role": "user", "content": "Of what? <|im_end|>\n"},
]


@pytest.fixture
def folder(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to be changed."""
    copy: Path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    return copy


def change_settings(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def set_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_ids_and_text_equal_transformers(text: str, folder: Path) -> None:
    tokenizer, reference = Tokenizer.from_folder(folder), hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    for skip in (True, False):
        expected = reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_equals_transformers(*, add_generation_prompt: bool, folder: Path) -> None:
    reference = hf.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    tokenizer = Tokenizer.from_folder(folder)
    actual = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert actual == expected


def test_known_tokens_have_their_ids(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 400
    assert tokenizer.backend.id_to_token(2) == "<|im_end|>"


def test_special_tokens_are_skipped_in_text_only_if_asked(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_a_raw_prompt_gets_no_bos_unless_the_checkpoint_says_so(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).encode("hi")[0] != 0


def test_a_raw_prompt_gets_a_bos_by_the_settings(folder: Path) -> None:
    without = Tokenizer.from_folder(folder).encode("hi")
    change_settings(folder, add_bos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hi") == [0, *without]
    assert tokenizer.encode("hi", add_special_tokens=False) == without


def test_a_raw_prompt_gets_a_bos_by_the_post_processor_and_only_one(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    without = backend.encode("hi").ids
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("hi") == [0, *without]
    change_settings(folder, add_bos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hi") == [0, *without]
    assert tokenizer.encode("hi", add_special_tokens=False) == without


def test_settings_of_training_do_not_cut_or_fill_a_prompt(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = backend.encode("a b c d e f").ids
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("a b c d e f") == whole


def test_special_tokens_may_be_written_as_objects(folder: Path) -> None:
    change_settings(folder, eos_token={"content": "<|im_start|>", "lstrip": False})
    assert Tokenizer.from_folder(folder).eos_token_ids == (1,)


def test_a_folder_without_settings_has_neither_bos_nor_eos_nor_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="this checkpoint has no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_the_template_may_stand_in_the_settings_as_one_or_by_name(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change_settings(folder, chat_template="one")
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    change_settings(folder, chat_template=named)
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "three"


def test_the_templates_own_file_comes_first(folder: Path) -> None:
    change_settings(folder, chat_template="settings")
    assert set_template(folder, "file").apply_chat_template(MESSAGES) == "file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
        "{% for m in messages %}{{ m.role }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ messages[0] | tojson(indent=2) }}",
        "{{ '<é>' | tojson }}{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true) }}",
        "{{ strftime_now('%Y') }}",
        "{% if tools is not none %}tools{% endif %}{% if documents is none %}none{% endif %}",
        "{%- set ns = namespace(found=false) -%}\n    {% set ns.found = true %}\n{{ ns.found }}\n",
    ],
)
def test_templates_render_as_in_transformers(template: str, folder: Path) -> None:
    tokenizer = set_template(folder, template)
    reference = hf.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate"),
        ("{{ messages[0]['text'] + 'x' }}", "messages: 'dict object' has no attribute 'text'"),
        ("{{ messages + 1 }}", "messages: can only concatenate list"),
        ("{% if %}", "messages: Expected an expression, got 'end of statement block'"),
        ("{{ ''.__class__.__mro__ }}", "messages: access to attribute '__class__' of 'str'"),
        ("{{ messages.append(1) }}", "messages: access to attribute 'append' of 'list'"),
        ("{{ range(999999999) | list }}", "messages: Range too big"),
    ],
)
def test_a_template_that_fails_is_told_as_a_request_that_is_refused(
    template: str, message: str, folder: Path
) -> None:
    tokenizer = set_template(folder, template)
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert str(caught.value).startswith("the chat template cannot render these messages: ")
