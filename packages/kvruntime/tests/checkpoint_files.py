"""Checkpoints of a few kilobytes, as structures that can be spoiled before they become bytes.

Knows both containers well enough to lie in them. Does not know how they are read.
"""

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    5: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
}
_FORMATS |= {11: "<q", 12: "<d"}

TOKENS = ["<|endoftext|>", *"abcdefghij", "ab", "cd", "abcd", "Ġ", "Ċ"]
MERGES = ["a b", "c d", "ab cd"]
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 32, 32, 2, 1

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": [0, 1],
}
QWEN = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
QWEN |= {"max_window_layers": 0, "layer_types": ["sliding_attention"]}

_SHAPES = {
    "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
}
_GGUF_NAMES = dict(
    zip(
        _SHAPES,
        (
            "token_embd.weight",
            "output_norm.weight",
            *(
                f"blk.0.{name}.weight"
                for name in (
                    *("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
                    *("ffn_gate", "ffn_up", "ffn_down"),
                )
            ),
        ),
        strict=True,
    )
)
# Bytes of a block of 32 values: as float32, as Q8_0 and as Q4_0.
_BLOCK_BYTES = {0: 128, 8: 34, 2: 18}


@dataclass
class GGUF:
    """A GGUF file: its numbers may lie."""

    version: int = 3
    values: list[tuple[bytes, int, Any]] = field(default_factory=list)
    tensors: list[tuple[bytes, list[int], int, int]] = field(default_factory=list)
    data: bytes = b""
    num_tensors: int | None = None
    num_values: int | None = None

    def to_bytes(self) -> bytes:
        """Write the file as it is described."""
        counts = [
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.values) if self.num_values is None else self.num_values,
        ]
        parts = [b"GGUF", struct.pack("<IQQ", self.version, *counts)]
        for key, kind, value in self.values:
            parts += [_text(key), struct.pack("<I", kind), _value(kind, value)]
        for name, dimensions, kind, offset in self.tensors:
            parts += [_text(name), struct.pack("<I", len(dimensions))]
            parts += [struct.pack("<Q", size) for size in dimensions]
            parts += [struct.pack("<IQ", kind, offset)]
        header = b"".join(parts)
        return header + bytes(-len(header) % 32) + self.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        item_kind, items = value
        written = b"".join(_value(item_kind, item) for item in items)
        return struct.pack("<IQ", item_kind, len(items)) + written
    return struct.pack(_FORMATS[kind], value) if kind in _FORMATS else bytes(8)


def make_gguf() -> GGUF:
    """A small Llama, its matrices of three types."""
    texts = {
        "general.architecture": b"llama",
        "tokenizer.ggml.model": b"gpt2",
        "tokenizer.ggml.pre": b"llama-bpe",
        "tokenizer.chat_template": b"{{ messages[0]['content'] }}",
    }
    numbers = {
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HIDDEN // HEADS,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }
    file = GGUF()
    file.values += [(key.encode(), STRING, text) for key, text in texts.items()]
    file.values += [(key.encode(), U32, number) for key, number in numbers.items()]
    file.values += [
        (b"llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (b"llama.rope.freq_base", F32, 10000.0),
        (b"llama.rope.scaling.type", STRING, b"linear"),
        (b"llama.rope.scaling.factor", F32, 2.0),
        (b"tokenizer.ggml.add_bos_token", BOOL, True),
        (b"tokenizer.ggml.tokens", ARRAY, (STRING, [token.encode() for token in TOKENS])),
        (b"tokenizer.ggml.merges", ARRAY, (STRING, [merge.encode() for merge in MERGES])),
        (b"tokenizer.ggml.token_type", ARRAY, (5, [3] + [1] * (len(TOKENS) - 1))),
    ]
    for number, (name, shape) in enumerate(_SHAPES.items()):
        kind = 0 if len(shape) == 1 else (0, 8, 2)[number % 3]
        size = prod(shape) // 32 * _BLOCK_BYTES[kind]
        file.tensors.append((_GGUF_NAMES[name].encode(), [*reversed(shape)], kind, len(file.data)))
        file.data += bytes(size) + bytes(-size % 32)
    return file


@dataclass
class Folder:
    """A folder of Hugging Face: JSON values, and the header of its one safetensors file in pairs."""

    config: dict[str, Any]
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    header: list[tuple[str, Any]]
    data: bytes
    length: int | None = None  # that the safetensors file claims for its header
    index: dict[str, Any] | None = None

    def to_files(self) -> dict[str, bytes]:
        """Write every file as it is described, members that come twice included."""
        members = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in self.header)
        header = f"{{{members}}}".encode()
        length = len(header) if self.length is None else self.length
        files = {
            "config.json": json.dumps(self.config).encode(),
            "tokenizer.json": json.dumps(self.tokenizer).encode(),
            "tokenizer_config.json": json.dumps(self.settings).encode(),
            "model.safetensors": struct.pack("<Q", length) + header + self.data,
        }
        if self.index is not None:
            files["model.safetensors.index.json"] = json.dumps(self.index).encode()
        return files


def make_folder(family: str) -> Folder:
    """A small model of a family, its tensors of two types."""
    is_qwen = family == "qwen2"
    shapes = dict(_SHAPES)
    if is_qwen:
        for name, size in (("q", HIDDEN), ("k", HIDDEN // HEADS), ("v", HIDDEN // HEADS)):
            shapes[f"model.layers.0.self_attn.{name}_proj.bias"] = (size,)
    header: list[tuple[str, Any]] = [("__metadata__", {"format": "pt"})]
    data = b""
    for number, (name, shape) in enumerate(shapes.items()):
        dtype = np.dtype(("<f4", "<f2")[number % 2])
        values = np.zeros(shape, dtype).tobytes()
        offsets = [len(data), len(data) + len(values)]
        kind = {4: "F32", 2: "F16"}[dtype.itemsize]
        header.append((name, {"dtype": kind, "shape": [*shape], "data_offsets": offsets}))
        data += values
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(0, TOKENS[0])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [m.split() for m in MERGES]},
    }
    settings = {"bos_token": TOKENS[0], "add_bos_token": True, "chat_template": "{{ 1 }}"}
    config = CONFIG | (QWEN if is_qwen else {})
    return Folder(config, tokenizer, settings, header, data)


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Put files into a folder in place of those that are there."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
