"""Converting a GGUF file to a Hugging Face folder: names, row order, float32.

Knows how llama.cpp's converters renamed and reordered Llama, Qwen2 and Qwen3 (Mistral is called
llama there), and undoes it. What the model would need and a GGUF file does not say is refused, so
that no folder gives other text than its source. Where the folder ends up is the cache's business.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from kvruntime.config import ModelConfig, RopeParameters
from kvruntime.errors import CheckpointError
from kvruntime.models.rope import inverse_frequencies
from kvruntime.weights.folder import check_shapes
from kvruntime.weights.gguf_file import GGUFFile
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
    and on disk. Raises `CheckpointError` with the path in front.
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
    # transformers refuses a file that does not say which framework's order of dimensions it has.
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    progress("Converting", len(names), len(names))


def _huggingface_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _MODEL_NAMES and kind == "weight":
        return f"{_MODEL_NAMES[stem]}.weight"
    raise CheckpointError(f"the tensor {name} belongs to no architecture that is supported")


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
    architecture = metadata.get("general.architecture")
    if architecture not in _CLASSES:
        raise CheckpointError(
            f"general.architecture must be one of {', '.join(_CLASSES)}, got {architecture!r}"
        )
    values = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        values[key] = _same_in_all_layers(key, values.get(key))
    if values.get("attention.sliding_window"):
        raise CheckpointError(
            "a sliding window is not supported in GGUF files, which do not say how it is meant, "
            f"got {values['attention.sliding_window']}"
        )
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing")
    settings = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "vocab_size": embedding.shape[0],
        "hidden_size": values.get("embedding_length"),
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": values["attention.head_count"],
        "num_key_value_heads": values["attention.head_count_kv"],
        "head_dim": values.get("attention.key_length"),
        "hidden_act": "silu",
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.get("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
    }
    if settings["head_dim"] is None:
        # Qwen3 means 128 where Hugging Face's file leaves it out; a GGUF file means the quotient.
        hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int) and heads:
            settings["head_dim"] = hidden // heads
    settings["rope_parameters"] = _rope_parameters(source, values, settings["head_dim"])
    return {key: value for key, value in settings.items() if value is not None}


def _same_in_all_layers(key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(f"{key} must be the same in all layers, got {value}")
    return value[0]


def _eos_token_ids(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """Return the end of a text and, where the file tells it apart, the end of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = list(dict.fromkeys(metadata[key] for key in keys if key in metadata))
    return ids[0] if len(ids) == 1 else ids or None


def _rope_parameters(
    source: GGUFFile, values: Mapping[str, Any], head_dim: int | None
) -> dict[str, Any]:
    theta = values.get("rope.freq_base", 10000.0)
    rotated = values.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"rope.dimension_count must be the head's {head_dim}, got {rotated}")
    kind = values.get("rope.scaling.type", "none")
    if _ROPE_FACTORS in source.tensors:
        return _llama3_parameters(source, theta, head_dim)
    if kind == "linear":
        factor = values.get("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise CheckpointError(f"rope.scaling.type must be none or linear, got {kind!r}")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_parameters(source: GGUFFile, theta: float, head_dim: int | None) -> dict[str, Any]:
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
    if head_dim is not None and factors.shape == (head_dim // 2,):
        rope = RopeParameters.from_huggingface(parameters)
        plain = inverse_frequencies(RopeParameters(rope.theta), head_dim)
        expected = (plain / inverse_frequencies(rope, head_dim)).numpy()
        if np.allclose(factors, expected, rtol=1e-5):
            return parameters
    raise CheckpointError(f"{_ROPE_FACTORS} must hold the factors of Llama 3, which it does not")
