"""Clients that come and go at a live server, as many and as long as asked for.

    nox -s soak -- --seed 0 --disconnects 1000 --seconds 60

First, clients ask for anything and leave in its midst, while one asks the same question again and
again and must get the same answer. Then clients keep most of the pool busy for a time, in which the
memory of the process must stay what it was. After each, every block is free or cached. The server
is in this process, with a tiny model, so that its engine can be asked.

Knows what clients do and what must hold. Does not know how the server keeps it.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvruntime import LLM, EngineConfig

from .conftest import save_checkpoint
from .serving import LiveServer, live_server

NUM_BLOCKS = 160
CONFIG = EngineConfig(
    num_blocks=NUM_BLOCKS,
    block_size=8,
    max_num_seqs=24,
    max_num_batched_tokens=64,
    max_num_waiting=256,
    preemption="auto",
    num_host_blocks=40,
)
STEADY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}


def disconnect(server: LiveServer, num_clients: int, seed: int) -> int:
    """Let clients leave in the midst of what they asked for; how often the steady one was answered."""
    numbers = iter(range(num_clients))
    lock = threading.Lock()

    def leave() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            chance = random.Random(f"{seed} {number}")  # noqa: S311 -- chosen to be repeatable
            connection = server.send("/v1/completions", _anything(chance))
            connection.settimeout(0.001 * chance.choice((1, 5, 20, 60)))
            with connection, contextlib.suppress(TimeoutError):
                connection.recv(chance.choice((1, 400, 4000)))

    expected = server.post("/v1/completions", STEADY).json()["choices"]
    num_answers = 0
    with ThreadPoolExecutor(6) as pool:
        leaving = [pool.submit(leave) for _ in range(6)]
        while not all(one.done() for one in leaving):
            answer = server.post("/v1/completions", STEADY)
            assert answer.json().get("choices") == expected, answer.text
            num_answers += 1
        for one in leaving:
            one.result()
    assert_at_rest(server)
    return num_answers


def keep_busy(server: LiveServer, seconds: float, seed: int) -> tuple[int, float, int]:
    """Keep the pool busy; the answers, the mean share of it that was held, and the bytes grown."""
    end = time.monotonic() + seconds

    def ask(worker: int) -> int:
        chance = random.Random(f"{seed} {worker}")  # noqa: S311 -- likewise
        num_answers = 0
        while time.monotonic() < end:
            body = _anything(chance)
            answer = server.post("/v1/completions", body)
            assert answer.status_code in {200, 429}, answer.text
            num_answers += answer.status_code == 200
        return num_answers

    held: list[int] = []
    resident: list[int] = []
    with ThreadPoolExecutor(10) as pool:
        asking = [pool.submit(ask, worker) for worker in range(10)]
        while not all(one.done() for one in asking):
            held.append(server.ask(lambda engine: engine.manager.stats().num_held_blocks))
            resident.append(_resident_bytes())
            time.sleep(0.05)
    assert_at_rest(server)
    # The first half of the time fills caches that stay: of code, of kernels, of allocators.
    quarter = len(resident) // 4
    grown = statistics.median(resident[-quarter:]) - statistics.median(
        resident[-2 * quarter : -quarter]
    )
    num_answers = sum(one.result() for one in asking)
    return num_answers, sum(held) / len(held) / NUM_BLOCKS, int(grown)


def assert_at_rest(server: LiveServer) -> None:
    """Nothing runs, and every block of both memories is free or cached."""
    server.wait_until(lambda engine: not engine.has_work)
    pool = server.ask(lambda engine: engine.manager.stats())
    assert pool.num_free_blocks + pool.num_cached_blocks == NUM_BLOCKS, pool
    assert pool.num_held_host_blocks == 0, pool
    assert server.ask(lambda engine: engine.stats()).num_leaked_blocks == 0
    server.ask(lambda engine: engine.manager.check())
    assert server.async_llm.status == "ready"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[LiveServer]:
    """Serve the tiny model of a folder, with a pool that is too small for all that comes."""
    with live_server(LLM(folder, CONFIG)) as server:
        yield server


def _anything(chance: random.Random) -> dict[str, Any]:
    """A request of any kind: streamed or not, short or long, alone, samples, beams or prompts."""
    kind: dict[str, Any] = chance.choice(
        (
            {},
            {},
            {"n": 3},
            {"use_beam_search": True, "n": 3},
            {"prompt": [_tokens(chance), _tokens(chance)]},
            {"stop": "the"},
            {"cache_salt": "another"},
        )
    )
    return {
        "model": "tiny",
        "prompt": _tokens(chance),
        "max_tokens": chance.choice((1, 20, 100)),
        "ignore_eos": chance.random() < 0.5,
        "stream": chance.random() < 0.5,
        **kind,
    }


def _tokens(chance: random.Random) -> list[int]:
    shared = list(range(20, 20 + 8 * chance.randint(0, 8)))
    return [*shared, *(chance.randrange(3, 380) for _ in range(chance.randint(1, 40)))]


def _resident_bytes() -> int:
    """The memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, let clients come and go, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        with served(Path(folder)) as server:
            num_answers = disconnect(server, options.disconnects, options.seed)
            print(f"{options.disconnects} clients left, one was answered {num_answers} times")
            num_answers, held, grown = keep_busy(server, options.seconds, options.seed)
            stats = server.ask(lambda engine: engine.stats())
    print(f"{num_answers} answers in {options.seconds:g} s with {held:.0%} of the pool held")
    print(f"memory grew by {grown / 2**20:.1f} MiB between the last two quarters of that time")
    print(
        f"preemptions: {stats.num_preemptions_swap} by swapping, "
        f"{stats.num_preemptions_recompute} by recompute; {stats.num_forks} forks, "
        f"{stats.num_evicted_blocks} blocks evicted, {stats.num_leaked_blocks} leaked"
    )
    return int(grown > 16 * 2**20)


if __name__ == "__main__":
    sys.exit(main())
