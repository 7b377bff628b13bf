"""The errors of kvruntime, each one sentence for a person at a terminal.

::

    KVRuntimeError
    ├── CheckpointError        (ValueError)         a checkpoint that cannot be used
    │   └── CheckpointNotFound (FileNotFoundError)  nothing is there, or a file of it is missing
    ├── EngineBusy             (RuntimeError)       as many requests wait as may wait
    ├── EngineFailed           (RuntimeError)       the engine failed while it served a request
    ├── EngineUnavailable      (RuntimeError)       the engine takes no requests now
    ├── InvalidRequest         (ValueError)         a prompt or a setting that cannot be served
    ├── MissingDependency      (ImportError)        an optional package is not installed
    └── ServerError            (ConnectionError)    a server does not answer, or not as it should

This module knows names and meanings only; what is wrong is said where it is found.
"""

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "EngineBusy",
    "EngineFailed",
    "EngineUnavailable",
    "InvalidRequest",
    "KVRuntimeError",
    "MissingDependency",
    "ServerError",
]


class KVRuntimeError(Exception):
    """Base of every error that kvruntime raises for a caller's input or surroundings."""


class CheckpointError(KVRuntimeError, ValueError):
    """A checkpoint is truncated, mislabelled, or of a kind that is not supported."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file that belongs to it, does not exist."""


class EngineBusy(KVRuntimeError, RuntimeError):
    """A request is refused for now: as many wait as may wait. Later it may be served."""


class EngineFailed(KVRuntimeError, RuntimeError):
    """The engine failed in the midst of a request, and takes no more."""


class EngineUnavailable(KVRuntimeError, RuntimeError):
    """The engine is loading, draining, stopped or failed, so that it takes no request."""


class InvalidRequest(KVRuntimeError, ValueError):
    """A request cannot be served as it is asked."""


class MissingDependency(KVRuntimeError, ImportError):
    """An optional package is needed and not installed."""


class ServerError(KVRuntimeError, ConnectionError):
    """A server that is asked does not answer, or not as its interface promises."""
