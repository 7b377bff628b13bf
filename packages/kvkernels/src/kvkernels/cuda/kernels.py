"""Which kernel serves which shapes: names of specialisations, their files and their resources.

It knows the templates' parameters and not what they compute. Nothing here touches a GPU.
"""

from dataclasses import dataclass

# The names of dtypes, and the types of the sources.
TYPES = {
    "float32": "float",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3": "e4m3",
    "int8": "int8",
}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

# Bits of FEATURES in params.cuh.
SOFTCAP, ALIBI, MANY_ROWS, TOKEN_SCALES, WHOLE_TILES = 1, 2, 4, 8, 16

_SHARED_FILES = ("params.cuh", "attention.cuh")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel: a name expression of a template, and what a launch of it needs."""

    expression: str
    files: tuple[str, ...]  # of the sources, after device.cuh
    params: str  # the struct that it takes
    threads: int
    shared_bytes: int = 0


PLAN = Kernel("plan_batch", (*_SHARED_FILES, "plan.cuh"), "PlanParams", 256)


def can_use_tensor_cores(query: str, cache: str, head_dim: int) -> bool:
    """Whether the fast kernels serve these dtypes and this head dimension."""
    is_pair = query in {"bfloat16", "float16"} and cache in {query, "float8_e4m3", "int8"}
    return is_pair and head_dim % 16 == 0 and 16 <= head_dim <= 256


def attend_split(query: str, cache: str, head_dim: int, tiles: int, features: int) -> Kernel:
    """Attention split over the context, for sequences with few rows (split.cuh)."""
    pitch = head_dim + 4
    return Kernel(
        f"attend_split<{TYPES[query]}, {TYPES[cache]}, {head_dim}, {tiles}, {features}u>",
        (*_SHARED_FILES, "fragments.cuh", "split.cuh"),
        "AttentionParams",
        128,
        4 * 8 * tiles * (pitch * 4 + 8),
    )


def merge_splits(query: str) -> Kernel:
    """The merge of partial results, in order (split.cuh)."""
    files = (*_SHARED_FILES, "fragments.cuh", "split.cuh")
    return Kernel(f"merge_splits<{TYPES[query]}>", files, "AttentionParams", 128)


def attend_prefill(query: str, cache: str, head_dim: int, features: int) -> Kernel:
    """Attention tiled over the rows, for sequences with many rows (prefill.cuh)."""
    is_long = head_dim > 128
    keys, pieces = 32 if is_long else 64, head_dim * ITEMSIZE[cache] // 16
    parked_queries = 64 * head_dim * 2 if is_long else 0
    return Kernel(
        f"attend_prefill<{TYPES[query]}, {TYPES[cache]}, {head_dim}, {features}u>",
        (*_SHARED_FILES, "fragments.cuh", "prefill.cuh"),
        "AttentionParams",
        128,
        2 * keys * (pieces | 1) * 16 + parked_queries,
    )


def attend_generic(query: str, cache: str, features: int) -> Kernel:
    """Attention for every pair of dtypes and any head dimension up to 256 (generic.cuh)."""
    return Kernel(
        f"attend_generic<{TYPES[query]}, {TYPES[cache]}, {features}u>",
        (*_SHARED_FILES, "generic.cuh"),
        "AttentionParams",
        128,
    )


# Bits of FEATURES of writing, and the limits of one launch, in params.cuh.
ROTARY, OWN_SCALES = 1, 2
MAX_CACHES, MAX_COPIES, MAX_STATES = 128, 128, 16
_CACHE_FILES = (*_SHARED_FILES, "cache.cuh")


def write_tokens(new: str, cache: str, features: int) -> Kernel:
    """The write of new tokens into their slots (cache.cuh)."""
    expression = f"write_tokens<{TYPES[new]}, {TYPES[cache]}, {features}u>"
    return Kernel(expression, _CACHE_FILES, "WriteParams", 128)


def copy_tokens(num_bytes: int) -> Kernel:
    """Copies of blocks in pieces of so many bytes: 16, 2 or 1 (cache.cuh)."""
    return Kernel(f"copy_tokens<{num_bytes}>", _CACHE_FILES, "CopyParams", 128)


def merge_results(dtype: str) -> Kernel:
    """The merge of results over disjoint keys (cache.cuh)."""
    return Kernel(f"merge_results<{TYPES[dtype]}>", _CACHE_FILES, "MergeParams", 128)


# The specialisations that are tuned and whose registers are watched; all other shapes share their text.
TUNED = (
    PLAN,
    merge_splits("bfloat16"),
    *(attend_split("bfloat16", "bfloat16", dim, 1, WHOLE_TILES) for dim in (64, 128)),
    attend_split("float16", "float16", 128, 1, WHOLE_TILES),
    attend_split("bfloat16", "bfloat16", 128, 2, WHOLE_TILES | MANY_ROWS),
    attend_split("bfloat16", "float8_e4m3", 128, 1, WHOLE_TILES),
    attend_split("bfloat16", "int8", 128, 1, WHOLE_TILES | TOKEN_SCALES),
    attend_split("bfloat16", "int8", 128, 2, 31),
    *(attend_prefill("bfloat16", "bfloat16", dim, 0) for dim in (64, 128, 256)),
    attend_prefill("bfloat16", "float8_e4m3", 128, 0),
    attend_prefill("bfloat16", "int8", 128, TOKEN_SCALES),
    attend_prefill("bfloat16", "bfloat16", 128, SOFTCAP | ALIBI),
    attend_generic("float32", "float32", 0),
    write_tokens("bfloat16", "bfloat16", 0),
    write_tokens("bfloat16", "float8_e4m3", ROTARY | OWN_SCALES),
    copy_tokens(16),
    merge_results("bfloat16"),
)
