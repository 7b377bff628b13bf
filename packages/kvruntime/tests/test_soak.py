"""A little of `nox -s soak`: clients that come and go leave no block behind."""

from collections.abc import Callable
from pathlib import Path

from .soak import disconnect, keep_busy, served


def test_clients_that_come_and_go_leave_no_block_behind(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    with served(tiny_checkpoint("llama")) as server:
        assert disconnect(server, 80, seed=0) > 0
        num_answers, _, _ = keep_busy(server, 2, seed=0)
        assert num_answers > 0
