"""What several test files need: a filled manager, and the proof that a refusal left no trace."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from kvblocks import Adapter, BlockManager, SequenceId


def filled(
    manager: BlockManager,
    seq_id: SequenceId,
    tokens: Iterable[int] | int,
    first_token: int = 0,
    *,
    salt: str | None = None,
    adapter: Adapter | str | int | None = None,
) -> None:
    """Allocate, compute and commit a prompt: these tokens, or a number of distinct ones."""
    if isinstance(tokens, int):
        tokens = range(first_token, first_token + tokens)
    prompt = list(tokens)
    manager.allocate(seq_id, prompt, salt=salt, adapter=adapter)
    if todo := len(prompt) - manager.num_computed_tokens(seq_id):
        manager.append({seq_id: todo})
    manager.commit(seq_id, len(prompt))


@contextmanager
def refused(
    manager: BlockManager, error: type[BaseException], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error, and the state as it was before."""
    before = manager.state_digest()
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert manager.state_digest() == before
    manager.check()


def interrupted(tokens: list[int]) -> Iterator[int]:
    """Token ids whose source fails in the end."""
    yield from tokens
    raise ZeroDivisionError
