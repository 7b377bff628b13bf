"""The tokenizers that a GGUF file names only, against those of transformers.

The vocabulary is trained without cutting text at all, so its merges cross every place where one of
the tokenizers cuts: two tokenizers that cut differently give different ids.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from kvruntime.tokenizer import Tokenizer
from kvruntime.weights import load_checkpoint

hf: Any = transformers

TEXTS = [
    "it's 12345 67, they'LL  go\n\n  on (x+1)\r\n",
    "naïve été, Größe ½ 日本語\n",
    "  \n \n\t if x==10:\n        return 'a1b22'\n",
]


@pytest.fixture(scope="module")
def folder(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a checkpoint whose merges cross all borders."""
    copy: Path = shutil.copytree(tiny_checkpoint("llama"), tmp_path_factory.mktemp("a") / "model")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(copy / "tokenizer.json"))
    return copy


@pytest.fixture
def converted(
    folder: Path, write_gguf: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Tokenizer, Path]]:
    """Return a function from a GGUF file's changes to its tokenizer here, and the file."""

    def convert(**changes: Any) -> tuple[Tokenizer, Path]:
        path = write_gguf(folder, tmp_path / "a.gguf", **changes)
        return load_checkpoint(path, cache_dir=tmp_path / "cache").tokenizer, path

    return convert


def replace_last_token(token: str, kind: int) -> Callable[[Any], None]:
    """Return a change of the metadata that gives up the last token and its merge for another."""

    def change(writer: Any) -> None:
        (table,) = writer.kv_data
        tokens = table.pop("tokenizer.ggml.tokens").value
        types = table.pop("tokenizer.ggml.token_type").value
        merges = table.pop("tokenizer.ggml.merges").value
        writer.add_token_list([*tokens[:-1], token])
        writer.add_token_types([*types[:-1], kind])
        writer.add_token_merges(merges[:-1])

    return change


@pytest.mark.parametrize("pre", ["gpt-2", "default", None, "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers_on_the_same_file(
    pre: str | None, text: str, converted: Callable[..., tuple[Tokenizer, Path]]
) -> None:
    tokenizer, path = converted(pre=pre)
    reference = hf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_llama_bpe_cuts_as_transformers_does(
    text: str, converted: Callable[..., tuple[Tokenizer, Path]]
) -> None:
    tokenizer, path = converted(pre="llama-bpe")
    reference = hf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # A piece that is a token as a whole stays one in Llama 3, whatever the merges would make of it;
    # transformers leaves that to the tokenizer.json that a GGUF file does not have.
    reference.backend_tokenizer.model.ignore_merges = True
    assert tokenizer.encode(text, add_special_tokens=False) == reference(text).input_ids


def test_the_tokenizers_differ_where_they_should(
    converted: Callable[..., tuple[Tokenizer, Path]],
) -> None:
    kinds = ("gpt-2", "qwen2", "llama-bpe", "smollm")
    ids = [
        [converted(pre=pre)[0].encode(text, add_special_tokens=False) for text in TEXTS]
        for pre in kinds
    ]
    assert all(ids[i] != ids[j] for i in range(4) for j in range(i))


def test_smollm_never_joins_digits(converted: Callable[..., tuple[Tokenizer, Path]]) -> None:
    tokenizer, _ = converted(pre="smollm")
    assert tokenizer.encode("12345") == [tokenizer.encode(digit)[0] for digit in "12345"]


def test_llama_bpe_keeps_a_piece_that_is_a_token_whatever_the_merges_make_of_it(
    converted: Callable[..., tuple[Tokenizer, Path]],
) -> None:
    tokenizer, _ = converted(pre="llama-bpe", metadata=replace_last_token("zzzz", kind=1))
    last = tokenizer.vocab_size - 1
    assert tokenizer.encode("zzzz", add_special_tokens=False) == [last]


def test_qwen2_composes_what_is_decomposed_as_its_own_tokenizer_does(
    converted: Callable[..., tuple[Tokenizer, Path]],
) -> None:
    tokenizer, _ = converted(pre="qwen2")
    reference = hf.Qwen2Tokenizer(vocab=tokenizer.backend.get_vocab(), merges=[])
    for own in (tokenizer.encode("e\u0301t"), reference("e\u0301t").input_ids):
        assert tokenizer.decode(own) == "\u00e9t"


@pytest.mark.parametrize(
    ("pre", "stated", "has_bos"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_bos_is_added_as_the_file_states_or_else_the_family_does(
    *,
    pre: str,
    stated: bool | None,
    has_bos: bool,
    converted: Callable[..., tuple[Tokenizer, Path]],
) -> None:
    def state(writer: Any) -> None:
        if stated is not None:
            writer.add_add_bos_token(stated)

    tokenizer, path = converted(pre=pre, metadata=state)
    assert (tokenizer.encode("it")[:1] == [0]) == has_bos
    (cached,) = (path.parent / "cache").iterdir()
    assert (hf.AutoTokenizer.from_pretrained(cached)("it").input_ids[:1] == [0]) == has_bos


def test_user_defined_tokens_stay_whole_and_are_no_special_tokens(
    converted: Callable[..., tuple[Tokenizer, Path]],
) -> None:
    tokenizer, _ = converted(metadata=replace_last_token("<think>", kind=4))
    last = tokenizer.vocab_size - 1
    assert tokenizer.encode("<think>") == [last]
    assert tokenizer.decode([last]) == "<think>"
