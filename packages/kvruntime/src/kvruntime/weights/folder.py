"""Reading a Hugging Face folder: `config.json` and the tensors of its safetensors files.

Knows the layout of the folder, one file or shards with an index, and holds it against what the
model needs before a byte of a weight is read. Knows nothing of the tokenizer beside them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from kvruntime.config import ModelConfig
from kvruntime.errors import CheckpointError, CheckpointNotFound
from kvruntime.json_files import read_object
from kvruntime.models import tensor_shapes
from kvruntime.weights.safetensors_header import read_header

__all__ = ["check_shapes", "read_config", "read_tensors"]

_MAX_NAME = 63  # characters, at most four bytes each: no file system refuses such a name


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` where there is one.

    Raises:
        CheckpointNotFound: there is no `config.json`.
        CheckpointError: it is not JSON, or describes a model that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFound(f"{folder} is no Hugging Face folder: it has no config.json")
    generation = folder / "generation_config.json"
    try:
        return ModelConfig.from_huggingface(
            read_object(path), read_object(generation) if generation.is_file() else None
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensors(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read the tensors that `config` needs, as float32; what is float32 already is only mapped.

    Raises:
        CheckpointNotFound: a file is missing.
        CheckpointError: a file is damaged, or a tensor is missing, unexpected, of another shape
            or of a type that is not supported.
    """
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    headers = {path: read_header(path) for path in _files(folder)}
    for header in headers.values():
        shapes |= {name: stored.shape for name, stored in header.items()}
    needed = check_shapes(config, shapes, folder)
    for path, header in headers.items():
        reader = _open(path)
        for name in needed.intersection(header):
            tensors[name] = reader.get_tensor(name).to(torch.float32)
    return tensors


def check_shapes(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> frozenset[str]:
    """Return the names the model needs, having found each in `shapes` and nothing it would lack.

    Raises:
        CheckpointError: naming the first tensor that is missing, unexpected or of another shape.
    """
    needed = set()
    for name, shape in tensor_shapes(config):
        if name not in shapes:
            raise CheckpointError(f"{source}: tensor {name} is missing")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {name} must have the shape {list(shape)} by its configuration, "
                f"got {list(shapes[name])}"
            )
        needed.add(name)
    for name in shapes:
        if name not in needed and not _is_ignorable(name, config):
            raise CheckpointError(
                f"{source}: tensor {name!r:.80} does not belong to a model of type {config.architecture}"
            )
    return frozenset(needed)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that is not needed leaves the result as it is."""
    # Old checkpoints store what follows from the configuration; some store a tied head twice.
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} must hold a weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = ["model.safetensors"]
    for name in names:
        if Path(name).name != name or len(name) > _MAX_NAME:
            raise CheckpointError(f"{index} must name files of its own folder, got {name!r:.80}")
        if not (folder / name).is_file():
            raise CheckpointNotFound(f"{folder} has no {name}")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    """Open a safetensors file whose header has been read."""
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error})") from error
