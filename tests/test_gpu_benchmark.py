"""The benchmark of the CUDA kernels, as far as a CPU can run it: everything but graphs, streams and time."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import batches, checks, peers, rows, run, timing

import kvkernels

TINY: Any = {
    "shapes": [(16, 16, "bfloat16", "bfloat16"), (16, 16, "bfloat16", "float8_e4m3fn")],
    "sizes": [(2, 40)],
    "prefills": [(1, 70)],
}


class StandIn:
    """A clock that calls and takes no time, and a reader that reads nothing."""

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        return call

    def microseconds(self, captured: Callable[[], Any]) -> float:
        captured()
        return 2.0

    def read(self, words: Any) -> None:
        assert words.dtype == torch.int32


def _bench(is_over: Callable[[], bool] = lambda: False, module: Any = kvkernels) -> rows.Bench:
    return rows.Bench(torch, module, "cpu", StandIn(), StandIn(), is_over)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(rows, "WORKSPACE_BYTES", 1 << 22)


def test_every_check_is_right_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DECODE", ([1, 17, 130], None))
    monkeypatch.setattr(checks, "MIXED", ([50, 20, 33], [1, 20, 17]))
    found = list(checks.run(torch, kvkernels, "cpu"))
    assert [row for row in found if not row["ok"]] == []
    assert len(found) == 2 * len(checks.ATTENTION) + 6
    assert json.dumps(found)


def test_a_wrong_result_and_one_that_raises_are_wrong_checks() -> None:
    class Wrong:
        """Attention that does nothing, and no other call."""

        def paged_attention(self, **_: Any) -> None: ...

    found = list(checks.run(torch, Wrong(), "cpu", is_short=True))
    assert not any(row["ok"] for row in found)
    assert found[0]["error"] == float("inf")
    assert "has no attribute 'write_kv'" in found[-6]["error"]


def test_rows_are_compared_and_have_every_time() -> None:
    decode, eight_bits, prefill = _bench().rows(**TINY)
    assert decode["ok"]
    assert decode["microseconds"].keys() == {"kvkernels", "read", "copy", "sdpa", "gather + sdpa"}
    assert decode["sdpa"] == prefill["sdpa"] == "flash"
    assert eight_bits["ok"]
    assert eight_bits["microseconds"].keys() == {"kvkernels", "read", "copy"}
    assert prefill["ok"]
    assert prefill["least_microseconds"] == {"kvkernels": 2.0, "sdpa": 2.0}
    assert all(row["missing"] == {} for row in (decode, eight_bits, prefill))


def test_our_own_wrong_result_is_a_wrong_row() -> None:
    class Wrong:
        def paged_attention(self, *, out: Any, **_: Any) -> None:
            out.zero_()

    found = list(_bench(module=Wrong()).rows(**TINY))
    assert [row["ok"] for row in found] == [False] * 3
    assert found[0]["missing"]["sdpa"].startswith("its result differs from ours by inf")


def test_a_row_that_raises_says_so_and_the_next_one_is_made() -> None:
    class Broken:
        calls = 0

        def paged_attention(self, **given: Any) -> Any:
            Broken.calls += 1
            if Broken.calls == 1:
                raise MemoryError("none is left")
            return kvkernels.paged_attention(**given)

    found = list(_bench(module=Broken()).rows(**TINY))
    assert found[0]["raised"] == "MemoryError: none is left"
    assert [row["ok"] for row in found] == [False, True, True]


def test_a_peer_that_raises_or_differs_is_missing_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(*_: Any) -> Any:
        raise ValueError("not on this machine\nat all")

    def differs(_: Any, given: Any) -> Any:
        return lambda: given["q"] * 0 + 7

    monkeypatch.setattr(rows, "SEQUENCES_WITH_PEERS", {2})
    monkeypatch.setattr(peers, "triton_decode", raises)
    monkeypatch.setattr(peers, "flashinfer_decode", differs)
    monkeypatch.setattr(peers, "flex_attention", lambda _, given: lambda: given["q"][:0])
    row = next(_bench().rows(**TINY))
    assert row["missing"]["triton"] == "ValueError: not on this machine"
    assert row["missing"]["flashinfer"].startswith("its result differs from ours by ")
    assert row["missing"]["flex attention"].startswith("RuntimeError: shape")
    assert {"kvkernels", "sdpa"} <= row["microseconds"].keys()


def test_a_peer_whose_capture_raises_is_missing() -> None:
    class Strict(StandIn):
        def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
            if call is other:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(call)

    def other() -> None: ...

    missing: dict[str, str] = {}
    times = timing.measure(Strict(), {"a": lambda: None, "b": other}, missing)
    assert times == {"median": {"a": 2.0}, "least": {"a": 2.0}}
    assert missing == {"b": "RuntimeError: operation not permitted when stream is capturing"}


def test_a_row_whose_own_capture_raises_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    class Never(StandIn):
        def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
            del call
            raise RuntimeError("operation not permitted when stream is capturing")

    row = next(rows.Bench(torch, kvkernels, "cpu", Never(), StandIn(), lambda: False).rows(**TINY))
    report = run.Report(None)
    report.add("bench", row)
    assert report.wrong() == [run.label(row)]
    run.show([row])
    assert "RuntimeError: operation not permitted" in capsys.readouterr().out


def test_no_row_and_no_peer_is_begun_when_time_is_over() -> None:
    assert list(_bench(is_over=lambda: True).rows(**TINY)) == []
    _, missing = peers.peers(torch, {}, lambda: True)
    assert set(missing.values()) == {"no time was left"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_on_the_pool_is_attention() -> None:
    shape = {"heads": 4, "kv_heads": 2, "dtype": "float32", "head_dim": 16, "block_size": 16}
    batch = batches.make_batch(torch, "cpu", [40, 17], None, **shape)
    # It multiplies masked values, too: slots that nobody owns must be finite.
    for name in ("k_cache", "v_cache"):
        batch.arguments[name].nan_to_num_(0.0)
    found = peers.flex_attention(torch, batch.arguments)()
    _, want, _ = batches.reference(torch, batch)
    assert checks.relative(found, want) < 1e-5


def test_flex_attention_is_compiled_for_each_shape_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: said.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda _, **options: said.append(options))
    peers.compiled(torch, lambda: None)
    assert said == ["reset", {"dynamic": False}]


def test_what_flash_refuses_is_torchs_choice_and_says_why() -> None:
    from torch.nn import attention

    def attend() -> str:
        if attention._cur_sdpa_kernel_backends() == [attention.SDPBackend.FLASH_ATTENTION]:
            raise RuntimeError("No available kernel")
        return "done"

    call, backend = rows.by_flash(attend)
    assert call() == "done"
    assert backend == "torch's choice, as flash refused: RuntimeError: No available kernel"


def test_the_read_probe_is_loads_of_16_bytes_and_no_store_but_one() -> None:
    path = Path(__file__).parents[1] / "packages/kvkernels/tests/cuda/nvrtc.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark_nvrtc", path)
    assert spec is not None
    assert spec.loader is not None
    nvrtc = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = nvrtc
    spec.loader.exec_module(nvrtc)
    if nvrtc.library() is None or nvrtc.disassembler() is None:
        pytest.skip("needs the wheels nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm")
    cubin, usage = nvrtc.compile_text(timing.READ_SOURCE, "read_words", "sm_90")
    found = nvrtc.instructions(cubin)
    loads = {name: n for name, n in found.items() if name.startswith("LDG")}
    assert sum(loads.values()) >= 4
    assert all(".128" in name and ".NA" in name for name in loads)
    assert sum(n for name, n in found.items() if name.startswith("STG")) == 1
    assert usage.spilled_bytes == 0
    # As many threads as a multiprocessor has room for.
    assert usage.registers * timing.READ_THREADS * timing.READ_BLOCKS <= 65536


def test_the_report_is_on_disk_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = run.Report(path, device="none")
    report.add("check", {"name": "graph", "ok": False, "error": "a replay differs"})
    assert json.loads(path.read_text("utf-8"))["check"][0]["name"] == "graph"
    for n, row in enumerate(_bench().rows(**TINY)):
        report.add("bench", row)
        assert len(json.loads(path.read_text("utf-8"))["bench"]) == n + 1
    assert report.wrong() == ["graph"]


@pytest.mark.parametrize(
    ("raised", "said", "is_wrong"),
    [
        (subprocess.TimeoutExpired("compute-sanitizer", 5), "not done after 5 seconds", False),
        (OSError("no such tool"), "not done: no such tool", False),
        (None, "========= Invalid __global__ read", True),
    ],
)
def test_the_sanitizer_is_reported_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, raised: Exception | None, said: str, *, is_wrong: bool
) -> None:
    def answer(command: list[str], **_: Any) -> Any:
        assert command[-2:] == ["--only", "short"]
        if raised is not None:
            raise raised
        return subprocess.CompletedProcess(command, 9, said, "")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", answer)
    report = run.Report(None)
    report.set("sanitizer", run.sanitize(5))
    assert report.found["sanitizer"] == said
    assert (report.wrong() == ["sanitizer"]) == is_wrong


def test_the_table_shows_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    table = list(_bench().rows(**TINY))
    table.append(
        {key: table[0][key] for key in ("heads", "kv_heads", "cache", "block_size")}
        | {"sequences": 8, "length": 9, "ok": False, "raised": "MemoryError: none is left"}
    )
    table[0]["missing"]["triton"] = "ModuleNotFoundError: No module named 'triton'"
    run.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert "100%" in lines[1]
    assert lines[1].count("1.00x") == 3
    assert lines[4].endswith("MemoryError: none is left")
    assert lines[5:] == [
        "triton did not run: ModuleNotFoundError: No module named 'triton'",
        "sdpa: flash",
    ]
