"""GGUF files: what they convert to, and what each damaged or foreign one is told."""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from kvruntime.config import RopeParameters
from kvruntime.errors import CheckpointError, KVRuntimeError, MissingDependency
from kvruntime.models.rope import inverse_frequencies
from kvruntime.weights import load_checkpoint

hf: Any = transformers
hf_gguf: Any = modeling_gguf_pytorch_utils
TinyCheckpoint = Callable[[str], Path]
WriteGGUF = Callable[..., Path]

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral"]


def write_value(key: str, value: Any) -> Callable[[Any], object]:
    """Return a change of the metadata, by the writer's own method where there is one."""

    def change(writer: Any) -> None:
        for table in writer.kv_data:
            table.pop(key, None)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)

    return change


@pytest.mark.parametrize("name", FAMILIES)
def test_the_converted_model_is_the_one_that_was_written(
    name: str, tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    expected = load_checkpoint(tiny_checkpoint(name))
    path = write_gguf(tiny_checkpoint(name), tmp_path / "tiny.gguf")
    actual = load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert actual.name == "tiny"
    assert set(actual.tensors) == set(expected.tensors)
    for key, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[key], tensor), key
    same = ("hidden_size", "head_dim", "num_layers", "num_kv_heads", "rope", "qk_norm", "qkv_bias")
    for field in (*same, "tie_word_embeddings", "eos_token_ids", "bos_token_id", "vocab_size"):
        assert getattr(actual.config, field) == getattr(expected.config, field), field
    assert actual.config.rms_norm_eps == pytest.approx(expected.config.rms_norm_eps)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_tensors_are_those_that_transformers_reads(
    name: str,
    quantization: str,
    tiny_checkpoint: TinyCheckpoint,
    write_gguf: WriteGGUF,
    tmp_path: Path,
) -> None:
    path = write_gguf(tiny_checkpoint(name), tmp_path / "a.gguf", quantization=quantization)
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(name))
    expected = hf_gguf.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    actual = load_checkpoint(path, cache_dir=tmp_path / "cache").tensors
    assert set(actual) == set(expected["tensors"])
    for key, tensor in expected["tensors"].items():
        assert torch.equal(actual[key], tensor), key


