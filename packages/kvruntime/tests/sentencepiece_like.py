"""A small tokenizer of the kind that Llama 2 has."""

from typing import Any

import tokenizers


def sentencepiece_like() -> tokenizers.Tokenizer:
    """BPE as converted from SentencePiece: words begin with U+2581, other bytes have tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "ab", "▁ab", "{", "}", '"', ":", "1"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocabulary = {word: index for index, word in enumerate(words)}
    model: Any = tokenizers.models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer
