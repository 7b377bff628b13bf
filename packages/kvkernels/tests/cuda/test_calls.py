"""The public calls for arrays in GPU memory, on the fiber GPU: arrays that say they are on a device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvkernels
from kvkernels.cuda import launch
from kvkernels.errors import ArgumentError, ShapeError

from .cases import Array, Case, decode, encode
from .host_gpu import HostGPU


class OnDevice:
    """NumPy memory with the protocol of arrays in GPU memory."""

    def __init__(self, array: Array, device: int = 0) -> None:
        self.device = SimpleNamespace(id=device)
        # Bits of bfloat16 are unsigned to all but torch.
        array = array.view(np.uint16) if array.dtype == np.int16 else array
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.__cuda_array_interface__ = dict(array.__array_interface__) | {"stream": 7}


class Recorder(HostGPU):
    """A fiber GPU that remembers the streams of its launches."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []
        self.made: list[tuple[str, int, int]] = []

    def launch(self, kernel: Any, grid: int, params: Any, stream: int) -> None:
        self.streams.append(stream)
        super().launch(kernel, grid, params, stream)


@pytest.fixture
def device(gpu: HostGPU, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A fiber GPU in the place of device 0."""
    del gpu  # it skips where there is no compiler
    recorder = Recorder()
    monkeypatch.setattr(launch, "launcher_of", lambda _: recorder)

    def empty(_: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> OnDevice:
        recorder.made.append((dtype, device, stream))
        if dtype != "uint8":
            return OnDevice(encode(np.zeros(shape), dtype), device)
        return OnDevice(np.zeros(shape, np.uint8), device)

    monkeypatch.setattr(launch, "empty", empty)
    return recorder


def _call(case: Case, **options: Any) -> Any:
    given: dict[str, Any] = {name: OnDevice(array) for name, array in case.arrays.items()}
    for name in ("k_scales", "v_scales"):
        if name in given:
            options[name.removesuffix("s")] = given.pop(name)
    kv_dtype = None if case.cache in {"float32", "float16", "int8"} else case.cache
    return kvkernels.paged_attention(**given, kv_dtype=kv_dtype, return_lse=True, **options)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case([40, 0, 17]), {}),
        (Case([40, 30], [20, 1]), {}),
        (Case([40], cache="float8_e4m3", k_scale=0.5), {"k_scale": 0.5}),
        (Case([40], cache="int8", has_token_scales=True), {}),
        (Case([40], softcap=3.0, window_left=9), {"softcap": 3.0, "window_left": 9}),
        (Case([40], has_alibi=True, has_sinks=True), {"deterministic": True}),
        (Case([40], query="float32", cache="float32"), {}),
    ],
    ids=["decode", "mixed", "e4m3", "int8", "softcap", "alibi", "float32"],
)
@pytest.mark.usefixtures("device")
def test_arrays_on_a_device_are_attended_there(case: Case, options: dict[str, Any]) -> None:
    out, lse = _call(case, **options)
    expected, expected_lse = case.reference()
    error = np.linalg.norm(decode(out.array, case.query) - expected)
    assert error < 6e-3 * np.linalg.norm(expected)
    assert np.allclose(lse.array, expected_lse, atol=2e-2)


def test_launches_follow_the_stream_of_the_caller(device: Recorder) -> None:
    _call(Case([40]))
    assert set(device.streams) == {7}  # of the array
    device.streams.clear()
    _call(Case([40]), stream=11)
    assert set(device.streams) == {11}


def test_results_and_workspaces_belong_to_the_stream_of_the_launches(device: Recorder) -> None:
    _call(Case([40]), stream=11)
    assert device.made == [("bfloat16", 0, 11), ("float32", 0, 11), ("uint8", 0, 11)]
    device.made.clear()
    ones = OnDevice(np.ones((1, 2, 8), np.float32))
    kvkernels.merge_states([ones], [OnDevice(np.zeros((1, 2), np.float32))], stream=12)
    assert device.made == [("float32", 0, 12), ("float32", 0, 12)]


def test_arrays_on_two_gpus_are_refused_before_anything_is_launched(device: Recorder) -> None:
    refused = pytest.raises(ArgumentError, match=r"must be on the device of .*, 0, got 1")
    with refused:
        _call(Case([40]), workspace=OnDevice(np.zeros(1 << 20, np.uint8), device=1))
    pools = [OnDevice(np.zeros((4, 2, 4, 8), np.float32), device=n) for n in range(2)]
    new, slots = OnDevice(np.ones((1, 2, 8), np.float32)), OnDevice(np.zeros(1, np.int64))
    with refused:
        kvkernels.write_kv(new, new, pools[0], pools[1], slots)
    with refused:
        kvkernels.copy_blocks(pools, [(0, 1, 4)])
    with refused:
        kvkernels.swap_blocks([pools[0]], [pools[1]], [(0, 1, 4)])
    lses = [OnDevice(np.zeros((1, 2), np.float32), device=n) for n in range(2)]
    with refused:
        kvkernels.merge_states([new, new], lses)
    assert not device.launches


def test_nothing_is_allocated_with_out_lse_and_workspace(
    device: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([40, 3])
    memory: Array = np.empty(1 << 20, np.uint8)
    workspace = OnDevice(memory[-memory.ctypes.data % 16 :])
    out = OnDevice(np.zeros(case.arrays["q"].shape, np.uint16))
    lse = OnDevice(np.zeros(case.arrays["q"].shape[:2], np.float32))
    monkeypatch.delattr(launch, "empty")
    found = _call(case, workspace=workspace, out=out, lse=lse)
    assert found == (out, lse)
    assert device.launches


@pytest.mark.usefixtures("device")
def test_a_workspace_that_is_too_small_is_refused_with_the_bytes_it_needs() -> None:
    with pytest.raises(ShapeError, match=r"workspace must have \d+ bytes, aligned to 16, got 16"):
        _call(Case([40]), workspace=OnDevice(np.zeros(16, np.uint8)))


@pytest.mark.usefixtures("device")
def test_x_packed_keys_are_refused_in_one_sentence() -> None:
    case = Case([40])
    case.arrays["k_cache"] = np.zeros((6, 2, 8, 16, 8), np.uint16)
    with pytest.raises(ShapeError, match="x-packed keys"):
        _call(case)


@pytest.mark.usefixtures("device")
def test_new_tokens_are_written_and_blocks_copied_on_the_device() -> None:
    pools = [np.zeros((4, 2, 4, 8), np.float32) for _ in "kv"]
    k, v = np.random.default_rng(0).standard_normal((2, 3, 2, 8)).astype(np.float32)
    slots = np.array([5, -1, 8])
    kvkernels.write_kv(*(OnDevice(array) for array in (k, v, *pools, slots)))
    assert np.array_equal(pools[0][1, :, 1], k[0])
    assert np.array_equal(pools[1][2, :, 0], v[2])
    kvkernels.copy_blocks([OnDevice(pool) for pool in pools], [(1, 3, 2)])
    assert np.array_equal(pools[0][3, :, 1], k[0])
    with pytest.raises(IndexError, match=r"blocks to copy must be in \[0, 4\)"):
        kvkernels.copy_blocks([OnDevice(pools[0])], [(1, 4, 2)])


@pytest.mark.usefixtures("device")
def test_blocks_are_swapped_to_pinned_memory_and_pageable_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = np.random.default_rng(0).standard_normal((4, 2, 4, 8)).astype(np.float32)
    host = np.zeros((2, 2, 4, 8), np.float32)
    monkeypatch.setattr(launch, "is_pinned", lambda _: True)
    kvkernels.swap_blocks([OnDevice(pool)], [host], [(3, 1, 4)])
    assert np.array_equal(host[1], pool[3])
    with pytest.raises(IndexError, match=r"must be in \[0, 2\), the destinations, got 2"):
        kvkernels.swap_blocks([OnDevice(pool)], [host], [(3, 2, 4)])
    monkeypatch.setattr(launch, "is_pinned", lambda _: False)
    with pytest.raises(TypeError, match="pinned memory"):
        kvkernels.swap_blocks([OnDevice(pool)], [host], [(3, 1, 4)])


@pytest.mark.usefixtures("device")
def test_results_are_merged_on_the_device() -> None:
    outs = [np.full((1, 2, 8), value, np.float32) for value in (1.0, 3.0)]
    lses = [np.zeros((1, 2), np.float32) for _ in outs]
    out, lse = kvkernels.merge_states([OnDevice(o) for o in outs], [OnDevice(one) for one in lses])
    assert np.allclose(out.array, 2)
    assert np.allclose(lse.array, np.log(2))


def test_a_stream_is_refused_on_a_cpu() -> None:
    cache = np.ones((1, 1, 2, 4), np.float32)
    arguments = (np.ones((1, 1, 4), np.float32), cache, cache)
    table, lengths = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(ArgumentError, match="stream needs arrays in GPU memory, got ndarray"):
        kvkernels.paged_attention(*arguments, table, lengths, stream=2)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 2}, "num_splits must be 0 on a GPU, got 2"),
        ({"scale": float("nan")}, "scale must be a finite float32, got nan"),
        ({"window_left": -2}, "window_left must be a number of keys, or -1 for all, got -2"),
        ({"softcap": -1.0}, "softcap must be a finite float32 and not negative, got -1.0"),
    ],
)
def test_numbers_are_refused_on_a_device_as_on_a_cpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        _call(Case([40]), **options)
    assert str(caught.value) == message


@pytest.mark.usefixtures("device")
def test_what_is_done_on_a_cpu_only_is_refused_by_name() -> None:
    case = Case([40])
    given: Any = [
        OnDevice(case.arrays[name]) for name in ("k_cache", "v_cache", "block_table", "seq_lens")
    ]
    with pytest.raises(TypeError, match=r"^gather_kv takes caches in CPU memory only, got OnDev"):
        kvkernels.gather_kv(*given)
    with pytest.raises(ArgumentError, match=r"^num_shared_tokens must be 0 on a GPU, got 16$"):
        kvkernels.cascade_attention(OnDevice(case.arrays["q"]), *given, num_shared_tokens=16)


@pytest.fixture
def debugged(device: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Debugging by the environment, with a host that gets what is on the device."""
    monkeypatch.setenv("KVKERNELS_DEBUG", "1")
    monkeypatch.setattr(launch, "to_host", lambda array: array.array)
    return device


def test_debugging_finds_an_id_outside_the_pool_before_anything_is_launched(
    debugged: Recorder,
) -> None:
    case = Case([40])
    _call(case)
    debugged.launches.clear()
    case.arrays["block_table"][0, 1] = case.arrays["k_cache"].shape[0]
    with pytest.raises(IndexError, match=r"block ids in use must be in .* for block 1 of sequence"):
        _call(case)
    assert not debugged.launches


@pytest.mark.parametrize(
    ("slots", "message"),
    [([5, 16], "slots must be -1 or in"), ([5, 5], "written once, got 5 twice")],
)
def test_debugging_finds_a_slot_outside_the_pool_or_written_twice_before_anything_is_launched(
    debugged: Recorder, slots: list[int], message: str
) -> None:
    pools = [np.zeros((4, 2, 4, 8), np.float32) for _ in "kv"]
    new = np.ones((2, 2, 8), np.float32)
    with pytest.raises((IndexError, ValueError), match=message):
        kvkernels.write_kv(*(OnDevice(one) for one in (new, new, *pools, np.array(slots))))
    assert not debugged.launches


def test_arrays_on_a_gpu_without_cupy_are_refused_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    launch.launcher_of.cache_clear()
    with pytest.raises(TypeError, match=r"pip install 'kvkernels\[cuda13\]'"):
        _call(Case([40]))
