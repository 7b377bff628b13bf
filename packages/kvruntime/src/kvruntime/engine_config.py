"""The settings of an engine and its scheduler, and the rules of their values.

Knows what can be chosen. Does not know how a policy works.
"""

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal, get_args

from kvruntime.errors import InvalidRequest

__all__ = [
    "Admission",
    "Attention",
    "Device",
    "EngineConfig",
    "Eviction",
    "KVDtype",
    "Policy",
    "Preemption",
    "SchedulerConfig",
]

Policy = Literal["fcfs", "priority"]
Admission = Literal["prompt", "output"]
Eviction = Literal["before", "after"]
Preemption = Literal["recompute", "swap", "auto"]
KVDtype = Literal["float32", "float16", "bfloat16", "fp8", "int8"]
Attention = Literal["kernels", "sdpa"]
Device = Literal["cpu", "cuda"]

_CHOICES = {
    "policy": get_args(Policy),
    "admission": get_args(Admission),
    "eviction": get_args(Eviction),
    "preemption": get_args(Preemption),
    "kv_dtype": get_args(KVDtype),
    "attention": get_args(Attention),
    "device": get_args(Device),
}
_MAY_BE_ZERO = {"skip_ahead", "log_steps", "num_host_blocks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What decides who runs, and what is done when blocks run short.

    Args:
        max_num_batched_tokens: the budget of tokens a step.
        max_num_seqs: sequences that run at the same time.
        policy: "fcfs" serves first come, first served; "priority" serves the lowest priority value
            first, and preempts the highest first. Nobody is preempted to admit somebody else.
        skip_ahead: how many later requests may be admitted before one that has no room yet.
        admission: "prompt" admits what has room for its prompt; "output" only what has room until
            its `max_tokens`, with everything else that runs, so that nobody is ever preempted.
        eviction: cached blocks are evicted "before" anybody is preempted or deferred, or "after",
            when the request that came first has no other way to go on.
        preemption: "recompute" computes the tokens of who is preempted again; "swap" moves their
            blocks to host memory and back, and recomputes where that is full; "auto" swaps what
            has computed at least one block.
        max_num_waiting: answers that may wait to be admitted; more are refused. None has no limit.
        max_num_waiting_tokens: tokens of prompts that may wait to be admitted; more are refused, unless
            nothing waits. None has no limit.
        log_steps: how many of the last steps the step log keeps.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    policy: Policy = "fcfs"
    skip_ahead: int = 0
    admission: Admission = "prompt"
    eviction: Eviction = "before"
    preemption: Preemption = "recompute"
    max_num_waiting: int | None = None
    max_num_waiting_tokens: int | None = None
    log_steps: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if choices := _CHOICES.get(field.name):
                if value not in choices:
                    names = " or ".join(f'"{choice}"' for choice in choices)
                    raise InvalidRequest(f"{field.name} must be {names}, got {value!r}")
            elif not isinstance(value, bool) and not (value is None and field.default is None):
                _require_integer(field.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """The settings of an engine: those of `SchedulerConfig`, and of its memory.

    Args:
        block_size: tokens a block.
        num_blocks: blocks of the pool; None takes what `kv_memory_bytes` holds.
        kv_memory_bytes: the pool's size where `num_blocks` is None.
        num_host_blocks: blocks of host memory to swap to; None takes as many as the pool has where
            `preemption` swaps, and none where it does not.
        max_model_len: tokens of a prompt and its output; None takes the model's own limit.
        prefix_caching: reuse the blocks of equal prefixes.
        kv_dtype: what keys and values are kept as; "fp8" is float8-e4m3. These and "int8" have a
            scale for each token and head.
        attention: "kernels" reads blocks where they lie; "sdpa" gathers them for torch's attention,
            which is slow, and a check of the kernels.
        device: "cuda" keeps weights and blocks on a GPU, and host blocks in pinned memory.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int = 512 * 2**20
    num_host_blocks: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    kv_dtype: KVDtype = "float32"
    attention: Attention = "kernels"
    device: Device = "cpu"


def _require_integer(name: str, value: object) -> None:
    least = 0 if name in _MAY_BE_ZERO else 1
    if not isinstance(value, Integral) or int(value) < least:
        raise InvalidRequest(f"{name} must be an integer of at least {least}, got {value!r}")
