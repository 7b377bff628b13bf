"""The GPU behind a launch, with a CuPy and a torch that remember what they were asked for."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvkernels
from kvkernels.cuda import arrays, kernels, launch, source
from kvkernels.cuda.arrays import DeviceArray, require_one_device, view
from kvkernels.errors import ArgumentError, ArrayError


@dataclass
class FakeCupy:
    """CuPy on a machine of two GPUs: where arrays are made, and what is launched on which stream."""

    device: int = 0
    stream: int = 5
    is_capturing: bool = False
    made: list[tuple[int, int]] = field(default_factory=list)
    launched: list[tuple[int, int]] = field(default_factory=list)
    asked_for: list[int] = field(default_factory=list)

    def module(self) -> Any:
        found: Any = ModuleType("cupy")
        found.cuda = SimpleNamespace(
            Device=self._device,
            Stream=SimpleNamespace(from_external=self._external),
            get_current_stream=lambda device: SimpleNamespace(ptr=100 + device),
            runtime=SimpleNamespace(getDevice=lambda: self.device, getDeviceCount=lambda: 2),
        )
        found.RawModule = lambda **_: SimpleNamespace(get_function=lambda _: self._function())
        found.empty = self._empty
        found.from_dlpack = self._from_dlpack
        return found

    def _device(self, device: int) -> Any:
        @contextmanager
        def current() -> Iterator[None]:
            before, self.device = self.device, device
            yield
            self.device = before

        made: Any = SimpleNamespace(id=device, attributes={"MultiProcessorCount": 10 + device})
        manager = current
        return _Context(made, manager)

    def _external(self, stream: Any) -> Any:
        version, handle = stream.__cuda_stream__()
        assert version == 0

        @contextmanager
        def current() -> Iterator[None]:
            before, self.stream = self.stream, handle
            yield
            self.stream = before

        made = SimpleNamespace(ptr=handle, is_capturing=lambda: self.is_capturing)
        return _Context(made, current)

    def _function(self) -> Any:
        cupy = self

        class Function:
            def __setattr__(self, name: str, value: int) -> None:
                assert name == "max_dynamic_shared_size_bytes"
                cupy.asked_for.append(value)

            def __call__(self, *_: Any, shared_mem: int, stream: Any) -> None:
                del shared_mem
                cupy.launched.append((cupy.device, stream.ptr))

        return Function()

    def _empty(self, shape: tuple[int, ...], kind: str) -> Any:
        self.made.append((self.device, self.stream))
        return np.empty(shape, kind)

    def _from_dlpack(self, array: Any) -> Any:
        raise NotImplementedError(f"{array.dtype} has no dtype")


class _Context:
    """What CuPy says of a device or a stream, which is current inside `with`."""

    def __init__(self, said: Any, current: Any) -> None:
        self._said, self._current = said, current

    def __getattr__(self, name: str) -> Any:
        return getattr(self._said, name)

    def __enter__(self) -> None:
        self._entered = self._current()
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())
    launch.launcher_of.cache_clear()
    yield fake
    launch.launcher_of.cache_clear()


class Foreign:
    """An array of neither torch nor CuPy."""

    def __init__(self, array: "np.ndarray[Any, Any]", dtype: Any = None) -> None:
        self.dtype = dtype or array.dtype
        self.__cuda_array_interface__ = dict(array.__array_interface__)
        if dtype is not None:
            self.__cuda_array_interface__["typestr"] = f"<V{array.itemsize}"


def test_what_is_allocated_belongs_to_the_device_and_the_stream_of_the_call(
    cupy: FakeCupy,
) -> None:
    found = launch.empty(Foreign(np.zeros(1)), (3,), "bfloat16", 1, 77)
    assert (found.shape, found.dtype) == ((3,), np.uint16)
    assert cupy.made == [(1, 77)]
    assert (cupy.device, cupy.stream) == (0, 5)


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (77, [(77, 1), "cuda:1", "left"]),
        (0, [(0, 1), "cuda:1", "left"]),
        (1, [(0, 1), "cuda:1", "left"]),
        (5, ["cuda:1"]),  # the current one
    ],
)
def test_torch_allocates_on_the_stream_of_the_call(
    monkeypatch: pytest.MonkeyPatch, handle: int, expected: list[Any]
) -> None:
    made: list[Any] = []

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        made.append(stream)
        yield
        made.append("left")

    def empty(*_: Any, **options: Any) -> None:
        made.append(options["device"])

    torch: Any = ModuleType("torch")
    torch.uint8 = "uint8"
    torch.cuda = SimpleNamespace(
        stream=current,
        ExternalStream=lambda pointer, device: (pointer, device),
        current_stream=lambda device: SimpleNamespace(cuda_stream=4 + device),
    )
    torch.empty = empty
    tensor = type("Tensor", (), {"__module__": "torch", "device": "cuda:1"})()
    monkeypatch.setitem(sys.modules, "torch", torch)
    launch.empty(tensor, (3,), "uint8", 1, handle)
    assert made == expected


def test_a_launch_is_on_the_device_and_the_stream_given(cupy: FakeCupy) -> None:
    launcher = launch.launcher_of(1)
    assert launcher.num_multiprocessors == 11
    launcher.launch(kernels.PLAN, 1, np.zeros(()), 42)
    assert cupy.launched == [(1, 42)]


def test_a_kernel_that_is_not_loaded_is_refused_inside_a_capture(cupy: FakeCupy) -> None:
    launcher = launch.launcher_of(0)
    cupy.is_capturing = True
    with pytest.raises(ArgumentError, match=r"must run once before it is captured.* plan_batch"):
        launcher.launch(kernels.PLAN, 1, np.zeros(()), 42)
    cupy.is_capturing = False
    launcher.launch(kernels.PLAN, 1, np.zeros(()), 42)
    cupy.is_capturing = True
    launcher.launch(kernels.PLAN, 1, np.zeros(()), 42)
    assert len(cupy.launched) == 2


def test_shared_memory_above_48_kilobytes_is_asked_for_static_included(cupy: FakeCupy) -> None:
    launcher = launch.launcher_of(0)
    for num_bytes in (46 * 1024, 46 * 1024 + 16):
        kernel = kernels.Kernel("copy_tokens<1>", (), "CopyParams", 128, num_bytes)
        launcher.launch(kernel, 1, np.zeros(()), 0)
    assert cupy.asked_for == [46 * 1024 + 16]


def test_workspace_size_is_that_of_the_current_gpu(cupy: FakeCupy) -> None:
    limits: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    sizes = []
    for cupy.device in (0, 1):
        size = kvkernels.workspace_size(**limits, max_num_rows=4, max_seq_len=4096, device="cuda")
        sizes.append(size)
    assert sizes[0] < sizes[1]  # which has more multiprocessors


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3")]
)
def test_items_without_a_name_in_the_protocol_have_that_of_the_array(
    monkeypatch: pytest.MonkeyPatch, dtype: str, name: str
) -> None:
    given = SimpleNamespace(name=dtype)
    array = Foreign(np.zeros((2, 3), np.uint16), dtype=given)
    numpy_dtype = np.dtype
    # NumPy knows these dtypes only where a package of its own has registered them.
    monkeypatch.setattr(np, "dtype", lambda it: it if it is given else numpy_dtype(it))
    found = view("q", array)
    assert (found.dtype, found.strides) == (name, (3, 1))


class ByDLPack:
    """An array that speaks nothing but DLPack."""

    dtype = "bfloat16"

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


@pytest.mark.usefixtures("cupy")
def test_what_cupy_does_not_take_by_dlpack_is_refused_by_name() -> None:
    rule = r"q must be an array that CuPy takes by DLPack, got ByDLPack \(bfloat16 has no dtype\)"
    with pytest.raises(ArrayError, match=rule):
        view("q", ByDLPack())


def test_dlpack_without_cupy_is_refused_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ArrayError, match=r"pip install 'kvkernels\[cuda13\]'"):
        view("q", ByDLPack())


@pytest.mark.usefixtures("cupy")
def test_the_stream_of_what_speaks_dlpack_alone_is_that_of_cupy() -> None:
    assert arrays.current_stream(ByDLPack(), 1) == 101
    assert arrays.current_stream(Foreign(np.zeros(1)), 1) == 0


def test_what_a_whole_warp_does_together_is_volatile() -> None:
    together = re.findall(r"asm( volatile)?\(\s*\"(\w+\.sync\.aligned)", source.read("device.cuh"))
    assert {name for _, name in together} == {
        *("ldmatrix.sync.aligned", "movmatrix.sync.aligned", "mma.sync.aligned")
    }
    assert all(volatile for volatile, _ in together)


def _on(device: int, name: str) -> DeviceArray:
    return DeviceArray(name, 0, (1,), (1,), "float32", device, None)


def test_arrays_on_two_devices_are_refused_by_name() -> None:
    require_one_device([_on(1, "q"), None, _on(1, "out")])
    with pytest.raises(ArgumentError, match=r"^out must be on the device of q, 1, got 0$"):
        require_one_device([_on(1, "q"), None, _on(0, "out")])
