"""The CUDA kernels on a GPU: check, sanitizer, bandwidth; a short table last.

    python benchmarks/gpu/run.py [--json FILE] [--only check|bench]

It needs a Python with torch and CuPy, installs nothing and reaches no network. A machine without a GPU is a
failure. Inputs are random; every implementation's result is checked before it is timed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "kvkernels" / "src")]

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}
# The whole script stays under eight minutes: no row of the table is begun after this.
SECONDS = 420
ROUNDS, LAUNCHES = 5, 10


@dataclass
class Batch:
    """A batch in GPU memory, and what its attention is by torch in float64."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    kv_bytes: int


def make_batch(torch: Any, lengths: list[int], rows: list[int] | None, **shape: Any) -> Batch:
    """Draw a batch with blocks in random order; slots that no token owns hold NaN."""
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape.get("head_dim", 128)
    size, kind = shape.get("block_size", 16), getattr(torch, shape["dtype"])
    cache = getattr(torch, shape.get("cache", shape["dtype"]))
    counts = [-(-n // size) for n in lengths]
    blocks = sum(counts) + 1
    order = torch.randperm(blocks, device="cuda").to(torch.int32)
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32, device="cuda")
    taken = 0
    for s, count in enumerate(counts):
        table[s, :count] = order[taken : taken + count]
        taken += count
    caches = []
    for _ in "kv":
        pool = torch.empty(blocks, kv_heads, size, dim, dtype=torch.float16, device="cuda")
        pool.normal_()
        for s, n in enumerate(lengths):
            if n % size:
                pool[table[s, counts[s] - 1], :, n % size :] = torch.nan
        caches.append(pool.to(cache))
    total = sum(rows or [1] * len(lengths))
    arguments = {
        "q": torch.randn(total, heads, dim, device="cuda").to(kind),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    }
    if rows is not None:
        offsets = torch.tensor([0, *rows]).cumsum(0)
        arguments["cu_seqlens_q"] = offsets.to(torch.int32).cuda()
    kv_bytes = 2 * sum(lengths) * kv_heads * dim * caches[0].element_size()
    return Batch(arguments, shape.get("options", {}), kv_bytes)


def gathered(batch: Batch, s: int) -> tuple[Any, Any]:
    """The keys and values of a sequence [Hkv, tokens, D], taken out of their blocks."""
    given = batch.arguments
    size = given["k_cache"].shape[2]
    length = int(given["seq_lens"][s])
    blocks = given["block_table"][s, : -(-length // size)].long()
    return tuple(
        given[name][blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        for name in ("k_cache", "v_cache")
    )


def reference(torch: Any, batch: Batch) -> Any:
    """Compute the attention in float64, a sequence at a time."""
    given, options = batch.arguments, batch.options
    q = given["q"].double()
    offsets = given.get("cu_seqlens_q", torch.arange(len(given["seq_lens"]) + 1)).tolist()
    out = torch.zeros_like(q)
    for s, length in enumerate(given["seq_lens"].tolist()):
        rows = q[offsets[s] : offsets[s + 1]].transpose(0, 1)
        keys, values = (part.double() for part in gathered(batch, s))
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = rows @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        position = torch.arange(length - rows.shape[1], length, device="cuda")[:, None]
        distance = torch.arange(length, device="cuda")[None] - position
        hidden = distance > 0
        if options.get("window_left", -1) >= 0:
            hidden |= distance < -options["window_left"]
        scores.masked_fill_(hidden, -torch.inf)
        out[offsets[s] : offsets[s + 1]] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out


def check(torch: Any, kvkernels: Any) -> list[dict[str, Any]]:
    """Compare the kernels with float64, and one batch captured in a graph with itself."""
    found = []
    base = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("bfloat16", {}),
        ("float16", {"dtype": "float16"}),
        ("float32", {"dtype": "float32"}),
        ("e4m3", {"cache": "float8_e4m3fn"}),
        ("head dim 64", {"head_dim": 64}),
        ("head dim 256", {"head_dim": 256}),
        ("64 heads", {"heads": 64}),
        ("multi-head", {"kv_heads": 32}),
        ("block of 64", {"block_size": 64}),
        ("block of 24", {"block_size": 24}),
        ("window", {"options": {"window_left": 100}}),
        ("softcap", {"options": {"softcap": 20.0}}),
    ]
    for name, change in changes:
        for lengths, rows in (([1, 17, 130, 2000], None), ([1000, 300, 65], [1, 300, 17])):
            batch = make_batch(torch, lengths, rows, **base | change)
            out = kvkernels.paged_attention(**batch.arguments, **batch.options)
            want = reference(torch, batch)
            error = float((out.double() - want).norm() / want.norm())
            limit = TOLERANCE[(base | change)["dtype"]]
            ok = bool(torch.isfinite(out).all()) and error < limit
            found.append({"name": name, "mixed": rows is not None, "error": error, "ok": ok})
            print(f"{'ok' if ok else 'WRONG':6}{error:.1e}  {name} {rows or 'decode'}")
    found.append(check_graph(torch, kvkernels, make_batch(torch, [900, 100], None, **base)))
    return found


def check_graph(torch: Any, kvkernels: Any, batch: Batch) -> dict[str, Any]:
    """Capture a call in a graph and replay it for other lengths; the bits must be those of a call."""
    workspace = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(batch.arguments["q"])
    extra = {"workspace": workspace, "deterministic": True}
    kvkernels.paged_attention(**batch.arguments, **extra, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvkernels.paged_attention(**batch.arguments, **extra, out=out)
    ok = True
    for lengths in ([900, 100], [1, 64], [512, 3]):
        batch.arguments["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        workspace.fill_(255)
        graph.replay()
        want = kvkernels.paged_attention(**batch.arguments, deterministic=True)
        ok &= bool(torch.equal(out, want))
    print(f"{'ok' if ok else 'WRONG':6}graph replayed for other lengths")
    return {"name": "graph", "ok": ok}


def sanitize() -> str:
    """Run the checks once more under compute-sanitizer, where it is."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not there"
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--only", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    return "clean" if done.returncode == 0 else done.stdout[-2000:]


def microseconds(torch: Any, calls: list[Callable[[], Any]]) -> list[float]:
    """Median time of each call over rounds that alternate them, by events around graph replays."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                call()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in calls]
    for n in range(ROUNDS):
        order = range(len(calls)) if n % 2 else reversed(range(len(calls)))
        for i in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[i].replay()
            end.record()
            torch.cuda.synchronize()
            times[i].append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return [sorted(each)[ROUNDS // 2] for each in times]


def bench(torch: Any, kvkernels: Any, deadline: float) -> list[dict[str, Any]]:
    """Time decode beside a read probe, SDPA and the peers, and prefill beside SDPA."""
    table = bench_prefill(torch, kvkernels)
    for heads, size, dtype, cache in (
        (32, 16, "bfloat16", "bfloat16"),
        (32, 64, "bfloat16", "bfloat16"),
        (64, 16, "bfloat16", "bfloat16"),
        (32, 16, "bfloat16", "float8_e4m3fn"),
    ):
        for sequences, length in (
            (1, 512),
            (1, 4096),
            (8, 4096),
            (32, 4096),
            (128, 4096),
            (8, 65536),
        ):
            if time.monotonic() > deadline:
                return table
            shape = {"heads": heads, "kv_heads": 8, "dtype": dtype, "cache": cache}
            batch = make_batch(torch, [length] * sequences, None, **shape, block_size=size)
            # Peers compile for each shape, which takes longer than all that is timed.
            with_peers = sequences in {8, 32}
            table.append(bench_row(torch, kvkernels, batch, shape, with_peers=with_peers))
            table[-1] |= {"block_size": size, "sequences": sequences, "length": length}
            print(json.dumps(table[-1]), file=sys.stderr)
            del batch
            torch.cuda.empty_cache()
    return table


def bench_row(
    torch: Any, kvkernels: Any, batch: Batch, shape: dict[str, Any], *, with_peers: bool
) -> dict[str, Any]:
    """Time one batch of decode; SDPA and the peers take part where keys are 16-bit."""
    attention = torch.nn.functional.scaled_dot_product_attention
    given = batch.arguments
    out = torch.empty_like(given["q"])
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    words = torch.empty(batch.kv_bytes // 4, dtype=torch.int32, device="cuda").zero_()
    total = torch.empty((), dtype=torch.int64, device="cuda")
    calls = {
        "kvkernels": lambda: kvkernels.paged_attention(**given, out=out, workspace=workspace),
        "read": lambda: torch.sum(words, dtype=torch.int64, out=total),
    }
    missing: dict[str, str] = {}
    if given["k_cache"].element_size() == 2:
        pairs = [gathered(batch, s) for s in range(len(given["seq_lens"]))]
        keys, values = (torch.stack([pair[i] for pair in pairs]) for i in range(2))
        rows = given["q"].unsqueeze(2)
        blocks = given["block_table"].long()

        def gather_first() -> Any:
            parts = [
                given[name][blocks].transpose(1, 2).flatten(2, 3) for name in ("k_cache", "v_cache")
            ]
            return attention(rows, *parts, enable_gqa=True)

        calls["sdpa"] = lambda: attention(rows, keys, values, enable_gqa=True)
        calls["gather + sdpa"] = gather_first
        others: dict[str, Callable[[], Any]] = {}
        if with_peers:
            from benchmarks.gpu.peers import peers  # noqa: PLC0415 -- found once the path is set

            others, missing = peers(torch, given)
        calls |= others
        calls["kvkernels"]()
        for name in ("sdpa", *others):
            require_equal(name, calls[name]().reshape(out.shape), out)
    times = dict(zip(calls, microseconds(torch, list(calls.values())), strict=True))
    return shape | {"kv_bytes": batch.kv_bytes, "microseconds": times, "missing": missing}


def bench_prefill(torch: Any, kvkernels: Any) -> list[dict[str, Any]]:
    """Time whole prompts beside SDPA, flash where torch has it, on contiguous keys."""
    table = []
    for sequences, length in ((1, 4096), (4, 4096), (1, 16384)):
        shape = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16", "cache": "bfloat16"}
        batch = make_batch(torch, [length] * sequences, [length] * sequences, **shape)
        given = batch.arguments
        pairs = [gathered(batch, s) for s in range(sequences)]
        keys, values = (torch.stack([pair[i] for pair in pairs]) for i in range(2))
        q = given["q"].unflatten(0, (sequences, length)).transpose(1, 2).contiguous()
        out = torch.empty_like(given["q"])
        workspace = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")

        def ours(given: Any = given, out: Any = out, workspace: Any = workspace) -> Any:
            return kvkernels.paged_attention(**given, out=out, workspace=workspace)

        def sdpa(q: Any = q, keys: Any = keys, values: Any = values) -> Any:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, keys, values, is_causal=True, enable_gqa=True)

        require_equal("sdpa", sdpa().transpose(1, 2).reshape(out.shape), ours())
        mine, theirs = microseconds(torch, [ours, sdpa])
        row = {"prefill": True, "sequences": sequences, "length": length, "block_size": 16}
        table.append(shape | row | {"microseconds": {"kvkernels": mine, "sdpa": theirs}})
        print(json.dumps(table[-1]), file=sys.stderr)
    return table


def require_equal(name: str, theirs: Any, ours: Any) -> None:
    """End the script where another implementation has another result."""
    error = (theirs - ours).double().norm() / ours.double().norm()
    if not error < 2e-2:
        raise SystemExit(f"results of kvkernels and {name} differ by {float(error):.1e}")


def show(table: list[dict[str, Any]]) -> None:
    """Print the table: our time and bandwidth, the read probe's share, and how much longer others take."""
    others = ("sdpa", "gather + sdpa", "flex attention", "triton", "flashinfer")
    print(f"{'':38}{'us':>8} {'GB/s':>6} {'of read':>7} " + " ".join(f"{o:>14}" for o in others))
    for row in table:
        times = row["microseconds"]
        mine = times["kvkernels"]
        name = "prefill" if row.get("prefill") else "decode"
        bandwidth = f"{'':>6} {'':>7}"
        if "read" in times:
            bandwidth = f"{row['kv_bytes'] / mine / 1000:>6.0f} {times['read'] / mine:>7.0%}"
        beside = " ".join(
            f"{times[other] / mine:>13.2f}x" if other in times else f"{'-':>14}" for other in others
        )
        print(
            f"{name:7} {row['heads']:2}/{row['kv_heads']:<2} {row['cache']:>13} {row['block_size']:>2}"
            f" {row['sequences']:>3}x{row['length']:<6} {mine:>8.1f} {bandwidth} {beside}"
        )
    for name, reason in sorted({pair for row in table for pair in row.get("missing", {}).items()}):
        print(f"{name} did not run: {reason}")


def main() -> int:
    """Run the parts; returns 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write everything")
    parser.add_argument("--only", choices=("check", "bench"), help="one part")
    options = parser.parse_args()
    deadline = time.monotonic() + SECONDS
    try:
        import torch  # noqa: PLC0415  # so that --help needs nothing
    except ImportError:
        print("this needs torch with CUDA and CuPy", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("there is no GPU here, or torch cannot use it", file=sys.stderr)
        return 1
    import kvkernels  # noqa: PLC0415  # likewise

    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if options.only != "bench":
        report["check"] = check(torch, kvkernels)
    if options.only is None:
        report["sanitizer"] = sanitize()
        print("sanitizer:", report["sanitizer"])
    if options.only != "check":
        report["bench"] = bench(torch, kvkernels, deadline)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    show(report.get("bench", []))
    wrong = [row["name"] for row in report.get("check", []) if not row["ok"]]
    if report.get("sanitizer", "clean") not in {"clean", "compute-sanitizer is not there"}:
        wrong.append("sanitizer")
    print(f"wrong: {', '.join(wrong)}" if wrong else "all results are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
