"""Paged attention kernels with one API, for CPU arrays by Numba."""

from kvkernels._version import __version__
from kvkernels.attention import cascade_attention, paged_attention
from kvkernels.cache import copy_blocks, gather_kv, swap_blocks, write_kv
from kvkernels.capabilities import Support, Warmed, supports, warmup
from kvkernels.cpu.threads import get_num_threads, set_num_threads
from kvkernels.errors import (
    ArgumentError,
    ArrayError,
    DtypeError,
    KVKernelsError,
    PoolIndexError,
    ShapeError,
)
from kvkernels.plans import AttentionPlan, workspace_size
from kvkernels.reference import paged_attention_reference
from kvkernels.states import merge_states

__all__ = [
    "ArgumentError",
    "ArrayError",
    "AttentionPlan",
    "DtypeError",
    "KVKernelsError",
    "PoolIndexError",
    "ShapeError",
    "Support",
    "Warmed",
    "__version__",
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "get_num_threads",
    "merge_states",
    "paged_attention",
    "paged_attention_reference",
    "set_num_threads",
    "supports",
    "swap_blocks",
    "warmup",
    "workspace_size",
    "write_kv",
]
