"""Writing keys and values into a paged cache, for one thread. It knows no validation of shapes."""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from typing import Any, TypeAlias

from kvkernels.arrays import Array
from kvkernels.cpu.compiled import compiled
from kvkernels.cpu.signatures import INT, INT64_1D, ints, items

# Scalars are Numba's int64.
Int: TypeAlias = Any


@compiled(INT64_1D, INT)
def find_bad_slot(slot_mapping: Array, num_slots: Int) -> Int:
    """Return the index of the first slot that is neither -1 nor in the pool, or -1."""
    for t in range(slot_mapping.shape[0]):
        if slot_mapping[t] < -1 or slot_mapping[t] >= num_slots:
            return t
    return -1


@compiled(items(), ints(2), items(writable=True), ints(3), INT64_1D, INT, INT, INT)
def write(
    tokens: Array,
    token_strides: tuple[int, ...],
    cache: Array,
    cache_strides: tuple[int, ...],
    slot_mapping: Array,
    num_kv_heads: Int,
    block_size: Int,
    head_dim: Int,
) -> None:
    """Copy each token's heads to its slot of a cache; both arrays are flattened."""
    for t in range(slot_mapping.shape[0]):
        slot = slot_mapping[t]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            source = t * token_strides[0] + head * token_strides[1]
            target = block * cache_strides[0] + head * cache_strides[1] + offset * cache_strides[2]
            cache[target : target + head_dim] = tokens[source : source + head_dim]
