"""A small transformer engine on paged memory: start with `LLM`.

A public name is imported from its module when it is first asked for: what needs no model, as
`kvruntime --help` and the errors, does not wait for torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from kvruntime._version import __version__

if TYPE_CHECKING:
    from kvruntime.answer_stream import AnswerStream, Delta
    from kvruntime.async_llm import AsyncLLM
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
        ServerError,
    )
    from kvruntime.llm import LLM
    from kvruntime.observer import Observer
    from kvruntime.request import CompletionOutput, Event, FinishReason, Request, RequestOutput
    from kvruntime.sampler import TokenLogprobs
    from kvruntime.sampling_params import BeamSearchParams, SamplingParams
    from kvruntime.stats import EngineStats
    from kvruntime.steps import StepRecord
    from kvruntime.structured_outputs import StructuredOutputsParams
    from kvruntime.weights import Checkpoint, load_checkpoint

_HOMES = {
    "answer_stream": ["AnswerStream", "Delta"],
    "async_llm": ["AsyncLLM"],
    "engine": ["Engine"],
    "engine_config": ["EngineConfig"],
    "errors": [
        "CheckpointError",
        "CheckpointNotFound",
        "EngineBusy",
        "EngineFailed",
        "EngineUnavailable",
        "InvalidRequest",
        "KVRuntimeError",
        "MissingDependency",
        "ServerError",
    ],
    "llm": ["LLM"],
    "observer": ["Observer"],
    "request": ["CompletionOutput", "Event", "FinishReason", "Request", "RequestOutput"],
    "sampler": ["TokenLogprobs"],
    "sampling_params": ["BeamSearchParams", "SamplingParams"],
    "stats": ["EngineStats"],
    "steps": ["StepRecord"],
    "structured_outputs": ["StructuredOutputsParams"],
    "weights": ["Checkpoint", "load_checkpoint"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # with it, any misspelt name would be one to a type checker

    def __getattr__(name: str) -> object:
        """Import a public name when it is first asked for."""
        if name not in _HOME:
            raise AttributeError(f"module 'kvruntime' has no attribute {name!r}")
        value = getattr(_import_module(f"kvruntime.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Name what is public, imported or not."""
        return sorted({*globals(), *__all__})


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
    "ServerError",
    "StepRecord",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "__version__",
    "load_checkpoint",
]
