"""Replays of one trace by two simulators, each in a process of its own.

Knows both simulators and processor time. Does not know how either works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from kvcache_sim.cpp_backend import run_cpp_sweep
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from kvblocks.simulate import Simulation
from kvblocks.traces import read_trace

THEIR_NAMES = {"fifo": "fifo", "lru": "lru", "belady": "optimal"}
CAPACITY = 9_776
BLOCK_SIZE = 512


def ours(trace: Path, policy: str) -> int:
    """Hit tokens by kvblocks."""
    return Simulation(read_trace(trace), measure_last=0.5).index(policy, CAPACITY).hit_tokens


def theirs(trace: Path, policy: str) -> int:
    """Hit tokens by kvcache-simulator in Python."""
    plan = build_execution_plan(parse_trace_file(str(trace), block_size=BLOCK_SIZE), 0.5)
    return int(simulate_policy(plan, THEIR_NAMES[policy], CAPACITY).hitTokens)


def theirs_compiled(trace: Path, policy: str) -> int:
    """Hit tokens by its program in C++, which it compiles once and keeps."""
    parsed = parse_trace_file(str(trace), block_size=BLOCK_SIZE)
    name = THEIR_NAMES[policy]
    found = run_cpp_sweep(
        parsed,
        capacities=[CAPACITY],
        policies=[name],
        warmup_requests=len(read_trace(trace).requests) // 2,
    )
    return int(found.results[name, CAPACITY].hitTokens)


SIMULATORS: dict[str, Callable[[Path, str], int]] = {
    "kvblocks": ours,
    "kvcache-simulator": theirs,
    "kvcache-simulator, C++": theirs_compiled,
}


def curve(trace: Path, _policy: str) -> int:
    """The whole curve of LRU by kvblocks; how many capacities that are."""
    return Simulation(read_trace(trace), measure_last=0.5).curve().num_distinct_blocks


def timed(simulate: Callable[[Path, str], int], trace: Path, policy: str) -> tuple[int, float]:
    """An answer, and the seconds of processor time that it took here and in child processes."""
    before = os.times()
    answer = simulate(trace, policy)
    return answer, sum(os.times()[:4]) - sum(before[:4])


def alone(simulate: Callable[[Path, str], int], trace: Path, policy: str) -> tuple[int, float]:
    """The same in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(timed, simulate, trace, policy).result()


def measure(trace: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Seconds for each policy and simulator, rounds interleaved; equal answers are required."""
    rows = []
    for policy in THEIR_NAMES:
        seconds: dict[str, list[float]] = {name: [] for name in SIMULATORS}
        answers: dict[str, int] = {}
        for _ in range(num_rounds):
            for name, simulate in SIMULATORS.items():
                answers[name], taken = alone(simulate, trace, policy)
                seconds[name].append(taken)
        if len(set(answers.values())) != 1:
            raise SystemExit(f"answers differ under {policy}: {answers}")
        middle = {name: median(times) for name, times in seconds.items()}
        rows.append(
            {
                "policy": policy,
                "hit_tokens": answers["kvblocks"],
                "median_seconds": {name: round(time, 3) for name, time in middle.items()},
                "ratio_to_kvblocks": {
                    name: round(time / middle["kvblocks"], 1) for name, time in middle.items()
                },
            }
        )
    return rows
