"""The shape of a model, read from the `config.json` of Hugging Face.

Knows the four families that share one forward pass (Llama, Qwen2, Qwen3, Mistral), what they
leave out of their files, and what cannot be honoured, which is refused by name. Knows no tensor,
no file and no engine setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvruntime.errors import CheckpointError

__all__ = ["ModelConfig", "RopeParameters"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# A file may claim any number of layers; what is built per layer must stay small before the
# tensors prove the claim.
_MAX_LAYERS = 1024
_MAX_INT = (1 << 63) - 1
_MAX_FLOAT = 1e300


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary position embedding: the base `theta` and how its frequencies are stretched.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is above
    `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor`, and blends in between.
    """

    theta: float
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    @classmethod
    def from_huggingface(cls, mapping: Mapping[str, Any]) -> Self:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
        scaling = mapping.get("rope_parameters") or mapping.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise CheckpointError(f"rope_parameters must be a mapping, got {scaling!r:.40}")
        values = {
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            # transformers fills this in the same way.
            "original_max_position_embeddings": mapping.get("max_position_embeddings"),
            **mapping,
            **scaling,
        }
        if values["partial_rotary_factor"] != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor must be 1, got {values['partial_rotary_factor']!r:.40}"
            )
        theta = _positive_float(values, "rope_theta")
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type == "default":
            return cls(theta)
        if rope_type == "linear":
            return cls(theta, "linear", _positive_float(values, "factor"))
        if rope_type == "llama3":
            return cls(
                theta,
                "llama3",
                factor=_positive_float(values, "factor"),
                low_freq_factor=_positive_float(values, "low_freq_factor"),
                high_freq_factor=_positive_float(values, "high_freq_factor"),
                original_max_position_embeddings=_positive_int(
                    values, "original_max_position_embeddings"
                ),
            )
        raise CheckpointError(f"rope_type must be default, linear or llama3, got {rope_type!r:.40}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass and the cache need to know about a model.

    `sliding_windows` has one entry a layer: None for full attention, or W, where a token attends
    to W keys including its own. `eos_token_ids` end a text; `bos_token_id` may be None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def kv_bytes_per_token(self, itemsize: int = 4) -> int:
        """Return the bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_huggingface(
        cls, mapping: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> Self:
        """Read the contents of `config.json` and, where there is one, `generation_config.json`.

        The end-of-text tokens of `generation` come before those of `mapping`, as in transformers.

        Raises:
            CheckpointError: naming the family, the missing key or the setting not supported.
        """
        family = mapping.get("model_type")
        if family not in _FAMILIES:
            raise CheckpointError(
                f"model_type must be one of {', '.join(_FAMILIES)}, got {family!r:.40}"
            )
        _refuse_unsupported(mapping)
        num_layers = _positive_int(mapping, "num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise CheckpointError(
                f"num_hidden_layers must be at most {_MAX_LAYERS}, got {num_layers}"
            )
        hidden_size = _positive_int(mapping, "hidden_size")
        num_heads = _positive_int(mapping, "num_attention_heads")
        num_kv_heads = _positive_int(mapping, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                "num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {num_heads} and {num_kv_heads}"
            )
        head_dim = _head_dim(mapping, hidden_size, num_heads)
        eos = (generation or {}).get("eos_token_id")
        return cls(
            architecture=family,
            vocab_size=_positive_int(mapping, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(mapping, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float({"rms_norm_eps": 1e-6, **mapping}, "rms_norm_eps"),
            rope=RopeParameters.from_huggingface(mapping),
            max_position_embeddings=_positive_int(mapping, "max_position_embeddings"),
            tie_word_embeddings=bool(mapping.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(family, mapping, num_layers),
            eos_token_ids=_token_ids(mapping.get("eos_token_id") if eos is None else eos),
            bos_token_id=next(iter(_token_ids(mapping.get("bos_token_id"))), None),
        )


def _positive_int(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = mapping.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the model's configuration has no {key}")
    if type(value) is not int or not 1 <= value <= _MAX_INT:
        raise CheckpointError(f"{key} must be a positive integer, got {value!r:.40}")
    return value


def _positive_float(mapping: Mapping[str, Any], key: str) -> float:
    value: Any = mapping.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < _MAX_FLOAT:
        raise CheckpointError(f"{key} must be a positive number, got {value!r:.40}")
    return float(value)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int and 0 <= item <= _MAX_INT for item in ids):
        raise CheckpointError(f"token ids must be non-negative integers, got {value!r:.40}")
    return tuple(ids)


def _head_dim(mapping: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if mapping.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            "hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"got {hidden_size} and {num_heads}"
        )
    # Qwen3 is the one family whose head_dim is not hidden_size / num_heads when left out.
    implied = 128 if mapping["model_type"] == "qwen3" else hidden_size // num_heads
    head_dim = _positive_int(mapping, "head_dim", default=implied)
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even, got {head_dim}")
    return head_dim


def _sliding_windows(
    family: str, mapping: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window by the family's own rule."""
    if family == "llama":
        return (None,) * num_layers
    # Left out is not the same as null: both families then mean 4096.
    window = mapping.get("sliding_window", 4096)
    if family != "mistral" and not mapping.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * num_layers
    window = _positive_int({"sliding_window": window}, "sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    layer_types = mapping.get("layer_types")
    if layer_types is None:
        first = mapping.get("max_window_layers", 28)
        if type(first) is not int:
            raise CheckpointError(f"max_window_layers must be an integer, got {first!r:.40}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or (
        len(layer_types) != num_layers or not all(kind in [*kinds] for kind in layer_types)
    ):
        raise CheckpointError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {layer_types!r:.200}"
        )
    return tuple(kinds[kind] for kind in layer_types)


def _refuse_unsupported(mapping: Mapping[str, Any]) -> None:
    """Refuse what would otherwise load and give wrong text."""
    activation = mapping.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act must be silu, got {activation!r:.40}")
    for key in ("attention_bias", "mlp_bias"):
        if mapping.get(key):
            raise CheckpointError(f"{key} must be false, got {mapping[key]!r:.40}")
    quantization = mapping.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"quantised Hugging Face checkpoints are not supported, got quant_method {method!r:.40}; "
            "a GGUF file may be quantised"
        )
