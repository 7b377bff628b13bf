"""Attention of many rows on the fiber GPU: chunks of prompts, and what they must not change."""

from typing import Any

import numpy as np
import pytest

from .cases import Case
from .host_gpu import HostGPU

TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "e4m3": {"cache": "float8_e4m3"},
    "int8-token-scales": {"cache": "int8", "has_token_scales": True},
    "head-dim-256": {"head_dim": 256, "num_kv_heads": 1},
    "e4m3-head-dim-192": {"cache": "float8_e4m3", "head_dim": 192, "num_kv_heads": 1},
}


@pytest.mark.parametrize("name", TYPES)
def test_a_chunk_at_the_end_of_a_long_context_is_that_of_float64(gpu: HostGPU, name: str) -> None:
    Case([300, 65, 129], [40, 65, 64], **TYPES[name]).check(gpu)


@pytest.mark.parametrize("window_left", [0, 63, 64, 100])
def test_a_window_that_begins_inside_any_tile_is_that_of_float64(
    gpu: HostGPU, window_left: int
) -> None:
    Case([300], [130], window_left=window_left, block_size=24).check(gpu)


@pytest.mark.parametrize("name", ["bfloat16", "int8-token-scales", "head-dim-256"])
def test_a_prompt_in_chunks_is_the_prompt_at_once_to_the_last_bit(gpu: HostGPU, name: str) -> None:
    whole = Case([150], [150], **TYPES[name])
    expected, expected_lse = whole.run(gpu)
    for end in (50, 90, 150):
        begin = {50: 0, 90: 50, 150: 90}[end]
        chunk = Case([end], [end - begin], **TYPES[name])
        chunk.arrays |= {key: whole.arrays[key] for key in whole.arrays if "cu" not in key}
        chunk.arrays["q"] = whole.arrays["q"][begin:end]
        chunk.arrays["seq_lens"] = np.array([end], np.int32)
        out, lse = chunk.run(gpu)
        assert np.array_equal(out, expected[begin:end])
        assert np.array_equal(lse, expected_lse[begin:end])


def test_padding_among_long_chunks_is_zero_and_changes_no_bit(gpu: HostGPU) -> None:
    case = Case([0, 100, 0], [20, 100, 30])
    out, lse = case.run(gpu)
    assert (out[:20] == 0).all()
    assert (out[120:] == 0).all()
    assert (lse[:20] == -np.inf).all()
    assert np.isfinite(out).all()
    case.check(gpu)


def test_many_rows_go_through_the_tiled_kernel_and_few_through_the_split_one(gpu: HostGPU) -> None:
    before = len(gpu.launches)
    Case([100, 30], [100, 1]).run(gpu)
    launched = [name.partition("<")[0] for name in gpu.launches[before:]]
    assert launched == ["plan_batch", "attend_split", "attend_prefill", "merge_splits"]
