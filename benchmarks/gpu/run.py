"""The CUDA kernels on a GPU: checks, times, sanitizer; a short table last.

    python benchmarks/gpu/run.py [--json FILE] [--only check|short|bench]

It needs a Python with torch and CuPy, installs nothing and reaches no network. A machine without a GPU is a
failure. Inputs are random; every result is compared before it is timed. The JSON is written after every
check and every row, so that what was found stays whatever happens later.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "kvkernels" / "src")]

# No row of the table is begun after this, and no peer of a row.
SECONDS = 420
SANITIZER_SECONDS = 150
ABSENT, CLEAN = "compute-sanitizer is not there", "clean"
OTHERS = ("copy", "sdpa", "gather + sdpa", "flex attention", "triton", "flashinfer")


class Report:
    """What was found so far, on disk at every step."""

    def __init__(self, path: Path | None, **about: Any) -> None:
        self.path = path
        self.found: dict[str, Any] = about

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Append a row to a part."""
        self.found.setdefault(part, []).append(row)
        self.save()

    def set(self, part: str, value: Any) -> None:
        """Set a part."""
        self.found[part] = value
        self.save()

    def save(self) -> None:
        """Write the file, where there is to be one."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=2) + "\n", "utf-8")

    def wrong(self) -> list[str]:
        """Name what is not as it should be; a sanitizer that is absent or slow is not wrong."""
        names = [row["name"] for row in self.found.get("check", []) if not row["ok"]]
        names += [label(row) for row in self.found.get("bench", []) if not row["ok"]]
        said = self.found.get("sanitizer", CLEAN)
        if said not in {ABSENT, CLEAN} and not said.startswith("not done"):
            names.append("sanitizer")
        return names


def sanitize(timeout: float = SANITIZER_SECONDS) -> str:
    """Run a few short checks under compute-sanitizer, where it is."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return ABSENT
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--only", "short"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} seconds"
    except OSError as error:
        return f"not done: {error}"
    return CLEAN if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


def label(row: dict[str, Any]) -> str:
    """Name a row of the table."""
    return (
        f"{'prefill' if row.get('prefill') else 'decode':7} {row['heads']:2}/{row['kv_heads']:<2}"
        f" {row['cache']:>13} {row['block_size']:>2} {row['sequences']:>3}x{row['length']:<6}"
    )


def show(table: list[dict[str, Any]]) -> None:
    """Print the table: our time and bandwidth, the read probe's share, and how much longer others take."""
    print(f"{'':38}{'us':>8} {'GB/s':>6} {'of read':>7} " + " ".join(f"{o:>14}" for o in OTHERS))
    for row in table:
        times = row.get("microseconds", {})
        mine = times.get("kvkernels")
        if mine is None:
            print(f"{label(row)} {row.get('raised') or row['missing']['kvkernels']}")
            continue
        bandwidth = f"{'':>6} {'':>7}"
        if "read" in times:
            bandwidth = f"{row['kv_bytes'] / mine / 1000:>6.0f} {times['read'] / mine:>7.0%}"
        beside = " ".join(
            f"{times[other] / mine:>13.2f}x" if other in times else f"{'-':>14}" for other in OTHERS
        )
        print(f"{label(row)} {mine:>8.1f} {bandwidth} {beside}")
    for name, reason in sorted({pair for row in table for pair in row.get("missing", {}).items()}):
        print(f"{name} did not run: {reason}")
    for backend in sorted({row["sdpa"] for row in table if row.get("sdpa")}):
        print(f"sdpa: {backend}")


def bench(torch: Any, kvkernels: Any, report: Report, end: float) -> None:
    """Make the rows of the table, as far as time allows."""
    from benchmarks.gpu import rows, timing  # noqa: PLC0415 -- found once the path is set

    try:
        reader = timing.Reader(torch)
        clock = timing.GraphClock(torch, reader)
    except Exception as error:  # noqa: BLE001 -- what was checked is shown all the same
        report.add("check", {"name": "read probe", "ok": False, "error": timing.why(error)})
        return
    made = rows.Bench(torch, kvkernels, "cuda", clock, reader, lambda: time.monotonic() > end)
    for row in made.rows():
        report.add("bench", row)
        print(json.dumps(row), file=sys.stderr, flush=True)


def main() -> int:
    """Run the parts; returns 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write everything")
    parser.add_argument("--only", choices=("check", "short", "bench"), help="one part")
    options = parser.parse_args()
    end = time.monotonic() + SECONDS
    try:
        import torch  # noqa: PLC0415 -- so that --help needs nothing
    except ImportError:
        print("this needs torch with CUDA and CuPy", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("there is no GPU here, or torch cannot use it", file=sys.stderr)
        return 1
    import kvkernels  # noqa: PLC0415 -- likewise
    from benchmarks.gpu import checks  # noqa: PLC0415 -- found once the path is set

    torch.manual_seed(0)
    report = Report(
        options.json,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
    )
    if options.only != "bench":
        for row in checks.run(torch, kvkernels, "cuda", is_short=options.only == "short"):
            report.add("check", row)
            print(f"{'ok' if row['ok'] else 'WRONG':6}{row['name']}: {row['error']}", flush=True)
    if options.only in {None, "bench"}:
        bench(torch, kvkernels, report, end)
    if options.only is None:
        report.set("sanitizer", sanitize())
        print("sanitizer:", report.found["sanitizer"])
    if report.found.get("bench"):
        show(report.found["bench"])
    wrong = report.wrong()
    print(f"wrong: {', '.join(wrong)}" if wrong else "all results are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
