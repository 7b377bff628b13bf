"""What a model keeps of each token, from its Hugging Face config.json.

Reads one file by its fields, not by the name of its model: heads shared by groups (GQA, MQA), latents
(MLA), windows, layers that differ, layers without keys and values, a language model inside a larger one.
What it cannot read is an error that says so, never a guess.

Knows what fields mean. Does not know weights, tensor parallelism, an engine's own padding, or caches that
are no keys and values: states of linear attention and the keys of a sparse-attention index are named in
`notes`, and not counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvblocks.config_fields import (
    Fields,
    first,
    has,
    mapping,
    optional_count,
    optional_width,
    per_layer,
    width,
)
from kvblocks.errors import InvalidModelConfig
from kvblocks.files import read_text
from kvblocks.layer_kinds import LayerKind, layer_kinds
from kvblocks.units import shorten

_NESTED = (
    "text_config",
    "llm_config",
    "language_config",
    "decoder",
    "thinker_config",
    "text_model",
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_KV_HEAD_LISTS = ("num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")

_REFUSED = {
    "is_encoder_decoder": "what cross-attention keeps does not grow with a model's own tokens",
    "compress_rates": "what compressed attention keeps is not known here",
    "loop_num_passes": "what layers keep that run several times is not known here",
    "n_recurrent_loops": "what layers keep that run several times is not known here",
}
# What files of these models leave to their class.
_DEFAULTS: dict[str, Fields] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_bigcode": {"multi_query": True},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}


class LayerCache(NamedTuple):
    """What one layer keeps of a token, and of how many tokens."""

    num_kv_heads: int
    key_dim: int
    value_dim: int  # 0 where one latent stands for both
    window: int | None = None  # None keeps every token

    @property
    def elements_per_token(self) -> int:
        """Numbers, whatever their dtype."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are one latent (MLA)."""
        return self.value_dim == 0


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The layers that keep keys and values."""

    model_type: str
    num_layers: int  # with those that keep nothing
    layers: tuple[LayerCache, ...]
    dtype: str | None  # as the file names it
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[LayerCache, int]:
        """How many layers there are of each kind, in the order of their first."""
        return dict(Counter(self.layers))

    def bytes_per_token(self, bytes_per_element: int) -> int:
        """What one token takes in all layers, while none has left it behind."""
        return bytes_per_element * sum(layer.elements_per_token for layer in self.layers)


def read_model_config(path: str) -> ModelCache:
    """Read a config.json. `UnreadableFile`, and `InvalidModelConfig` which names the file."""
    try:
        fields = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidModelConfig(f"{path} is no JSON: {error}") from error
    try:
        return model_cache(mapping(fields, "a model's config"))
    except InvalidModelConfig as error:
        raise InvalidModelConfig(f"{path}: {error}") from error


def model_cache(fields: Mapping[str, Any]) -> ModelCache:
    """What a config, as a mapping, says. `InvalidModelConfig`.

    >>> model_cache(
    ...     {
    ...         "num_hidden_layers": 32,
    ...         "num_attention_heads": 32,
    ...         "num_key_value_heads": 8,
    ...         "hidden_size": 4096,
    ...         "torch_dtype": "bfloat16",
    ...     }
    ... ).kinds
    {LayerCache(num_kv_heads=8, key_dim=128, value_dim=128, window=None): 32}
    """
    dtype: str | None = None
    inner: str | None = ""
    while inner is not None:
        for name, why in _REFUSED.items():
            if fields.get(name):
                raise InvalidModelConfig(f"{name} is set: {why}")
        named = first(fields, "dtype", "torch_dtype")
        dtype = dtype if named is None else str(fields[named])
        inner = next((name for name in _NESTED if isinstance(fields.get(name), dict)), None)
        fields = fields if inner is None else fields[inner]
    model_type = str(fields.get("model_type", "unknown"))
    fields = {**_DEFAULTS.get(model_type, {}), **fields}
    if has(fields, "state_size") and not has(fields, "num_attention_heads"):
        raise InvalidModelConfig(
            "state_size without num_attention_heads: a state is no key and value"
        )
    kinds = layer_kinds(fields)
    layers = tuple(
        _layer(own, kind)
        for own, kind in zip(_own_fields(fields, kinds), kinds, strict=True)
        if kind.keeps
    )
    if not layers:
        raise InvalidModelConfig(f"none of the {len(kinds)} layers keeps keys and values")
    return ModelCache(model_type, len(kinds), layers, dtype, tuple(_notes(fields, kinds)))


def _own_fields(fields: Fields, kinds: list[LayerKind]) -> Iterator[Fields]:
    """The fields as each layer sees them: what differs from layer to layer, put in their place."""
    num_layers = len(kinds)
    own: list[dict[str, Any]] = [{} for _ in kinds]
    for kind, changes in zip(kinds, own, strict=True):
        changes.update(_of_kind(fields, kind))
    name = next((name for name in _KV_HEAD_LISTS if isinstance(fields.get(name), list)), None)
    if name is not None:
        for changes, heads in zip(own, per_layer(fields, name, num_layers), strict=True):
            changes["num_key_value_heads"] = heads
    if has(fields, "block_configs"):
        for changes, block in zip(own, per_layer(fields, "block_configs", num_layers), strict=True):
            changes.update(_of_block(fields, block["attention"]))
    for layer, changed in mapping(fields.get("per_layer_config") or {}, "per_layer_config").items():
        if not str(layer).isdecimal() or int(layer) >= num_layers:
            raise InvalidModelConfig(
                f"per_layer_config must name layers 0 to {num_layers - 1}, got {shorten(layer)}"
            )
        own[int(layer)].update(mapping(changed, "per_layer_config"))
    return ({**fields, **changes} for changes in own)


def _of_kind(fields: Fields, kind: LayerKind) -> Iterator[tuple[str, Any]]:
    """MiMo and Inkling give layers with a window other shapes, Gemma 4 gives them to full ones."""
    if kind.window is not None:
        names = {
            "swa_num_key_value_heads": "num_key_value_heads",
            "swa_head_dim": "head_dim",
            "swa_v_head_dim": "v_head_dim",
        }
    else:
        names = {"global_head_dim": "head_dim"}
        if fields.get("attention_k_eq_v"):
            names["num_global_key_value_heads"] = "num_key_value_heads"
    return ((ours, fields[theirs]) for theirs, ours in names.items() if has(fields, theirs))


def _of_block(fields: Fields, attention: Fields) -> Iterator[tuple[str, Any]]:
    """DeciLM: heads of one layer, themselves or as the size of a group."""
    if has(attention, "num_key_value_heads"):
        yield "num_key_value_heads", attention["num_key_value_heads"]
    elif has(attention, "n_heads_in_group"):
        size = width(attention, "n_heads_in_group")
        yield (
            "num_key_value_heads",
            _divided(_num_heads(fields), "the number of heads", size, "n_heads_in_group"),
        )


def _layer(fields: Fields, kind: LayerKind) -> LayerCache:
    if has(fields, "kv_lora_rank") and fields.get("use_mla", True):
        # The part with rotary positions is shared by all heads; a model may have none.
        rotary = optional_count(fields, "qk_rope_head_dim")
        return LayerCache(1, width(fields, "kv_lora_rank") + rotary, 0, kind.window)
    key_dim = optional_width(fields, *_HEAD_DIM)
    if key_dim is None:
        hidden = first(fields, *_HIDDEN)
        if hidden is None:
            names = ", ".join(_HEAD_DIM + _HIDDEN)
            raise InvalidModelConfig(f"the dimension of a head is missing: none of {names}")
        key_dim = _divided(width(fields, hidden), hidden, _num_heads(fields), "heads")
    value_dim = optional_width(fields, "v_head_dim") or key_dim
    return LayerCache(_num_kv_heads(fields), key_dim, value_dim, kind.window)


def _num_kv_heads(fields: Fields) -> int:
    # Falcon's newer models have groups, and leave multi_query as it was.
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    if fields.get("multi_query_attention"):  # ChatGLM
        return width(fields, "multi_query_group_num")
    attention = fields.get("attn_config")  # MPT and DBRX
    if isinstance(attention, dict) and has(attention, "kv_n_heads"):
        return width(attention, "kv_n_heads")
    return optional_width(fields, *_KV_HEADS) or _num_heads(fields)


def _num_heads(fields: Fields) -> int:
    name = first(fields, *_HEADS)
    if name is None:
        raise InvalidModelConfig(f"the number of heads is missing: none of {', '.join(_HEADS)}")
    return width(fields, name)


def _divided(value: int, name: str, by: int, by_name: str) -> int:
    if value % by:
        raise InvalidModelConfig(f"{name} must be a multiple of {by_name}, got {value} and {by}")
    return value // by


def _notes(fields: Fields, kinds: list[LayerKind]) -> Iterator[str]:
    num_without = sum(not kind.keeps for kind in kinds)
    if num_without:
        yield (
            f"{num_without} of {len(kinds)} layers keep no keys and values of their own; states that "
            "they may keep instead are not counted"
        )
    if has(fields, "cross_attention_layers"):
        yield "what cross_attention_layers keep of pictures is not counted"
    if has(fields, "index_head_dim"):
        yield "the keys of the sparse-attention index are not counted"
    if fields.get("num_nextn_predict_layers"):
        yield "layers that only predict further tokens (num_nextn_predict_layers) are not counted"
