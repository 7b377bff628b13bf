"""How many threads compute, and the threads themselves. It knows nothing of what they compute.

The caller's thread takes part, and waits for no thread that has not begun: on a busy machine a call so
ends as soon as its work is done, and nobody spins.
"""

import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvkernels.errors import ArgumentError

_VARIABLES = ("KVKERNELS_NUM_THREADS", "OMP_NUM_THREADS")


def num_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _from_environment() -> int:
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return num_processors()


class _Team:
    """The threads of this process; a forked child begins without any."""

    def __init__(self) -> None:
        self.num_threads = _from_environment()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, self.num_threads - 1), "kvkernels")
        return self._pool

    def resize(self, num_threads: int) -> None:
        self.num_threads = num_threads
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def forget(self) -> None:
        self._pool = None


_team = _Team()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_team.forget)


def get_num_threads() -> int:
    """Return how many threads a call may use."""
    return _team.num_threads


def set_num_threads(num_threads: int) -> None:
    """Let calls use so many threads, the caller's included.

    It is KVKERNELS_NUM_THREADS before the first call, else OMP_NUM_THREADS, else the number of
    processors that the process may use.

    Raises:
        ArgumentError: num_threads is not positive.
    """
    num_threads = operator.index(num_threads)
    if num_threads < 1:
        raise ArgumentError(f"num_threads must be positive, got {num_threads}")
    _team.resize(num_threads)


def run(work: Callable[..., Any], arguments: tuple[Any, ...], num_threads: int) -> None:
    """Call work(*arguments) in this thread and in num_threads - 1 others, and wait for all.

    The calls share out what there is to do among themselves.
    """
    futures = [_team.pool().submit(work, *arguments) for _ in range(num_threads - 1)]
    try:
        work(*arguments)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()
