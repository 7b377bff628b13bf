"""Config files beside transformers: which layers keep what, and how large its own caches grow."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvblocks.errors import InvalidModelConfig
from kvblocks.model_config import ModelCache, model_cache

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
torch = pytest.importorskip("torch", reason="transformers runs on torch")

# Where we know better, or count something else, and why.
OTHERWISE = {
    "gpt_neo": "its local layers look back 256 tokens; transformers keeps all",
    "mllama": "cross-attention keeps pictures, not tokens",
    "unlimited_ocr": "transformers has a cache of its own for it",
}


def configs() -> Iterator[tuple[str, Any]]:
    """The default config of every model that writes text."""
    auto = transformers.models.auto
    names = {
        **auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    for name in sorted(names.keys() - OTHERWISE.keys()):
        try:
            yield name, auto.configuration_auto.CONFIG_MAPPING[name]()
        except Exception as error:  # noqa: BLE001 -- whatever a default config of theirs lacks
            print(f"{name} has no default config: {error!r:.80}")


def windows_of_transformers(config: Any) -> list[int | None]:
    """The windows of the layers that keep keys and values."""
    return [
        layer.sliding_window if layer.is_sliding else None
        for layer in transformers.DynamicCache(config=config).layers
        if hasattr(layer, "is_sliding") and type(layer).__name__ != "DummyLayer"
    ]


def test_layers_keep_what_transformers_keeps() -> None:
    read: list[str] = []
    for name, config in configs():
        # As a file with every field, and as one with what differs from the defaults.
        for is_short in (False, True):
            try:
                cache = model_cache(json.loads(config.to_json_string(use_diff=is_short)))
            except InvalidModelConfig:
                continue
            windows = [layer.window for layer in cache.layers]
            assert windows == windows_of_transformers(config), (name, is_short)
            read.append(name)
    assert len(set(read)) >= 230


TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": {**TINY, "head_dim": 16},
    "gemma3_text": {**TINY, "head_dim": 16, "sliding_window": 32},
    "gpt2": {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "falcon": {**TINY, "multi_query": True},
    "mpt": {"vocab_size": 32, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "gpt_oss": {**TINY, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "jamba": {
        **TINY,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "num_experts": 2,
    },
    "gemma4_text": {
        **TINY,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 0,
    },
    "lfm2": {**TINY, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **TINY,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_what_a_model_of_transformers_puts_into_its_cache(name: str) -> None:
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name](**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_num_threads(1)
    num_tokens = 5
    with torch.no_grad():
        cache = model(torch.ones(1, num_tokens, dtype=torch.long), use_cache=True).past_key_values
    kept = [
        layer.keys.numel() + layer.values.numel()
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]
    ours: ModelCache = model_cache(json.loads(config.to_json_string(use_diff=False)))
    assert [layer.elements_per_token * num_tokens for layer in ours.layers] == kept
