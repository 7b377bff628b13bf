"""Paged attention kernels with one API, for CPU arrays by Numba."""

from kvkernels._version import __version__
from kvkernels.attention import paged_attention
from kvkernels.cache import copy_blocks, write_kv
from kvkernels.cpu.threads import get_num_threads, set_num_threads
from kvkernels.errors import (
    ArgumentError,
    ArrayError,
    DtypeError,
    KVKernelsError,
    PoolIndexError,
    ShapeError,
)
from kvkernels.reference import paged_attention_reference

__all__ = [
    "ArgumentError",
    "ArrayError",
    "DtypeError",
    "KVKernelsError",
    "PoolIndexError",
    "ShapeError",
    "__version__",
    "copy_blocks",
    "get_num_threads",
    "paged_attention",
    "paged_attention_reference",
    "set_num_threads",
    "write_kv",
]
