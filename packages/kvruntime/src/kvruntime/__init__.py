"""A small transformer engine on paged memory: start with `LLM`."""

from kvruntime._version import __version__
from kvruntime.answer_stream import AnswerStream, Delta
from kvruntime.async_llm import AsyncLLM, Observer
from kvruntime.engine import Engine
from kvruntime.engine_config import EngineConfig
from kvruntime.errors import (
    CheckpointError,
    CheckpointNotFound,
    EngineBusy,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    KVRuntimeError,
    MissingDependency,
)
from kvruntime.llm import LLM
from kvruntime.request import CompletionOutput, Event, FinishReason, Request, RequestOutput
from kvruntime.sampler import TokenLogprobs
from kvruntime.sampling_params import BeamSearchParams, SamplingParams
from kvruntime.stats import EngineStats
from kvruntime.steps import StepRecord
from kvruntime.weights import Checkpoint, load_checkpoint

__all__ = [
    "LLM",
    "AnswerStream",
    "AsyncLLM",
    "BeamSearchParams",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "EngineUnavailable",
    "Event",
    "FinishReason",
    "InvalidRequest",
    "KVRuntimeError",
    "MissingDependency",
    "Observer",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StepRecord",
    "TokenLogprobs",
    "__version__",
    "load_checkpoint",
]
