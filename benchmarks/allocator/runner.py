"""The driver: asks every worker for a round in turn, so that all meet the same machine.

    round 1:  kvblocks, peer A, peer B, ...
    round 2:  kvblocks, peer A, peer B, ...

Knows processes and figures. Does not know block managers or the form of a table.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.allocator.cases import Case
from benchmarks.allocator.peers import SUBJECT, Peer, UnavailableError, fetch
from benchmarks.allocator.worker import serve
from benchmarks.allocator.workloads import Figures

SECONDS_TO_ANSWER = 900


class RemoteError(Exception):
    """What a worker answered instead of a value; `kind` is "skipped" or "failed"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Summary:
    """The rounds of one part of one workload by one block manager."""

    minimum: float
    median: float
    maximum: float


@dataclass
class Result:
    """What one block manager made of one workload."""

    rounds: list[Figures] = field(default_factory=list)
    facts: Figures = field(default_factory=dict)
    trouble: RemoteError | None = None

    def summaries(self) -> dict[str, Summary]:
        """One summary a part."""
        parts: dict[str, list[float]] = {}
        for figures in self.rounds:
            for part, value in figures.items():
                parts.setdefault(part, []).append(value)
        return {part: Summary(min(v), median(v), max(v)) for part, v in parts.items()}


class Remote:
    """A worker process, as the driver sees it."""

    def __init__(self, peer: Peer, root: Path) -> None:
        self.peer = peer
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        log = root / f"{peer.name}.log"
        self._process = context.Process(target=serve, args=(theirs, peer, root, log), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> Any:
        """One message and its answer; `RemoteError` for anything but a value."""
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(SECONDS_TO_ANSWER):
                self._process.kill()
                raise RemoteError("failed", f"no answer to {method} in {SECONDS_TO_ANSWER} s")
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RemoteError("failed", f"its process has ended ({error!r})") from None
        if kind != "done":
            raise RemoteError(kind, value)
        return value

    def stop(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._connection.send(("stop", ()))
        self._process.join()


@dataclass
class Run:
    """All that one run measured. Versions and results are by the name of a block manager."""

    cases: list[Case]
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    results: dict[str, dict[str, Result]] = field(default_factory=dict)


def run(
    cases: list[Case], peers: list[Peer], root: Path, *, quick: bool, say: Callable[[str], None]
) -> Run:
    """Measure kvblocks and peers; whoever cannot be loaded is named in `missing` with the reason."""
    root.mkdir(parents=True, exist_ok=True)
    # Before any worker starts: tensors on several threads would hide time from a thread's clock.
    os.environ["OMP_NUM_THREADS"] = "1"
    outcome = Run(cases)
    remotes = []
    for peer in [SUBJECT, *peers]:
        say(f"loading {peer.name}")
        try:
            fetch(peer, root)
            remote = Remote(peer, root)
            remotes.append(remote)
            outcome.versions[peer.name] = remote.ask("load")
        except (UnavailableError, RemoteError) as error:
            outcome.missing[peer.name] = str(error)
            say(f"  not measured: {error}")
    present = [remote for remote in remotes if remote.peer.name in outcome.versions]
    for case in cases:
        say(f"{case.key}: {case.about}")
        outcome.results[case.key] = _measure(case, present, quick=quick)
    for remote in remotes:
        remote.stop()
    return outcome


def _measure(case: Case, remotes: list[Remote], *, quick: bool) -> dict[str, Result]:
    results = {remote.peer.name: Result() for remote in remotes}

    def each(method: str, *arguments: object) -> None:
        for remote in remotes:
            result = results[remote.peer.name]
            if result.trouble is None:
                try:
                    _note(result, method, remote.ask(method, *arguments))
                except RemoteError as error:
                    result.trouble = error

    each("prepare", case.key, quick)
    for _ in range(min(case.num_rounds, 3) if quick else case.num_rounds):
        each("round")
    each("finish")
    return results


def _note(result: Result, method: str, answer: Any) -> None:
    if method == "round":
        result.rounds.append(answer)
    elif method == "finish":
        result.facts = answer
