"""Threads share a call's work, and no bit of its result depends on how many there are."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvkernels import ArgumentError, get_num_threads, paged_attention, set_num_threads

MakeBatch = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def attend(batch: dict[str, Any], num_threads: int, **options: Any) -> tuple[bytes, bytes]:
    set_num_threads(num_threads)
    out, lse = paged_attention(**batch, **options, return_lse=True)
    return out.tobytes(), lse.tobytes()


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize(
    ("seq_lens", "num_queries"),
    [([2500], None), ([2500, 7, 0, 1100], None), ([2300, 40], [300, 1])],
    ids=["one long sequence", "long and short", "prefill"],
)
def test_row_is_the_same_for_any_number_of_threads(
    make_batch: MakeBatch, seq_lens: list[int], num_queries: list[int] | None, num_threads: int
) -> None:
    batch = make_batch(seq_lens, num_queries, head_dim=24)
    assert attend(batch, num_threads) == attend(batch, 1)


def test_row_with_a_window_is_the_same_for_any_number_of_threads(make_batch: MakeBatch) -> None:
    batch = make_batch([4200], [3])
    assert attend(batch, 4, window_left=2100) == attend(batch, 1, window_left=2100)


def test_calls_at_the_same_time_do_not_disturb_each_other(make_batch: MakeBatch) -> None:
    batches = [make_batch([2100 + n], seed=n) for n in range(4)]
    alone = [attend(batch, 1) for batch in batches]
    set_num_threads(3)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: paged_attention(**batch).tobytes(), batches))
    assert found == [out for out, _ in alone]


@pytest.mark.parametrize("num_threads", [0, -1])
def test_number_of_threads_must_be_positive(num_threads: int) -> None:
    with pytest.raises(ArgumentError, match=rf"^num_threads must be positive, got {num_threads}$"):
        set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3", "KVKERNELS_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "none"}, None),
    ],
)
def test_environment_sets_the_number_of_threads(
    environment: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVKERNELS_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code = "import kvkernels; print(kvkernels.get_num_threads())"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = int(run.stdout)
    assert found == expected if expected else found >= 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_forked_child_computes_with_threads_of_its_own() -> None:
    code = (
        "import os, numpy as np, kvkernels\n"
        "kvkernels.set_num_threads(2)\n"
        "q, cache = np.ones((1, 1, 8), 'f4'), np.ones((300, 1, 16, 8), 'f4')\n"
        "table, lengths = np.arange(300, dtype='i4')[None], np.array([4800], 'i4')\n"
        "attend = lambda: bool((kvkernels.paged_attention(q, cache, cache, table, lengths) == 1).all())\n"
        "assert attend()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if attend() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
