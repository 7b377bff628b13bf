"""What went wrong with paged attention elsewhere, restated as batches on the fiber GPU."""

import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvkernels.cuda import plan

from .cases import Array, Case, encode
from .device_gpu import DeviceGPU
from .host_gpu import HostGPU

# Anonymous memory that costs only what is touched (MAP_NORESERVE).
_NORESERVE = 0x4000


def _spread(cache: Array, table: Array, num_blocks: int) -> tuple[Array, Array]:
    """Move blocks of a small pool to both ends of one that is mostly untouched memory."""
    shape = (num_blocks, *cache.shape[1:])
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, int(np.prod(shape)) * cache.itemsize, flags=flags)
    pool = np.frombuffer(memory, cache.dtype).reshape(shape)
    moved = table.copy()
    for n, (s, i) in enumerate(np.argwhere(table < len(cache))):
        moved[s, i] = n // 2 if n % 2 else num_blocks - 1 - n // 2
        pool[moved[s, i]] = cache[table[s, i]]
    return pool, moved


@pytest.mark.parametrize(
    "case",
    [
        Case([70, 33], cache="bfloat16", chunk=32),
        Case([70, 33], cache="float8_e4m3"),
        Case([70, 33], [40, 33]),
        Case([70, 33], query="float32", cache="float32"),
    ],
    ids=["split", "split-8-bit", "prefill", "generic"],
)
def test_offsets_beyond_2_to_32_items_are_read_as_in_a_small_pool(gpu: HostGPU, case: Case) -> None:
    if isinstance(gpu, DeviceGPU):
        pytest.skip("the pools are memory of the host that is hardly ever touched")
    expected = case.run(gpu)[0]
    items = int(np.prod(case.arrays["k_cache"].shape[1:]))
    num_blocks = (2**32 + 2**20) // items
    table = case.arrays["block_table"]
    for name in ("k_cache", "v_cache"):
        case.arrays[name], moved = _spread(case.arrays[name], table, num_blocks)
    case.arrays["block_table"] = moved
    assert np.array_equal(case.run(gpu)[0], expected)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 71])
def test_every_size_of_group_is_that_of_float64(gpu: HostGPU, group: int) -> None:
    Case([0, 17, 40], group=group, num_kv_heads=1, head_dim=16).check(gpu)


@pytest.mark.parametrize("num_splits", range(1, 9))
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3"])
def test_a_sink_is_counted_once_whatever_the_number_of_splits(
    gpu: HostGPU, cache: str, num_splits: int
) -> None:
    scales: dict[str, Any] = {} if cache == "bfloat16" else {"k_scale": 0.25, "v_scale": 0.5}
    Case([32 * num_splits], cache=cache, chunk=32, has_sinks=True, **scales).check(gpu)


def test_rows_of_padding_read_no_table_and_leave_the_others_alone(gpu: HostGPU) -> None:
    padded = Case([0, 33, 0, 0])
    padded.arrays["block_table"][[0, 2, 3]] = -1
    out, lse = padded.run(gpu)
    alone = Case([33])
    alone.arrays |= {name: padded.arrays[name] for name in ("k_cache", "v_cache")}
    alone.arrays["q"] = padded.arrays["q"][1:2]
    alone.arrays["block_table"] = padded.arrays["block_table"][1:2]
    assert np.array_equal(out[1], alone.run(gpu)[0][0])
    assert (out[[0, 2, 3]] == 0).all()
    assert (lse[[0, 2, 3]] == -np.inf).all()


def test_a_row_does_not_depend_on_its_batch_mates_or_their_order(gpu: HostGPU) -> None:
    lengths = [130, 5, 64, 200]
    batch = Case(lengths, chunk=64)
    expected = batch.run(gpu)[0]
    for order in ([3, 1, 0, 2], [2, 0], [1]):
        other = Case([lengths[s] for s in order], chunk=64)
        other.arrays |= {name: batch.arrays[name] for name in ("k_cache", "v_cache")}
        for name in ("q", "block_table", "seq_lens"):
            other.arrays[name] = batch.arrays[name][order]
        assert np.array_equal(other.run(gpu)[0], expected[order])


def test_the_workspace_holds_any_batch_within_its_limits_and_is_at_most_twice_what_one_needs(
    gpu: HostGPU,
) -> None:
    rng = np.random.default_rng(0)
    for seed in range(6):
        batch = int(rng.integers(1, 9))
        lengths = rng.integers(0, 200, batch).tolist()
        # Case.check looks at the red zone behind the workspace.
        Case(lengths, chunk=[None, 32, 64][seed % 3], seed=seed).check(gpu)
    full = plan.PlanSize(8, 8, 512, 4, 2, 64, has_many_rows=False, chunk=64, num_blocks=6)
    needed = 8 * 8 * 4 * (64 + 1) * 4  # splits, columns over all heads, results and their lse
    assert needed <= full.num_bytes <= 2 * needed


def test_one_size_of_plan_serves_shrinking_and_growing_batches_on_a_scribbled_workspace(
    gpu: HostGPU,
) -> None:
    largest = Case([200, 130, 90], chunk=64)
    expected: dict[tuple[int, ...], Array] = {}
    for lengths in ([200, 130, 90], [1, 0, 64], [150, 3, 17], [0, 0, 0], [200, 130, 90]):
        largest.arrays["seq_lens"] = np.array(lengths, np.int32)
        replayed = replace(largest, seq_lens=lengths, arrays={})
        replayed.arrays = largest.arrays
        out, _ = replayed.run(gpu)
        want, _ = replayed.reference()
        assert np.linalg.norm(out - want) <= 6e-3 * (np.linalg.norm(want) or 1.0)
        again = expected.setdefault(tuple(lengths), out)
        assert np.array_equal(out, again)


def test_a_key_of_negative_infinity_or_a_huge_score_gives_no_nan(gpu: HostGPU) -> None:
    case = Case([40], head_dim=16)
    case.arrays["q"] = encode(np.full(case.arrays["q"].shape, 1e4), "bfloat16")
    out, lse = case.run(gpu)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
