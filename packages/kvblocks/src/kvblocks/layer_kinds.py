"""Which layers of a model keep keys and values, and for how long: the many ways config files say it.

| a layer | keeps | as files say it |
|---|---|---|
| full attention | every token | nothing, or `full_attention`, `attention`, `global`, `hybrid` |
| sliding window | the last `sliding_window` tokens | `layer_types`, `sliding_window_pattern`, `max_window_layers`, ... |
| chunked | at most `attention_chunk_size` tokens | `layer_types`, `no_rope_layers` |
| linear attention, state space, convolution, MLP | nothing a token | `layer_types`, `hybrid_override_pattern`, `attn_layer_period`, ... |
| sharing another's cache | nothing of its own | `num_kv_shared_layers`, `kv_source_layers` |

Knows field names and their order of precedence. Does not know heads, dimensions or bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvblocks.config_fields import (
    MAX_LAYERS,
    Fields,
    as_width,
    first,
    has,
    items,
    layer_numbers,
    mapping,
    optional_count,
    optional_width,
    per_layer,
    width,
)
from kvblocks.errors import InvalidModelConfig
from kvblocks.units import shorten


class LayerKind(NamedTuple):
    """Whether a layer keeps keys and values, and how many of the last tokens at most."""

    keeps: bool
    window: int | None = None  # None keeps every token


FULL = LayerKind(keeps=True)
NONE = LayerKind(keeps=False)

_FULL = {
    "attention",
    "full",
    "full_attention",
    "global",
    "global_attention",
    "hybrid",
    "indexed_attention",
}
_SLIDING = {
    "hybrid_sliding",
    "local",
    "local_attention",
    "reference_sliding_attention",
    "sliding",
    "sliding_attention",
    "swa",
}
_CHUNKED = {"chunked_attention"}
_NOTHING = {"conv", "linear", "linear_attention", "mamba", "mamba2", "mlp", "moe", "recurrent"}
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers")
_LISTS = ("layer_types", "layers_block_type", "attention_layers")


def layer_kinds(fields: Fields) -> list[LayerKind]:
    """One kind a layer. `InvalidModelConfig` for what contradicts itself or is not known.

    >>> layer_kinds({"num_hidden_layers": 3, "sliding_window": 512, "sliding_window_pattern": 3})
    [LayerKind(keeps=True, window=512), LayerKind(keeps=True, window=512), LayerKind(keeps=True, window=None)]
    """
    num_layers = _num_layers(fields)
    kinds = next(found for read in _READERS if (found := read(fields, num_layers)) is not None)
    return _without_shared(fields, kinds)


def _num_layers(fields: Fields) -> int:
    name = first(fields, *_LAYERS)
    if name is not None:
        # LongCat-Flash has two attentions in what it calls a layer.
        each = 2 if fields.get("model_type") == "longcat_flash" and name == "num_layers" else 1
        return each * width(fields, name, MAX_LAYERS)
    # Nemotron-H gives nothing but the list or the pattern.
    if isinstance(fields.get("hybrid_override_pattern"), str):
        kinds = len(fields["hybrid_override_pattern"].replace("|", ""))
    elif name := first(fields, *_LISTS):
        kinds = len(items(fields, name))
    else:
        raise InvalidModelConfig(f"the number of layers is missing: none of {', '.join(_LAYERS)}")
    return as_width(kinds, "the number of layers", MAX_LAYERS)


# ── readers, the most explicit first: each answers None where its fields are not there ───────────


def _of_block_configs(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """DeciLM and Nemotron-NAS: a block by itself may have attention, something linear, or nothing."""
    if not has(fields, "block_configs"):
        return None
    kinds = []
    for block in per_layer(fields, "block_configs", num_layers):
        attention = mapping(mapping(block, "block_configs").get("attention"), "attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            kinds.append(NONE)
        elif has(attention, "window_length"):
            kinds.append(LayerKind(True, width(attention, "window_length")))
        else:
            kinds.append(FULL)
    return kinds


def _of_list(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """A name a layer."""
    name = first(fields, *_LISTS)
    if name is None:
        return None
    return [_named(fields, name, kind) for kind in per_layer(fields, name, num_layers)]


def _of_cycle(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """RecurrentGemma's `block_types`, and letters: EXAONE's "LLLG", Nemotron-H's "M-M*-"."""
    if has(fields, "block_types"):
        kinds = [_named(fields, "block_types", kind) for kind in items(fields, "block_types")]
        # Attention is local in these models: the window goes without saying.
        window = optional_width(fields, "attention_window_size")
        kinds = [LayerKind(kind.keeps, window if kind.keeps else None) for kind in kinds]
    elif isinstance(fields.get("sliding_window_pattern"), str):
        kinds = _of_letters(fields, "sliding_window_pattern", {"L": "sliding", "G": "full"})
    elif has(fields, "hybrid_override_pattern"):
        letters = {"*": "full", "M": "mamba", "-": "mlp", "E": "moe"}
        kinds = _of_letters(fields, "hybrid_override_pattern", letters)
    else:
        return None
    if not kinds:
        raise InvalidModelConfig("a pattern of layers must not be empty")
    return [kinds[layer % len(kinds)] for layer in range(num_layers)]


