"""The kernels of attention on the fiber GPU, beside float64: every feature, and what must not matter."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from .cases import Case
from .host_gpu import HostGPU

LENGTHS = [0, 1, 15, 16, 17, 49, 130]
ROWS = [0, 1, 3, 16, 2, 7, 100]
# A split of a length that cuts the longer sequences, so that results are merged.
CHUNK = 64

Options = Mapping[str, Any]

DECODE: dict[str, Options] = {
    "bfloat16": {},
    "float16": {"query": "float16", "cache": "float16"},
    "float32": {"query": "float32", "cache": "float32"},
    "float32-queries-of-float16-keys": {"query": "float32", "cache": "float16"},
    "e4m3": {"cache": "float8_e4m3", "k_scale": 0.5, "v_scale": 0.25},
    "e4m3-float16": {"query": "float16", "cache": "float8_e4m3"},
    "e4m3-token-scales": {"cache": "float8_e4m3", "has_token_scales": True},
    "int8": {"cache": "int8", "k_scale": 0.03, "v_scale": 0.02},
    "int8-float16": {"query": "float16", "cache": "int8", "k_scale": 0.03, "v_scale": 0.02},
    "int8-token-scales": {"cache": "int8", "has_token_scales": True},
    "int8-token-scales-float32": {"query": "float32", "cache": "int8", "has_token_scales": True},
    "head-dim-16": {"head_dim": 16},
    "head-dim-80": {"head_dim": 80},
    "head-dim-96": {"head_dim": 96},
    "head-dim-128": {"head_dim": 128},
    "head-dim-192": {"head_dim": 192},
    "head-dim-256": {"head_dim": 256},
    "head-dim-72": {"head_dim": 72},
    "e4m3-head-dim-80": {"cache": "float8_e4m3", "head_dim": 80},
    "int8-head-dim-128": {"cache": "int8", "head_dim": 128, "k_scale": 0.03},
    "multi-head": {"group": 1, "num_kv_heads": 3},
    "group-of-5": {"group": 5},
    "group-of-8": {"group": 8, "num_kv_heads": 1},
    "group-of-9": {"group": 9, "num_kv_heads": 1},
    "group-of-71": {"group": 71, "num_kv_heads": 1},
    "block-of-1": {"block_size": 1},
    "block-of-8": {"block_size": 8, "layout": "NHD"},
    "block-of-24": {"block_size": 24},
    "block-of-64": {"block_size": 64},
    "NHD": {"layout": "NHD"},
    "window": {"window_left": 40},
    "window-of-its-own-key": {"window_left": 0},
    "softcap": {"softcap": 3.0},
    "alibi": {"has_alibi": True},
    "sinks": {"has_sinks": True},
    "sinks-with-e4m3": {"has_sinks": True, "cache": "float8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "sinks-float32": {"has_sinks": True, "query": "float32", "cache": "float32"},
    "everything": {
        "softcap": 4.0,
        "has_alibi": True,
        "has_sinks": True,
        "window_left": 70,
        "cache": "int8",
        "has_token_scales": True,
        "block_size": 8,
        "layout": "NHD",
        "group": 3,
    },
}


@pytest.mark.parametrize("name", DECODE)
def test_decode_is_that_of_float64(gpu: HostGPU, name: str) -> None:
    Case(LENGTHS, **DECODE[name]).check(gpu)


@pytest.mark.parametrize("name", [name for name in DECODE if "float32" not in name])
def test_splits_are_merged_to_that_of_float64(gpu: HostGPU, name: str) -> None:
    Case(LENGTHS, **DECODE[name], chunk=CHUNK, seed=1).check(gpu)


MIXED: dict[str, Options] = {
    name: DECODE[name]
    for name in (
        *("bfloat16", "float16", "float32", "float32-queries-of-float16-keys", "e4m3", "int8"),
        *("e4m3-token-scales", "int8-token-scales", "int8-float16", "head-dim-80", "head-dim-128"),
        *("head-dim-256", "multi-head", "group-of-5", "group-of-71", "block-of-1", "block-of-24"),
        *("NHD", "window", "window-of-its-own-key", "softcap", "alibi", "sinks", "everything"),
        *("e4m3-head-dim-80", "int8-head-dim-128", "head-dim-16"),
    )
} | {
    "all-keys": {"causal": False},
    "all-keys-in-a-window": {"causal": False, "window_left": 9},
}


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_batch_is_that_of_float64(gpu: HostGPU, name: str) -> None:
    Case(LENGTHS, ROWS, **MIXED[name]).check(gpu)


@pytest.mark.parametrize("unowned_is_nan", [True, False])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3"])
def test_what_nobody_owns_changes_no_bit(gpu: HostGPU, cache: str, *, unowned_is_nan: bool) -> None:
    case = Case(LENGTHS, cache=cache, chunk=CHUNK, unowned_is_nan=unowned_is_nan)
    other = Case(LENGTHS, cache=cache, chunk=CHUNK, unowned_is_nan=not unowned_is_nan)
    assert np.array_equal(case.run(gpu)[0], other.run(gpu)[0])


def test_rows_without_keys_are_zero_with_an_lse_of_minus_infinity(gpu: HostGPU) -> None:
    out, lse = Case([0, 5, 0], has_sinks=True).run(gpu)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -np.inf).all()


def test_a_row_is_the_same_alone_and_in_a_batch_with_a_fixed_chunk(gpu: HostGPU) -> None:
    batch = Case([130, 17, 200], chunk=CHUNK)
    together, together_lse = batch.run(gpu)
    for s in range(3):
        alone = Case([batch.seq_lens[s]], chunk=CHUNK)
        alone.arrays |= {"k_cache": batch.arrays["k_cache"], "v_cache": batch.arrays["v_cache"]}
        for name in ("q", "block_table", "seq_lens"):
            alone.arrays[name] = batch.arrays[name][s : s + 1]
        out, lse = alone.run(gpu)
        assert np.array_equal(out[0], together[s])
        assert np.array_equal(lse[0], together_lse[s])


def test_the_order_of_threads_changes_no_bit(gpu: HostGPU) -> None:
    case = Case(LENGTHS, chunk=CHUNK)
    first = case.run(gpu)[0]
    for seed in (0, *range(2, 14)):
        assert np.array_equal(case.run(gpu.reseeded(seed))[0], first)
