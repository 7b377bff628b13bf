"""What a workload asks of a block manager, whoever wrote it.

Timed are `admit`, `decode` and its other ways, `exchange`, `free`, `fork`, `append_to_forks` and
nothing else: what an adapter does there is what its engine would do, without the model.

Knows the calls. Does not know workloads or clocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, TypeAlias

# Each adapter's own: a running sequence, a prompt in the form it likes best, a running batch.
Seq: TypeAlias = Any
Prompt: TypeAlias = Any
Batch: TypeAlias = Any


class Can(Enum):
    """What a block manager can do."""

    ALLOCATE = "allocate and free"
    DECODE = "append to a running batch"
    CACHE = "share prefixes"
    FORK = "fork a running sequence"
    TELL = "tell what is cached by events"
    SHOW_MEMORY = "keep its state where Python can count it"


class Adapter(ABC):
    """One block manager over a pool of `num_blocks` usable blocks of `block_size` tokens."""

    abilities: ClassVar[frozenset[Can]] = frozenset(Can) - {Can.FORK, Can.TELL}
    # Whether it is to tell what becomes cached and what no longer is; who can has a subclass that does.
    tells: ClassVar[bool] = False
    # Whether it evicts as `expected.LeastRecentlyUsed` does, so that hits under pressure are known.
    evicts_like_model: ClassVar[bool] = False
    # Whether it shares blocks between forks only where it shares prefixes too.
    forks_need_caching: ClassVar[bool] = False

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching

    # ── prompts ──────────────────────────────────────────────────────────────────────────────

    def pack(self, tokens: list[int]) -> Prompt:
        """The form of a prompt that this block manager takes fastest. Not timed."""
        return tokens

    @abstractmethod
    def admit(self, seq_id: int, prompt: Prompt) -> tuple[Seq, int]:
        """Take a whole prompt: request, look-up, blocks; with caching, full blocks are published.

        Takes a list as well as what `pack` gives. Returns the number of cached tokens too.
        `MemoryError` when the pool is too small.
        """

    @abstractmethod
    def free(self, seq: Seq) -> None:
        """Give up a sequence; with caching its full blocks stay findable."""

    def take_events(self) -> list[Any]:
        """The events since the last call, where `tells` says that there are some."""
        raise NotImplementedError

    def num_told(self, events: Iterable[Any]) -> int:
        """How many keys of blocks events stored. Not timed."""
        stored = [event for event in events if type(event).__name__ == "BlockStored"]
        return sum(len(event.block_hashes) for event in stored)

    # ── decoding ─────────────────────────────────────────────────────────────────────────────

    def start(self, seqs: Sequence[Seq], prompts: Sequence[Prompt]) -> Batch:  # noqa: ARG002 -- one asks
        """The running batch of admitted prompts in the form that `decode` takes. Not timed."""
        return list(seqs)

    def decode(self, batch: Batch, tokens: Sequence[int]) -> Any:
        """Append one token to each sequence in the quickest way on offer; returns the slots."""
        raise NotImplementedError

    def decode_together(self, batch: Batch, tokens: Sequence[int]) -> Any:
        """The same by one call that names every sequence, if that is another way."""
        return self.decode(batch, tokens)

    def decode_singly(self, batch: Batch, tokens: Sequence[int]) -> Any:
        """The same by one call a sequence, if that is another way."""
        return self.decode(batch, tokens)

    def exchange(self, batch: Batch, leaving: int, joining: Sequence[tuple[int, Prompt]]) -> None:
        """Free the first `leaving` sequences of a batch and admit others at its end."""
        for seq in batch[:leaving]:
            self.free(seq)
        batch[:leaving] = []
        batch += [self.admit(seq_id, prompt)[0] for seq_id, prompt in joining]

    # ── forking ──────────────────────────────────────────────────────────────────────────────

    def prepare_fork(self, parent: Seq, child_id: int) -> Any:  # noqa: ARG002 -- others copy it
        """What an engine makes before it asks for a fork, such as a request object. Not timed."""
        return child_id

    def fork(self, parent: Seq, child: Any) -> Seq:
        """Make a child that shares what the parent holds."""
        raise NotImplementedError

    def prepare_append(  # noqa: B027 -- most note nothing
        self, seqs: Sequence[Seq], tokens: Sequence[int]
    ) -> None:
        """What an engine notes before it asks for slots, such as the tokens. Not timed."""

    def append_to_forks(self, seqs: Sequence[Seq], tokens: Sequence[int]) -> int:
        """Append one token to each; returns the number of blocks that had to be copied."""
        raise NotImplementedError

    def copies_of_forks(self) -> int:
        """Blocks that `fork` itself asked to copy since the last call. Not timed."""
        return 0

    # ── for checks, never timed ──────────────────────────────────────────────────────────────

    @abstractmethod
    def table(self, seq: Seq) -> Sequence[int]:
        """The block ids of a sequence."""

    def sequences(self, batch: Batch) -> list[Seq]:
        """The sequences of a running batch, in the order of its slots."""
        return list(batch)

    def slots(self, decoded: Any) -> list[int]:
        """What `decode` returned, as a list."""
        return list(decoded)

    def slot(self, block_id: int, offset: int) -> int:
        """The slot of a position in a block, as this block manager counts."""
        return block_id * self.block_size + offset

    def untraced_bytes(self) -> int:
        """Memory of the bookkeeping that Python's allocator does not see, such as tensors."""
        return 0


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def free_all(adapter: Adapter, seqs: Iterable[Seq]) -> None:
    """Free several sequences."""
    for seq in seqs:
        adapter.free(seq)
