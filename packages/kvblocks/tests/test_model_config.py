"""Hugging Face config files as they lie on the hub, each with what one token of it is known to take."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.errors import InvalidModelConfig, KVBlocksError, UnreadableFile
from kvblocks.model_config import LayerCache, model_cache, read_model_config

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
# The fields that matter here, written as the models' own files write them.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3 8B": (LLAMA_3_8B, 131_072),
    "Llama 2 7B, without groups": (
        {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        524_288,
    ),
    "GPT-2": ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 36_864),
    "StarCoder, one head for all": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144},
        20_480,
    ),
    "Falcon 7B, one head for all": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        8_192,
    ),
    "Falcon 40B": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        122_880,
    ),
    "MPT 7B": ({"n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {}}, 524_288),
    "DBRX": (
        {"n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
        163_840,
    ),
    "ChatGLM3": (
        {
            "num_layers": 28,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "hidden_size": 4096,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        28_672,
    ),
    "Qwen3 0.6B, a head wider than its share": (
        {
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "hidden_size": 1024,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
        },
        114_688,
    ),
    "DeepSeek V3, latents": (
        {
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "hidden_size": 7168,
        },
        70_272,
    ),
    "Jamba, 4 of 32 layers": (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
        },
        16_384,
    ),
    "Qwen3-Next, 12 of 48 layers": (
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
        },
        24_576,
    ),
    "Nemotron-H, stars are attention": (
        {
            "hybrid_override_pattern": "M-M-M*-M-M*-",
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        2 * 4_096,
    ),
    "MiniMax-Text-01, every eighth layer": (
        {
            "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        10 * 4_096,
    ),
    "Kimi Linear, latents in 2 of 6 layers": (
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hidden_size": 2304,
            "linear_attn_config": {"full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5]},
        },
        2 * 1_152,
    ),
    "LFM2, attention by number": (
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "hidden_size": 1024,
            "full_attn_idxs": [2, 5],
        },
        2 * 2_048,
    ),
    "OpenELM, heads that differ": (
        {
            "num_transformer_layers": 3,
            "num_kv_heads": [3, 4, 5],
            "num_query_heads": [12, 16, 20],
            "head_dim": 64,
            "model_dim": 1280,
        },
        (3 + 4 + 5) * 256,
    ),
    "DeciLM, groups that differ": (
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "hidden_size": 8192,
            "block_configs": [
                {"attention": {"n_heads_in_group": 8, "no_op": False}},
                {"attention": {"n_heads_in_group": None, "no_op": True}},
                {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
                {"attention": {"num_key_value_heads": 4}},
            ],
        },
        (8 + 4) * 512,
    ),
    "Gemma 3n, the last layers share": (
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 512,
        },
        2 * 2_048,
    ),
    "sources of keys and values": (
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 64,
            "kv_source_layers": [0, 1, 0, 1],
        },
        2 * 2_048,
    ),
    "LongCat-Flash, two attentions a layer": (
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hidden_size": 6144,
        },
        56 * 1_152,
    ),
    "Llama 3.2 Vision, without what pictures keep": (
        {
            "text_config": {
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
                "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            }
        },
        32 * 4_096,
    ),
    "a language model in a thinker": (
        {
            "thinker_config": {"text_config": {**LLAMA_3_8B, "torch_dtype": None}},
            "dtype": "bfloat16",
        },
        131_072,
    ),
    "keys wider than values": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
        },
        2 * 4 * (192 + 128) * 2,
    ),
    "latents without a rotary part": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 0,
        },
        2 * 1024,
    ),
    "latents that are switched off": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "hidden_size": 512,
            "kv_lora_rank": 512,
            "use_mla": False,
        },
        2 * 2048,
    ),
    "one layer that differs": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "head_dim": 64,
            "per_layer_config": {"1": {"head_dim": 128}},
        },
        2048 + 4096,
    ),
    "a layer more than it has, for predicting further": (
        {
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "head_dim": 64,
            "layer_types": ["full_attention", "full_attention"],
        },
        2048,
    ),
    "a list of layers instead of their number": (
        {
            "num_attention_heads": 8,
            "head_dim": 64,
            "layers_block_type": ["mamba", "full_attention", "mlp"],
        },
        2048,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_token_takes_what_the_model_is_known_for(name: str) -> None:
    fields, num_bytes = FILES[name]
    assert model_cache(fields).bytes_per_token(2) == num_bytes


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
# What each layer keeps: a number of tokens, None for all.
WINDOWS: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "Mistral 7B v0.1": ({"num_hidden_layers": 3, "sliding_window": 4096}, [4096] * 3),
    "Mistral 7B v0.3": ({"num_hidden_layers": 3, "sliding_window": None}, [None] * 3),
    "Qwen2, switched off": (
        {
            "num_hidden_layers": 3,
            "sliding_window": 131_072,
            "use_sliding_window": False,
            "max_window_layers": 2,
        },
        [None] * 3,
    ),
    "Qwen2, not switched on": (
        {"num_hidden_layers": 3, "sliding_window": 131_072, "max_window_layers": 2},
        [None] * 3,
    ),
    "Qwen2, switched on": (
        {
            "num_hidden_layers": 3,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        [None, None, 4096],
    ),
    "Gemma 2, whose file has no pattern": (
        {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 4096},
        [4096, None, 4096, None],
    ),
    "Gemma 3, inside a larger model, with little written": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 8,
                "sliding_window": 1024,
            },
        },
        [1024] * 5 + [None] + [1024] * 2,
    ),
    "gpt-oss": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
        },
        [128, None, 128, None],
    ),
    "EXAONE 4": (
        {"num_hidden_layers": 5, "sliding_window_pattern": "LLLG", "sliding_window": 4096},
        [4096, 4096, 4096, None, 4096],
    ),
    "Cohere 2": (
        {"model_type": "cohere2", "num_hidden_layers": 4},
        [4096, 4096, 4096, None],
    ),
    "Llama 4, chunks": (
        {"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": []},
        [8192, 8192, 8192, None],
    ),
    "Llama 4, layer by layer": (
        {"num_hidden_layers": 3, "attention_chunk_size": 512, "no_rope_layers": [1, 0, 1]},
        [512, None, 512],
    ),
    "chunks in every layer": ({"num_hidden_layers": 2, "attention_chunk_size": 512}, [512, 512]),
    "RecurrentGemma": (
        {
            "num_hidden_layers": 5,
            "block_types": ["recurrent", "recurrent", "attention"],
            "attention_window_size": 2048,
        },
        [2048],
    ),
    "blocks that repeat, without a window": (
        {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
        [None, None],
    ),
    "AFMoE": (
        {"num_hidden_layers": 4, "global_attn_every_n_layers": 4, "sliding_window": 1024},
        [1024, 1024, 1024, None],
    ),
    "MiMo": (
        {"num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "sliding_window_size": 128},
        [None, 128, 128],
    ),
    "a window in a block": (
        {
            "num_hidden_layers": 2,
            "block_configs": [
                {"attention": {"n_heads_in_group": 4, "window_length": 8192}},
                {"attention": {"n_heads_in_group": 4}},
            ],
        },
        [8192, None],
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_layer_keeps_what_its_window_says(name: str) -> None:
    fields, windows = WINDOWS[name]
    if "text_config" not in fields:
        fields = {**HEADS, **fields}
    assert [layer.window for layer in model_cache(fields).layers] == windows


def test_layers_with_a_window_may_have_heads_of_their_own() -> None:
    cache = model_cache(
        {
            **HEADS,
            "num_hidden_layers": 2,
            "hybrid_layer_pattern": [0, 1],
            "sliding_window": 128,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 96,
        }
    )
    assert cache.layers == (LayerCache(2, 64, 64), LayerCache(8, 192, 96, 128))


def test_full_layers_may_have_heads_of_their_own() -> None:
    fields = {
        **HEADS,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
    }
    assert model_cache(fields).layers == (LayerCache(2, 64, 64, 128), LayerCache(2, 512, 512))
    shared = model_cache({**fields, "attention_k_eq_v": True})
    assert shared.layers == (LayerCache(2, 64, 64, 128), LayerCache(1, 512, 512))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({}, None),
        ({"torch_dtype": None}, None),
    ],
)
def test_the_dtype_is_what_the_file_names(fields: dict[str, Any], dtype: str | None) -> None:
    assert model_cache({**HEADS, "num_hidden_layers": 1, **fields}).dtype == dtype


def test_the_dtype_may_stand_outside_of_the_language_model() -> None:
    inner = {**HEADS, "num_hidden_layers": 1}
    assert model_cache({"torch_dtype": "bfloat16", "text_config": inner}).dtype == "bfloat16"


STATES = "states that they may keep instead are not counted"


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (
            {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
            f"1 of 2 layers keep no keys and values of their own; {STATES}",
        ),
        ({"index_head_dim": 128}, "the keys of the sparse-attention index are not counted"),
        (
            {"num_nextn_predict_layers": 1},
            "layers that only predict further tokens (num_nextn_predict_layers) are not counted",
        ),
        (
            {"cross_attention_layers": []},
            "what cross_attention_layers keep of pictures is not counted",
        ),
    ],
)
def test_what_is_not_counted_is_noted(fields: dict[str, Any], note: str) -> None:
    assert model_cache({**HEADS, "num_hidden_layers": 1, **fields}).notes == (note,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the number of layers is missing: none of num_hidden_layers, n_layers,"),
        ({"num_hidden_layers": 2}, "the dimension of a head is missing: none of head_dim,"),
        ({**HEADS, "layer_types": []}, "the number of layers must be a whole number in [1, 65536]"),
        ({"num_hidden_layers": 2, "head_dim": 64}, "the number of heads is missing: none of num_"),
        (
            {"num_hidden_layers": 2, "hidden_size": 100, "num_attention_heads": 12},
            "hidden_size must be a multiple of heads, got 100 and 12",
        ),
        (
            {**HEADS, "num_hidden_layers": 0},
            "num_hidden_layers must be a whole number in [1, 65536], got 0",
        ),
        (
            {**HEADS, "num_hidden_layers": 10**12},
            "num_hidden_layers must be a whole number in [1, 65536], got 1000000000000",
        ),
        ({**HEADS, "num_hidden_layers": True}, "num_hidden_layers must be a whole number in [1, "),
        ({**HEADS, "num_hidden_layers": "32"}, "num_hidden_layers must be a whole number in [1, "),
        ({**HEADS, "num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number in [1, "),
        (
            {"num_hidden_layers": 1, "head_dim": 64, "num_key_value_heads": "x" * 99},
            f"num_key_value_heads must be a whole number in [1, 2147483647], got '{'x' * 56}...",
        ),
        (
            {**HEADS, "num_hidden_layers": 3, "layer_types": ["full_attention"]},
            "layer_types must have an entry for each of 3 layers, got 1",
        ),
        ({**HEADS, "num_hidden_layers": 3, "layer_types": "full"}, "layer_types must be a list, "),
        (
            {**HEADS, "num_hidden_layers": 1, "layer_types": ["psychic_attention"]},
            "layer_types names a layer 'psychic_attention'; known are attention, chunked_attention,",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "layer_types": [["full_attention"]]},
            "layer_types must name its layers, got ['full_attention']",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "a layer of sliding_attention needs a size: none of sliding_window, sliding_window_size",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "hybrid_override_pattern": ""},
            "a pattern of layers must not be empty",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "hybrid_override_pattern": ["M"]},
            "hybrid_override_pattern must be a string, got ['M']",
        ),
        (
            {**HEADS, "hybrid_override_pattern": "M*?"},
            "hybrid_override_pattern names a layer '?'; known are",
        ),
        ({**HEADS, "layer_types": 7}, "layer_types must be a list, got 7"),
        (
            {**HEADS, "num_hidden_layers": 1, "attn_type_list": [2]},
            "attn_type_list must name its layers, got 2",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "attn_layer_indices": None},
            "none of the 1 layers keeps keys and values",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "per_layer_config": {"1": {}}},
            "per_layer_config must name layers 0 to 0, got '1'",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "per_layer_config": {"0": 3}},
            "per_layer_config must be an object, got 3",
        ),
        (
            {**HEADS, "num_hidden_layers": 1, "block_configs": [3]},
            "block_configs must be an object, got 3",
        ),
        (
            {"num_hidden_layers": 1, "head_dim": 8, "num_attention_heads": 9, "block_configs": [
                {"attention": {"n_heads_in_group": 2}}
            ]},
            "the number of heads must be a multiple of n_heads_in_group, got 9 and 2",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "num_kv_shared_layers": 2},
            "none of the 2 layers keeps keys and values",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "full_attn_idxs": [2]},
            "full_attn_idxs must be a whole number in [0, 1], got 2",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "linear_attn_config": {"full_attn_layers": [0]}},
            "full_attn_layers must be a whole number in [1, 2], got 0",
        ),
        (
            {**HEADS, "num_hidden_layers": 2, "multi_query_attention": True},
            "multi_query_group_num must be a whole number in [1, 2147483647], got None",
        ),
        (
            {"is_encoder_decoder": True},
            "is_encoder_decoder is set: what cross-attention keeps does not grow with",
        ),
        ({"compress_rates": {"a": 4}}, "compress_rates is set: what compressed attention keeps is"),
        (
            {"num_hidden_layers": 48, "state_size": 16},
            "state_size without num_attention_heads: a state is no key and value",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelConfig) as caught:
        model_cache(fields)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, KVBlocksError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("", "is no JSON: Expecting value"),
        ("[" * 200_000, "is no JSON: "),
        ("[1]", "a model's config must be an object, got [1]"),
        (
            '{"num_hidden_layers": NaN}',
            "num_hidden_layers must be a whole number in [1, 65536], got",
        ),
    ],
)
def test_a_file_that_is_no_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidModelConfig) as caught:
        read_model_config(str(path))
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_file_is_read_with_a_byte_order_mark_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B), "utf-8-sig")
    assert read_model_config(str(path)).bytes_per_token(2) == 131_072


@pytest.mark.parametrize("name", ["missing.json", "", "nul\0l.json"])
def test_a_file_that_cannot_be_opened_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"cannot be read"):
        read_model_config(str(tmp_path / name))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UnreadableFile, match="cannot be read as text") as caught:
        read_model_config(str(path))
    assert isinstance(caught.value, OSError)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.sampled_from(["full_attention", "sliding_attention", "M*", "LG", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["attention", "n_heads_in_group", "full_attn_layers", "0", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
NAMES = sorted({name for fields, _ in [*FILES.values(), *WINDOWS.values()] for name in fields})


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(list(FILES.values())),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_whatever_a_file_says_it_is_read_or_refused(
    file: tuple[dict[str, Any], int], changes: dict[str, Any]
) -> None:
    try:
        cache = model_cache({**file[0], **changes})
    except InvalidModelConfig:
        return
    assert cache.bytes_per_token(2) > 0
