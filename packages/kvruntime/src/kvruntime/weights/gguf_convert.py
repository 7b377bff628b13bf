"""Converting a GGUF file to a Hugging Face folder: names, row order, float32.

Knows how llama.cpp's converters renamed and reordered Llama, Qwen2 and Qwen3 (Mistral is called
llama there), and undoes it. What the model would need and a GGUF file does not say is refused, so
that no folder gives other text than its source. Where the folder ends up is the cache's business.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from kvruntime.config import ModelConfig, RopeParameters
from kvruntime.errors import CheckpointError
from kvruntime.models.rope import inverse_frequencies
from kvruntime.weights.folder import check_shapes
from kvruntime.weights.gguf_file import GGUFFile, Metadata
from kvruntime.weights.gguf_tokenizer import write_tokenizer
from kvruntime.weights.progress import Progress

__all__ = ["CONVERTER_VERSION", "convert"]

# Part of the cache's key: raise it when the same file would convert to another folder.
CONVERTER_VERSION = 1

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_FACTORS = "rope_freqs.weight"
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(path: Path, folder: Path, progress: Progress) -> None:
    """Write the checkpoint in the GGUF file at `path` into the empty `folder`.

    All but the values is checked before the first is read. Needs four bytes a weight, in memory
    and on disk. Raises `CheckpointError` with the path in front, `OSError` if writing fails.
    """
    source = GGUFFile(path)
    try:
        names = {name: _huggingface_name(name) for name in source.tensors if name != _ROPE_FACTORS}
        settings = _model_settings(source)
        config = ModelConfig.from_huggingface(settings)
        write_tokenizer(source.metadata, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    check_shapes(config, {names[name]: source.tensors[name].shape for name in names}, path)
    tensors = {}
    for done, (name, target) in enumerate(names.items()):
        progress("Converting", done, len(names))
        values = source.read(source.tensors[name])
        if config.architecture == "llama" and ".self_attn.q_proj." in target:
            values = _half_split_rows(values, config.num_heads)
        elif config.architecture == "llama" and ".self_attn.k_proj." in target:
            values = _half_split_rows(values, config.num_kv_heads)
        tensors[target] = values
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    try:
        # transformers 4 refuses a file without this metadata.
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    except safetensors.SafetensorError as error:
        # The tensors are well-formed, so what failed is the writing: a full disk, say.
        raise OSError(str(error)) from error
    progress("Converting", len(names), len(names))


def _huggingface_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _MODEL_NAMES and kind == "weight":
        return f"{_MODEL_NAMES[stem]}.weight"
    raise CheckpointError(f"the tensor {name!r:.80} belongs to no architecture that is supported")


def _half_split_rows(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of llama.cpp's Llama converter.

    llama.cpp rotates neighbouring rows of a head (0, 1), (2, 3), ...; Hugging Face rotates row i
    with row i + head_dim / 2, so the even rows of each head come first, then the odd ones.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def _model_settings(source: GGUFFile) -> dict[str, Any]:
    """Return the contents of `config.json`."""
    metadata = source.metadata
    architecture = metadata.one("general.architecture", str)
    if architecture not in _CLASSES:
        raise CheckpointError(
            f"general.architecture must be one of {', '.join(_CLASSES)}, got {architecture!r:.80}"
        )
    if metadata.values.get(f"{architecture}.attention.sliding_window"):
        raise CheckpointError(
            f"{architecture}.attention.sliding_window must be absent or 0, for a GGUF file does "
            "not say which layers have it"
        )
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing")
    hidden_size = _number(metadata, f"{architecture}.embedding_length")
    num_heads = _number(metadata, f"{architecture}.attention.head_count")
    key_length = f"{architecture}.attention.key_length"
    head_dim = metadata.one(key_length, int) or hidden_size // num_heads
    settings = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _number(metadata, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _number(metadata, f"{architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(
            metadata, f"{architecture}.attention.head_count_kv", default=num_heads
        ),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.one(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": _number(metadata, f"{architecture}.context_length"),
        "rope_parameters": _rope_parameters(source, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "bos_token_id": metadata.one("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_token_ids(metadata),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _number(metadata: Metadata, key: str, default: int | None = None) -> int:
    """Return a positive number, which some files write once for each layer."""
    value = metadata.values.get(key, default)
    each = value if isinstance(value, list) else [value]
    if len(each) == 0 or each != each[:1] * len(each):
        raise CheckpointError(f"{key} must be the same in all layers, got {value!r:.40}")
    if not isinstance(each[0], int) or each[0] < 1:
        raise CheckpointError(f"{key} must be a positive integer, got {each[0]!r:.40}")
    return each[0]


def _eos_token_ids(metadata: Metadata) -> list[int] | None:
    """Return the end of a text and, where the file tells it apart, the end of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [metadata.one(key, int) for key in keys]
    return list(dict.fromkeys(item for item in ids if item is not None)) or None


def _rope_parameters(source: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any]:
    metadata = source.metadata
    for part in ("rope.dimension_count", "attention.value_length"):
        size = metadata.values.get(f"{architecture}.{part}", head_dim)
        if size != head_dim:
            raise CheckpointError(
                f"{architecture}.{part} must be the head's {head_dim}, got {size!r:.40}"
            )
    theta = metadata.one(f"{architecture}.rope.freq_base", float)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta or 10000.0}
    if _ROPE_FACTORS in source.tensors:
        return _llama3_parameters(source, parameters["rope_theta"], head_dim)
    kind = metadata.one(f"{architecture}.rope.scaling.type", str) or "none"
    if kind == "linear":
        factor = metadata.one(f"{architecture}.rope.scaling.factor", float)
        return {**parameters, "rope_type": "linear", "factor": factor}
    if kind != "none":
        raise CheckpointError(
            f"{architecture}.rope.scaling.type must be none or linear, got {kind!r:.80}"
        )
    return parameters


def _llama3_parameters(source: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover the parameters of Llama 3's stretching from the factors it led to.

    A GGUF file holds the quotient of each frequency, not what it was computed from. Every release
    has the same three constants and its own factor, which is the largest quotient; whether these
    are the file's is computed, not assumed.
    """
    factors = source.read(source.tensors[_ROPE_FACTORS])
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if factors.shape == (head_dim // 2,):
        rope = RopeParameters.from_huggingface({"rope_parameters": parameters})
        plain = inverse_frequencies(RopeParameters(rope.theta), head_dim)
        expected = (plain / inverse_frequencies(rope, head_dim)).numpy()
        if np.allclose(factors, expected, rtol=1e-5):
            return parameters
    raise CheckpointError(f"{_ROPE_FACTORS} must hold the factors of Llama 3, which it does not")