def test_transformers_opens_the_converted_folder(
    tiny_checkpoint: TinyCheckpoint,
    reference_logits: Callable[[Path, list[int]], torch.Tensor],
    write_gguf: WriteGGUF,
    tmp_path: Path,
) -> None:
    original = tiny_checkpoint("llama")
    load_checkpoint(write_gguf(original, tmp_path / "a.gguf"), cache_dir=tmp_path / "cache")
    (converted,) = (tmp_path / "cache").iterdir()
    with safetensors.safe_open(converted / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    prompt = list(range(10, 40))
    # The epsilon of the norms is a float32 in a GGUF file.
    torch.testing.assert_close(
        reference_logits(converted, prompt), reference_logits(original, prompt), rtol=0, atol=1e-5
    )
    messages = [{"role": "user", "content": "What is it?"}]
    tokenizer, before = (hf.AutoTokenizer.from_pretrained(f) for f in (converted, original))
    assert tokenizer("What is it?").input_ids == before("What is it?").input_ids
    assert tokenizer.apply_chat_template(messages) == before.apply_chat_template(messages)


def llama3_factors(factor: float, theta: float) -> Any:
    """Return what llama.cpp's converter writes for a Llama 3 model with heads of 16."""
    quotients = []
    for frequency in theta ** -(np.arange(0, 16, 2) / 16):
        wavelength = 2 * np.pi / frequency
        smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        quotients.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(quotients, dtype=np.float32)


def test_llama3_rope_is_recovered_from_its_factors(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    factors = llama3_factors(32.0, 500000.0)
    path = write_gguf(
        tiny_checkpoint("llama"),
        tmp_path / "a.gguf",
        metadata=write_value("llama.rope.freq_base", 500000.0),
        edit=lambda tensors: tensors.update({"rope_freqs.weight": factors}),
    )
    rope = load_checkpoint(path, cache_dir=tmp_path / "cache").config.rope
    assert rope == RopeParameters(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(RopeParameters(500000.0), 16)
    np.testing.assert_allclose(plain / inverse_frequencies(rope, 16), factors, rtol=1e-5)


def test_linear_rope_is_kept(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    def scale(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf", metadata=scale)
    rope = load_checkpoint(path, cache_dir=tmp_path / "cache").config.rope
    assert rope == RopeParameters(10000.0, "linear", 4.0)


def test_the_end_of_a_turn_ends_a_text_too(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    path = write_gguf(
        tiny_checkpoint("llama"), tmp_path / "a.gguf", metadata=lambda w: w.add_eot_token_id(1)
    )
    config = load_checkpoint(path, cache_dir=tmp_path / "cache").config
    assert config.eos_token_ids == (2, 1)


def add_tensor(name: str) -> dict[str, Any]:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = np.arange(1, 9, dtype=np.float32)

    return {"edit": edit}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metadata": write_value("general.architecture", "falcon")},
            "general.architecture must be one of llama, qwen2, qwen3, got 'falcon'",
        ),
        (
            {"metadata": write_value("tokenizer.ggml.model", "llama")},
            "tokenizer.ggml.model must be gpt2 (byte-level BPE), got 'llama'",
        ),
        (
            {"pre": "deepseek-llm"},
            "tokenizer.ggml.pre must be one of default, gpt-2, llama-bpe, qwen2, smollm, got 'de",
        ),
        (
            {"metadata": write_value("llama.rope.scaling.type", "yarn")},
            "llama.rope.scaling.type must be none or linear, got 'yarn'",
        ),
        (
            {"metadata": write_value("llama.rope.dimension_count", 8)},
            "llama.rope.dimension_count must be the head's 16, got 8",
        ),
        (
            {"metadata": write_value("llama.attention.value_length", 8)},
            "llama.attention.value_length must be the head's 16, got 8",
        ),
        (
            {"metadata": write_value("llama.attention.sliding_window", 8)},
            "llama.attention.sliding_window must be absent or 0, for a GGUF file does not say which",
        ),
        (
            {"metadata": write_value("llama.attention.head_count", [4, 2])},
            "llama.attention.head_count must be the same in all layers, got [4, 2]",
        ),
        (
            {"metadata": write_value("llama.block_count", 3)},
            "tensor model.layers.2.input_layernorm.weight is missing",
        ),
        (
            {"metadata": write_value("llama.feed_forward_length", 96)},
            "tensor model.layers.0.mlp.gate_proj.weight must have the shape [96, 64]",
        ),
        (
            {"metadata": write_value("tokenizer.ggml.eos_token_id", 400)},
            "tokenizer.ggml.eos_token_id must be less than the 400 tokens, got 400",
        ),
        (
            {"metadata": write_value("tokenizer.ggml.tokens", ["a", "b", "a"])},
            "tokenizer.ggml.tokens must be distinct and at least one, got 3 with 2 distinct",
        ),
        (
            {"metadata": write_value("tokenizer.ggml.merges", ["sand wich"])},
            "tokenizer.ggml.merges must be pairs of tokens that make a token, got 'sand wich'",
        ),
        (
            {"metadata": write_value("llama.context_length", "long")},
            "llama.context_length must be a positive integer, got 'long'",
        ),
        (
            {"metadata": write_value("general.architecture", [1, 2])},
            "general.architecture must be of type str, got [1, 2]",
        ),
        (
            {"metadata": write_value("tokenizer.ggml.tokens", [1, 2])},
            "tokenizer.ggml.tokens must hold str only, got 1",
        ),
        (add_tensor("rope_freqs.weight"), "rope_freqs.weight must hold the factors of Llama 3"),
        (add_tensor("blk.0.ffn_gate_exps.weight"), "belongs to no architecture that is supported"),
        (
            {"edit": lambda tensors: tensors.pop("token_embd.weight")},
            "tensor token_embd.weight is missing",
        ),
    ],
)
def test_a_foreign_file_is_refused_by_name_and_leaves_nothing(
    changes: dict[str, Any],
    message: str,
    tiny_checkpoint: TinyCheckpoint,
    write_gguf: WriteGGUF,
    tmp_path: Path,
) -> None:
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{path}: ")
    assert list((tmp_path / "cache").iterdir()) == []


def header(*fields: tuple[str, int]) -> bytes:
    """Return the magic and numbers, each given with its struct type."""
    sizes = {"u4": 4, "u8": 8}
    numbers = [value.to_bytes(sizes[kind], "little") for kind, value in fields]
    return b"GGUF" + b"".join(numbers)


EMPTY = [("u4", 3), ("u8", 0), ("u8", 0)]
# A nameless tensor: one dimension of one float32 at the beginning of the data.
ONE_VALUE = [("u8", 0), ("u4", 1), ("u8", 1), ("u4", 0), ("u8", 0)]
ONE_TENSOR = [("u4", 3), ("u8", 1), ("u8", 0), ("u8", 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it does not begin with GGUF"),
        (b"PK\x03\x04 a zip file by another name", "is not a GGUF file: it does not begin"),
        (b"GGUF", "is truncated: its header needs 4 bytes at byte 4, the file ends at 4"),
        (header(("u4", 1), ("u8", 0), ("u8", 0)), "the GGUF version must be 2 or 3, got 1"),
        (header(("u4", 3), ("u8", 0), ("u8", 1 << 62)), "is truncated: its header needs 8 bytes"),
        (header(("u4", 3), ("u8", 1 << 62), ("u8", 0)), "is truncated: its header needs 8 bytes"),
        (header(*EMPTY), "general.architecture must be one of llama, qwen2, qwen3, got None"),
        (
            # A text of 2**62 bytes.
            header(("u4", 3), ("u8", 0), ("u8", 1), ("u8", 1 << 62)),
            "is truncated: its header needs 4611686018427387904 bytes at byte 32",
        ),
        (
            # An array of 2**62 numbers, and one of as many texts.
            header(*EMPTY[:2], ("u8", 1), ("u8", 0), ("u4", 9), ("u4", 4), ("u8", 1 << 62)),
            "is truncated: its header needs 18446744073709551616 bytes",
        ),
        (
            header(*EMPTY[:2], ("u8", 1), ("u8", 0), ("u4", 9), ("u4", 8), ("u8", 1 << 62)),
            "is truncated: its header needs 8 bytes",
        ),
        (
            header(*EMPTY[:2], ("u8", 1), ("u8", 0), ("u4", 13), ("u8", 0)),
            "is of the unknown value type 13",
        ),
        (header(*ONE_TENSOR, ("u4", 5)), "must have 1 to 4 dimensions, got 5"),
        (
            header(*ONE_TENSOR, ("u4", 1), ("u8", 0), ("u4", 0), ("u8", 0)),
            "has an empty dimension",
        ),
        (
            header(*ONE_TENSOR, ("u4", 1), ("u8", 8), ("u4", 4), ("u8", 0)),
            "is of the unknown quantisation type 4",
        ),
        (
            header(*ONE_TENSOR, ("u4", 1), ("u8", 8), ("u4", 2), ("u8", 0)),
            "must be a multiple of 32 values as Q4_0, got 8",
        ),
        (
            header(*ONE_TENSOR, ("u4", 1), ("u8", 1 << 60), ("u4", 0), ("u8", 0)),
            "is truncated: tensor '' ends at byte",
        ),
        (
            header(("u4", 3), ("u8", 2), ("u8", 0), *2 * ONE_VALUE) + bytes(64),
            "names a tensor twice",
        ),
    ],
)
def test_a_damaged_header_is_refused_with_one_sentence(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_truncated_file_is_refused(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    whole = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    generator = random.Random(0)  # noqa: S311 - the same in every run
    for length in sorted({1, 5, len(whole) - 1, *generator.sample(range(len(whole)), 60)}):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"is truncated|is not a GGUF file"):
            load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_flipped_byte_of_the_header_is_refused_or_harmless(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    whole = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf").read_bytes()
    end = whole.index(b"output_norm.weight") + 64
    path = tmp_path / "flipped.gguf"
    generator = random.Random(0)  # noqa: S311 - the same in every run
    for _ in range(150):
        position = generator.randrange(end)
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        try:
            load_checkpoint(path, cache_dir=tmp_path / "cache")
        except KVRuntimeError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either outcome is right


def test_an_undequantisable_type_is_named(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf")
    content = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    # The type stands behind the name, the number of dimensions and the one dimension.
    position = content.index(name) + len(name) + 4 + 8
    assert content[position : position + 4] == bytes(4)
    content[position] = gguf.GGMLQuantizationType.I32
    path.write_bytes(content)
    message = "tensor 'output_norm.weight' is stored as I32, which cannot be dequantised"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_block_of_any_bits_is_dequantised_without_a_warning(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama")
    path = write_gguf(folder, tmp_path / "a.gguf", quantization="Q8_0")
    offset = int(gguf.GGUFReader(path).tensors[0].data_offset)
    content = bytearray(path.read_bytes())
    content[offset : offset + 34] = b"\x00\x7c" + bytes(32)  # infinity times zero
    path.write_bytes(content)
    tensors = load_checkpoint(path, cache_dir=tmp_path / "cache").tensors
    assert sum(int(tensor.isnan().sum()) for tensor in tensors.values()) == 32


def test_without_the_gguf_package_the_sentence_says_how_to_get_it(
    tiny_checkpoint: TinyCheckpoint,
    write_gguf: WriteGGUF,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kvruntime\[gguf\]'"):
        load_checkpoint(path, cache_dir=tmp_path / "cache")


def test_the_converted_configuration_is_json_of_transformers_5(
    tiny_checkpoint: TinyCheckpoint, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    path = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "a.gguf")
    load_checkpoint(path, cache_dir=tmp_path / "cache")
    (converted,) = (tmp_path / "cache").iterdir()
    settings = json.loads((converted / "config.json").read_text())
    assert settings["architectures"] == ["Qwen3ForCausalLM"]
    assert hf.AutoConfig.from_pretrained(converted).rope_parameters["rope_theta"] == 10000.0
