"""The servers: how each is started, and what it has used of the processor.

Knows command lines and processes. All serve SmolLM2-135M in float32 on one thread of arithmetic.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MODEL = "smollm2"
BLOCK_SIZE = 32
NUM_BLOCKS = 512
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 512


def commands(folder: str, vllm_python: str | None) -> Mapping[str, list[str]]:
    """The command of each server, but for its port."""
    shared = [
        *("--model", folder, "--host", "127.0.0.1", "--block-size", str(BLOCK_SIZE)),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--served-model-name", MODEL),
    ]
    found = {
        "kvruntime": [
            *(sys.executable, "-m", "kvruntime", "serve", *shared),
            *("--num-blocks", str(NUM_BLOCKS)),
        ]
    }
    if vllm_python is not None:
        found["vllm"] = [
            *(vllm_python, "-m", "vllm.entrypoints.openai.api_server", *shared),
            *("--dtype", "float32", "--enforce-eager", "--disable-log-stats"),
        ]
    return found


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """A server in a process of its own; what it says goes into a file."""

    def __init__(self, name: str, command: list[str], port: int, log: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | ENVIRONMENT,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, which no server should be."""
        return self._process.poll() is not None

    def cpu_seconds(self) -> float:
        """Processor seconds so far, of the process and of those that it has started."""
        return sum(map(_cpu_seconds, _tree(self._process.pid)))

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text("utf-8").split()
    ]
    return [pid, *(found for child in children for found in _tree(child))]


def _cpu_seconds(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_text("utf-8")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
