"""Loading Hugging Face folders: what is read, and what each damaged one is told."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from kvruntime.errors import CheckpointError, CheckpointNotFound
from kvruntime.weights import load_checkpoint

hf: Any = transformers
TinyCheckpoint = Callable[[str], Path]


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to be damaged."""
    copy: Path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    return copy


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    edit(tensors)
    path.unlink()
    safetensors.torch.save_file(tensors, path)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkpoint_is_named_by_its_folder(folder: Path) -> None:
    assert load_checkpoint(str(folder)).name == "model"


def test_tensors_are_those_that_were_saved(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint("llama")
    expected = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = load_checkpoint(folder).tensors
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_shards_load_as_one_file(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    whole = load_checkpoint(tiny_checkpoint("llama"))
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    sharded = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    tensors = load_checkpoint(sharded).tensors
    assert set(tensors) == set(whole.tensors)
    assert all(torch.equal(tensors[name], whole.tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_to_float32(
    dtype: torch.dtype, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    half = shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "half")
    hf.AutoModelForCausalLM.from_pretrained(half, dtype=dtype).save_pretrained(half)
    stored = safetensors.torch.load_file(half / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    tensors = load_checkpoint(half).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(torch.equal(tensors[name], stored[name].float()) for name in tensors)


def test_a_second_copy_of_a_tied_head_is_left_alone(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    tied = shutil.copytree(tiny_checkpoint("llama-tied"), tmp_path / "tied")
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(400, 64)}))
    assert "lm_head.weight" not in load_checkpoint(tied).tensors


def test_generation_config_is_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_checkpoint(folder).config.eos_token_ids == (1, 2)


def damage(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def sharded_index(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )


HUGE_HEADER = (1 << 62).to_bytes(8, "little") + b"{}"
NOT_JSON_HEADER = (16).to_bytes(8, "little") + b"not a header at " * 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is no Hugging Face folder: it has no config"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: sharded_index(f, "model-1.safetensors"), "has no model-1.safetensors"),
    ],
)
def test_a_missing_file_is_named(
    spoil: Callable[[Path], object], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(CheckpointNotFound, match=re.escape(message)):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: damage(f, "config.json", b"{"), "config.json is not valid JSON"),
        (lambda f: damage(f, "config.json", b"\xff\xfe"), "config.json is not valid JSON"),
        (lambda f: damage(f, "config.json", b"[]"), "config.json must hold an object"),
        (lambda f: damage(f, "config.json", b"{}"), "config.json: model_type must be one of"),
        (lambda f: damage(f, "tokenizer.json", b"{}"), "cannot be read as a tokenizer"),
        (lambda f: damage(f, "tokenizer_config.json", b"}"), "tokenizer_config.json is not valid"),
        (lambda f: damage(f, "tokenizer_config.json", b"3"), "must hold an object"),
        (lambda f: damage(f, "model.safetensors", b""), "is not a whole safetensors file"),
        (lambda f: damage(f, "model.safetensors", b"GGUF" * 9), "is not a whole safetensors file"),
        (lambda f: damage(f, "model.safetensors", HUGE_HEADER), "is not a whole safetensors file"),
        (
            lambda f: damage(f, "model.safetensors", NOT_JSON_HEADER),
            "is not a whole safetensors file",
        ),
        (
            lambda f: damage(f, "model.safetensors", (f / "model.safetensors").read_bytes()[:-1]),
            "is not a whole safetensors file",
        ),
        (
            lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
            "tensor model.norm.weight is missing",
        ),
        (
            lambda f: edit_json(f / "config.json", vocab_size=401),
            "model.embed_tokens.weight must have the shape [401, 64] by its configuration, got [400",
        ),
        (
            lambda f: edit_tensors(
                f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
            ),
            "tensor 'model.layers.0.self_attn.q_proj.bias' does not belong to a model of type llama",
        ),
        (
            lambda f: edit_tensors(
                f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
            ),
            "tensor 'model.norm.weight' must be one of F32, F16, BF16, got I8",
        ),
        (lambda f: sharded_index(f, "../a"), "must name files of its own folder, got '../a'"),
        (
            lambda f: damage(f, "model.safetensors.index.json", b"{}"),
            "model.safetensors.index.json must hold a weight_map",
        ),
    ],
)
def test_a_damaged_folder_is_refused_with_one_sentence(
    spoil: Callable[[Path], object], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_told_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"give 'smollm2', a \.gguf file or a Hugging"):
        load_checkpoint(tmp_path / "nothing")


def test_a_file_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"or a Hugging Face folder, got the file .*config"):
        load_checkpoint(folder / "config.json")