def _of_numbers(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """MiniMax's `attn_type_list` (1 is attention), MiMo's `hybrid_layer_pattern` (1 is a window)."""
    for name, zero, one in (
        ("attn_type_list", "linear", "full"),
        ("hybrid_layer_pattern", "full", "sliding"),
    ):
        if has(fields, name):
            values = per_layer(fields, name, num_layers)
            names = [one if value == 1 else zero if value == 0 else value for value in values]
            return [_named(fields, name, kind) for kind in names]
    return None


def _of_indices(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """The numbers of the layers that have attention; the others keep nothing."""
    for name in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        if has(fields, name):
            return _where(layer_numbers(fields, name, num_layers), num_layers, FULL, NONE)
    if "attn_layer_indices" in fields:  # Bamba: null is no layer
        return [NONE] * num_layers
    if has(fields, "linear_attn_config"):  # Kimi Linear counts from 1
        linear = mapping(fields["linear_attn_config"], "linear_attn_config")
        full = layer_numbers(linear, "full_attn_layers", num_layers, first_layer=1)
        return _where(full, num_layers, FULL, NONE)
    if has(fields, "cross_attention_layers"):  # Mllama: these attend to a picture
        cross = layer_numbers(fields, "cross_attention_layers", num_layers)
        return _where(cross, num_layers, NONE, FULL)
    return None


def _of_period(fields: Fields, num_layers: int) -> list[LayerKind] | None:
    """One layer in every so many has full attention."""
    if has(fields, "attn_layer_period"):  # Jamba
        period = width(fields, "attn_layer_period")
        offset = optional_count(fields, "attn_layer_offset")
        return [FULL if layer % period == offset else NONE for layer in range(num_layers)]
    for name, others in (
        ("full_attention_interval", "linear"),
        ("layer_group_size", "linear"),
        ("global_attn_every_n_layers", "sliding"),
    ):
        if has(fields, name):
            kind = _named(fields, name, others)
            return _every(num_layers, width(fields, name), kind)
    return None


def _of_window(fields: Fields, num_layers: int) -> list[LayerKind]:
    """One window for all layers, or for those that a pattern or `max_window_layers` says."""
    if has(fields, "attention_chunk_size"):
        return _of_chunks(fields, num_layers)
    # Where `max_window_layers` stands, a window must be switched on; elsewhere it can be switched off.
    is_used = fields.get("use_sliding_window", not has(fields, "max_window_layers"))
    if not is_used or first(fields, *_WINDOWS) is None:
        return [FULL] * num_layers
    sliding = _named(fields, "sliding_window", "sliding")
    pattern = first(fields, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        return _every(num_layers, width(fields, pattern), sliding)
    num_full = optional_count(fields, "max_window_layers")
    return [FULL if layer < num_full else sliding for layer in range(num_layers)]


def _of_chunks(fields: Fields, num_layers: int) -> list[LayerKind]:
    """Llama 4: layers with rotary positions see their chunk, the others everything."""
    chunked = _named(fields, "attention_chunk_size", "chunked_attention")
    if fields.get("no_rope_layers"):
        rotary = per_layer(fields, "no_rope_layers", num_layers)
        return [chunked if has_rope else FULL for has_rope in rotary]
    if has(fields, "no_rope_layer_interval"):
        return _every(num_layers, width(fields, "no_rope_layer_interval"), chunked)
    return [chunked] * num_layers


_READERS: tuple[Callable[[Fields, int], list[LayerKind] | None], ...] = (
    _of_block_configs,
    _of_list,
    _of_cycle,
    _of_numbers,
    _of_indices,
    _of_period,
    _of_window,
)


# ── within ───────────────────────────────────────────────────────────────────────────────────────

_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")


def _named(fields: Fields, source: str, name: object) -> LayerKind:
    if not isinstance(name, str):
        raise InvalidModelConfig(f"{source} must name its layers, got {shorten(name)}")
    if name in _FULL:
        return FULL
    if name in _NOTHING:
        return NONE
    if name in _CHUNKED:
        return _windowed(fields, name, "attention_chunk_size")
    if name in _SLIDING:
        return _windowed(fields, name, *_WINDOWS)
    known = ", ".join(sorted(_FULL | _SLIDING | _CHUNKED | _NOTHING))
    raise InvalidModelConfig(f"{source} names a layer {shorten(name)}; known are {known}")


def _windowed(fields: Fields, name: object, *sizes: str) -> LayerKind:
    size = first(fields, *sizes)
    if size is None:
        raise InvalidModelConfig(f"a layer of {name} needs a size: none of {', '.join(sizes)}")
    return LayerKind(True, width(fields, size))


def _of_letters(fields: Fields, source: str, names: dict[str, str]) -> list[LayerKind]:
    pattern = fields[source]
    if not isinstance(pattern, str):
        raise InvalidModelConfig(f"{source} must be a string, got {shorten(pattern)}")
    return [
        _named(fields, source, names.get(letter, letter)) for letter in pattern if letter != "|"
    ]


def _where(chosen: set[int], num_layers: int, one: LayerKind, other: LayerKind) -> list[LayerKind]:
    return [one if layer in chosen else other for layer in range(num_layers)]


def _every(num_layers: int, period: int, others: LayerKind) -> list[LayerKind]:
    return [others if (layer + 1) % period else FULL for layer in range(num_layers)]


def _without_shared(fields: Fields, kinds: list[LayerKind]) -> list[LayerKind]:
    """Layers that read what another layer keeps."""
    if has(fields, "kv_source_layers"):
        sources = per_layer(fields, "kv_source_layers", len(kinds))
        return [
            kind if source == layer else NONE
            for layer, (kind, source) in enumerate(zip(kinds, sources, strict=True))
        ]
    num_own = len(kinds) - optional_count(fields, "num_kv_shared_layers")
    return [kind if layer < num_own else NONE for layer, kind in enumerate(kinds)]
