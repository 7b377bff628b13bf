"""One process a block manager: it loads its adapter, builds workloads and times rounds when told.

Knows one adapter. Does not know the others, or when it is its turn.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.allocator.adapters.base import Adapter
from benchmarks.allocator.cases import CASES, Case
from benchmarks.allocator.peers import Peer
from benchmarks.allocator.prompts import MissingTraceError
from benchmarks.allocator.verification import verify
from benchmarks.allocator.workloads import Figures, Workload, WrongAnswerError


class CannotRunError(Exception):
    """A workload that this block manager or this machine cannot run, and why."""


class Worker:
    """What the driver may ask for. Each method is one message and one answer."""

    def __init__(self, peer: Peer, root: Path) -> None:
        self.peer, self.root = peer, root
        self.adapter: type[Adapter]
        self.workload: Workload | None = None

    def load(self) -> str:
        """Import the block manager, check its answers, and return its version."""
        sys.path[:0] = [str(folder) for folder in self.peer.folders(self.root)]
        name = f"benchmarks.allocator.adapters.{self.peer.module}"
        self.adapter = importlib.import_module(name).ADAPTER
        verify(self.adapter)
        if not self.peer.distribution:
            return "own"
        return importlib.metadata.version(self.peer.distribution)

    def prepare(self, key: str, quick: bool) -> None:  # noqa: FBT001 -- a message has no keywords
        """Build a workload, and run one round that does not count."""
        case = next(case for case in CASES if case.key == key)
        self._require_abilities(case)
        try:
            self.workload = case.build(self.adapter, quick=quick)
        except MissingTraceError as error:
            raise CannotRunError(str(error)) from None
        if case.measure != "bytes":
            self.workload.round()

    def round(self) -> Figures:
        """Run one round."""
        if self.workload is None:
            raise RuntimeError("prepare comes before round")
        return self.workload.round()

    def finish(self) -> Figures:
        """Let go of the workload; returns what is worth knowing of it."""
        facts = self.workload.facts() if self.workload else {}
        self.workload = None
        return facts

    def _require_abilities(self, case: Case) -> None:
        missing = case.needs - self.adapter.abilities
        if missing:
            raise CannotRunError(f"does not {' or '.join(can.value for can in missing)}")


def serve(connection: Connection, peer: Peer, root: Path, log: Path) -> None:
    """The life of a worker process: messages (method, arguments), answers (kind, value)."""
    # Engines print; the terminal belongs to the table.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    worker = Worker(peer, root)
    while True:
        method, arguments = connection.recv()
        if method == "stop":
            return
        try:
            answer = ("done", getattr(worker, method)(*arguments))
        except CannotRunError as error:
            answer = ("skipped", str(error))
        except WrongAnswerError as error:
            answer = ("failed", f"wrong answer: {error}")
        except Exception as error:  # noqa: BLE001 -- whatever a peer raises is its result
            traceback.print_exc()
            answer = ("failed", f"{type(error).__name__}: {error}")
        connection.send(answer)
