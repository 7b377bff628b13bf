"""A small transformer engine on paged memory: start with `LLM`."""

from kvruntime._version import __version__
from kvruntime.engine import Engine, EngineConfig, EngineStats
from kvruntime.errors import (
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    KVRuntimeError,
    MissingDependency,
)
from kvruntime.llm import LLM
from kvruntime.request import CompletionOutput, FinishReason, Request, RequestOutput
from kvruntime.sampling_params import SamplingParams
from kvruntime.weights import Checkpoint, load_checkpoint

__all__ = [
    "LLM",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "InvalidRequest",
    "KVRuntimeError",
    "MissingDependency",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "load_checkpoint",
]
