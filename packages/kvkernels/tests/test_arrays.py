"""Whose arrays are taken, without a copy, and what is said of those that are not."""

import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkernels import ArrayError, DtypeError, copy_blocks, paged_attention, write_kv

MakeBatch = Callable[..., dict[str, Any]]


class DLPackOnly:
    """An array of some other library, known by its DLPack methods alone."""

    def __init__(self, data: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.data, self.device = data, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class InterfaceOnly:
    """An array known by `__array_interface__` alone."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.__array_interface__ = data.__array_interface__


def as_torch(data: Any) -> Any:
    return pytest.importorskip("torch").from_numpy(data)


WRAPPERS = pytest.mark.parametrize("wrap", [as_torch, DLPackOnly, InterfaceOnly, memoryview])


@WRAPPERS
def test_arrays_of_others_are_read(make_batch: MakeBatch, wrap: Any) -> None:
    batch = make_batch([20, 7], [3, 7])
    batch["k_cache"] = batch["k_cache"].copy()
    wrapped = {name: wrap(value) for name, value in batch.items()}
    assert np.array_equal(paged_attention(**wrapped), paged_attention(**batch))


@pytest.fixture
def writable(wrap: Any) -> Any:
    """Return `wrap`, unless what it wraps cannot be written."""
    if wrap is DLPackOnly and not np.from_dlpack(np.zeros(1)).flags.writeable:
        pytest.skip("this NumPy views DLPack read-only")
    return wrap


@WRAPPERS
def test_arrays_of_others_are_written_in_place(make_batch: MakeBatch, writable: Any) -> None:
    batch = make_batch([20, 7], [3, 7])
    expected, expected_lse = paged_attention(**batch, return_lse=True)
    out, lse = np.zeros_like(expected), np.zeros_like(expected_lse)
    given = writable(out), writable(lse)
    returned = paged_attention(**batch, out=given[0], lse=given[1], return_lse=True)
    assert returned[0] is given[0]
    assert returned[1] is given[1]
    assert np.array_equal(out, expected)
    assert np.array_equal(lse, expected_lse)


@WRAPPERS
def test_caches_of_others_are_written_in_place(writable: Any) -> None:
    k_cache, v_cache = np.zeros((2, 3, 1, 2, 4), np.float32)
    k, v = np.ones((2, 1, 1, 4), np.float32)
    write_kv(
        writable(k), writable(v), writable(k_cache), writable(v_cache), writable(np.array([5]))
    )
    copy_blocks([writable(k_cache), writable(v_cache)], [(2, 0, 2)])
    for cache in (k_cache, v_cache):
        assert cache[2, 0].sum(-1).tolist() == [0, 4]
        assert cache[0, 0].sum(-1).tolist() == [0, 4]


def test_results_are_numpy_arrays_unless_out_is_given(make_batch: MakeBatch) -> None:
    batch = make_batch([20])
    batch["q"] = as_torch(batch["q"])
    out, lse = paged_attention(**batch, return_lse=True)
    assert type(out) is np.ndarray
    assert type(lse) is np.ndarray


def test_lengths_and_slots_may_come_as_buffers_of_the_standard_library(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch([20, 7])
    expected = paged_attention(**batch)
    assert np.array_equal(
        paged_attention(**batch | {"seq_lens": array.array("i", [20, 7])}), expected
    )
    cache = np.zeros((2, 1, 2, 4), np.float32)
    write_kv(
        np.ones((1, 1, 4), "f4"), np.ones((1, 1, 4), "f4"), cache, cache, array.array("q", [3])
    )
    assert cache[1, 0, 1].sum() == 4


def test_read_only_arrays_are_read(make_batch: MakeBatch) -> None:
    batch = make_batch([20, 7])
    expected = paged_attention(**batch)
    for value in batch.values():
        value.flags.writeable = False
    assert np.array_equal(paged_attention(**batch), expected)


def test_strided_queries_tables_and_lengths_are_read(make_batch: MakeBatch) -> None:
    batch = make_batch([20, 7, 33], [1, 7, 2])
    expected = paged_attention(**batch)
    strided = {name: np.repeat(batch[name], 2, axis=0)[::2] for name in ("q", "seq_lens")}
    strided["block_table"] = np.asfortranarray(batch["block_table"])
    strided["cu_seqlens_q"] = batch["cu_seqlens_q"][::-1].copy()[::-1]
    assert np.array_equal(paged_attention(**batch | strided), expected)


def test_file_backed_caches_are_read_and_written(make_batch: MakeBatch, tmp_path: Path) -> None:
    batch = make_batch([20, 7])
    expected = paged_attention(**batch)
    mapped = np.memmap(tmp_path / "k", np.float32, "w+", shape=batch["k_cache"].shape)
    mapped[:] = batch["k_cache"]
    assert np.array_equal(paged_attention(**batch | {"k_cache": mapped}), expected)
    tokens = np.ones((1, 2, 16), np.float32)
    write_kv(tokens, tokens, mapped, np.zeros_like(batch["k_cache"]), np.array([0]))
    assert (np.fromfile(tmp_path / "k", np.float32, 16) == 1).all()


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ([[0, 1, 2]], r"got list \(.*\)$"),
        (None, r"got NoneType \(.*\)$"),
        (DLPackOnly(np.zeros((1, 3), np.int32), (2, 0)), r"DLPack device type 2, the CPU is 1\)$"),
    ],
    ids=["list", "None", "gpu"],
)
def test_what_is_no_cpu_array_is_refused(make_batch: MakeBatch, value: Any, detail: str) -> None:
    with pytest.raises(ArrayError, match=r"^block_table must be an array in CPU memory.*" + detail):
        paged_attention(**make_batch([20]) | {"block_table": value})


def test_tensor_that_requires_grad_is_refused(make_batch: MakeBatch) -> None:
    batch = make_batch([20])
    batch["q"] = as_torch(batch["q"]).requires_grad_()
    with pytest.raises(ArrayError, match=r"^q must be .* got Tensor \(.*requires grad"):
        paged_attention(**batch)


def test_tensor_of_another_dtype_is_refused_by_its_dtype(make_batch: MakeBatch) -> None:
    batch = make_batch([20])
    batch["k_cache"] = as_torch(batch["k_cache"]).double()
    rule = "k_cache must have dtype float32, float16, bfloat16, float8_e4m3 or int8, got float64"
    with pytest.raises(DtypeError, match=f"^{rule}$"):
        paged_attention(**batch)
