"""What `config.json` says, what it leaves out, and what is refused."""

import re
from typing import Any

import pytest

from kvruntime.config import ModelConfig, RopeParameters
from kvruntime.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read(changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_huggingface({**LLAMA, **changes}, generation)


def test_what_is_left_out_has_the_familys_default() -> None:
    assert read({"num_key_value_heads": None}) == ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=160,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeParameters(10000.0),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * 4,
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_qwen3_head_dim_is_128_when_left_out() -> None:
    assert read({"model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"rope_theta": 5e5}, RopeParameters(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeParameters(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeParameters(5e5, "linear", 2.0),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeParameters(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            RopeParameters(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
    ],
)
def test_rope_is_read_as_transformers_4_and_5_write_it(
    written: dict[str, Any], expected: RopeParameters
) -> None:
    assert read(written).rope == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, (None,) * 4),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_each_layers_window_follows_the_familys_rule(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(changes).sliding_windows == windows


def test_generation_config_names_the_end_of_text_where_it_does() -> None:
    assert read({"eos_token_id": 2}).eos_token_ids == (2,)
    assert read({"eos_token_id": [2, 3]}).eos_token_ids == (2, 3)
    assert read({"eos_token_id": 2}, {"eos_token_id": [5, 2]}).eos_token_ids == (5, 2)
    assert read({"eos_token_id": 2}, {"temperature": 0.6}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'",
        ),
        ({"vocab_size": None}, "the model's configuration has no vocab_size"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1024, got 10"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads must be a multiple of num_key_value_heads, got 3 and 2",
        ),
        (
            {"hidden_size": 65, "num_key_value_heads": 4},
            "hidden_size must be a multiple of num_attention_heads where head_dim is not given",
        ),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got 'small'"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be false, got True"),
        ({"mlp_bias": True}, "mlp_bias must be false, got True"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type must be default, linear or llama3, got 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
        ({"rope_scaling": [1]}, "rope_parameters must be a mapping, got [1]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantised Hugging Face checkpoints are not supported, got quant_method 'gptq'",
        ),
        ({"eos_token_id": "</s>"}, "token ids must be non-negative integers, got '</s>'"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 4,
            },
            "layer_types must name full_attention or sliding_attention for each of 4 layers",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(changes)
