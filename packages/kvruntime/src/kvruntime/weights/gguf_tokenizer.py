"""The tokenizer that a GGUF file describes, as the files of a Hugging Face folder.

Knows byte-level BPE (`tokenizer.ggml.model` = gpt2) and how its families cut text before merging,
which a GGUF file only names. Other tokenizers are refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvruntime.errors import CheckpointError
from kvruntime.weights.gguf_file import Metadata

__all__ = ["write_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4

# The patterns of the reference tokenizers; they differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _SPLIT.format(digits=r"\p{N}{1,3}"),
    "qwen2": _SPLIT.format(digits=r"\p{N}"),
}
_GPT2 = ("gpt-2", "default")
_SMOLLM = "smollm"


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        CheckpointError: the tokenizer is of a kind that is not supported, or not whole.
    """
    model = metadata.one("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise CheckpointError(
            f"tokenizer.ggml.model must be gpt2 (byte-level BPE), got {model!r:.80}"
        )
    tokens = metadata.many("tokenizer.ggml.tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise CheckpointError(
            "tokenizer.ggml.tokens must be distinct and at least one, "
            f"got {len(tokens)} with {len(vocabulary)} distinct"
        )
    settings = _settings(metadata, tokens)
    pre = metadata.one("tokenizer.ggml.pre", str) or "default"
    add_bos = metadata.one("tokenizer.ggml.add_bos_token", bool)
    # What the file leaves out is the family's own habit.
    settings["add_bos_token"] = pre == "llama-bpe" if add_bos is None else add_bos
    merges = _merges(metadata, vocabulary)
    bpe = models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, tokens, metadata.many("tokenizer.ggml.token_type", int))
    bos = settings.get("bos_token")
    if settings["add_bos_token"] and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _merges(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in metadata.many("tokenizer.ggml.merges", str):
        left, _, right = text.partition(" ")
        if left + right not in vocabulary or not {left, right} <= vocabulary.keys():
            raise CheckpointError(
                f"tokenizer.ggml.merges must be pairs of tokens that make a token, got {text!r:.80}"
            )
        merges.append((left, right))
    return merges


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == _SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _GPT2:
        return byte_level
    known = ", ".join(sorted([*_SPLITS, *_GPT2, _SMOLLM]))
    raise CheckpointError(f"tokenizer.ggml.pre must be one of {known}, got {pre!r:.80}")


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control tokens special, and keep user-defined ones whole."""
    kinds = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )


def _settings(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json` but for `add_bos_token`."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.one(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key}_token_id must be less than the {len(tokens)} tokens, "
                f"got {token_id!r:.80}"
            )
        settings[f"{name}_token"] = tokens[token_id]
    template = metadata.one("tokenizer.chat_template", str)
    if template is not None:
        settings["chat_template"] = template
    return settings
