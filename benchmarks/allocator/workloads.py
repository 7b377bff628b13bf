"""The workloads: fixed and seeded, the same for every block manager.

A workload is made for one adapter (not timed: pools are filled, prompts are cut and packed) and then
asked for rounds. A round does a fixed amount of work, times the calls of the adapter and nothing
else, checks what came back, and returns one figure a part: microseconds a unit, or bytes.

Knows what is asked of a block manager. Does not know any of them, or which round belongs to whom.
"""

from __future__ import annotations

import gc
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from typing import TypeAlias

from benchmarks.allocator.adapters.base import Adapter, Can, Prompt, free_all, num_blocks_for
from benchmarks.allocator.clock import timed
from benchmarks.allocator.expected import expected_hits
from benchmarks.allocator.prompts import chats, mooncake, random_tokens

BLOCK_SIZE = 16

Figures: TypeAlias = dict[str, float]


class WrongAnswerError(Exception):
    """A block manager answered what it must not."""


def require(expected: object, got: object, what: str) -> None:
    """Raise `WrongAnswerError` unless a block manager answered as expected."""
    if expected != got:
        raise WrongAnswerError(f"{what} must be {expected}, got {got}")


def require_hits(expected: Sequence[int], got: Sequence[int]) -> None:
    """Raise `WrongAnswerError` for the first prompt of which too few or too many tokens were cached."""
    for number, (right, answer) in enumerate(zip(expected, got, strict=True)):
        require(right, answer, f"cached tokens of prompt {number}")


def settle() -> None:
    """Take what is there out of the garbage collector's rounds, as servers do after start-up."""
    gc.collect()
    gc.freeze()


class Workload(ABC):
    """One workload for one adapter."""

    @abstractmethod
    def round(self) -> Figures:
        """One round: a figure a part."""

    def facts(self) -> Figures:
        """What is worth knowing besides time, such as a hit rate."""
        return {}


class AllocateFree(Workload):
    """W1: a prompt comes and goes; nothing is cached."""

    def __init__(self, make: type[Adapter], *, quick: bool) -> None:
        self.adapter = make(100_000, BLOCK_SIZE, caching=False)
        self.prompt = random_tokens("W1", 2048)
        self.num_prompts = 50 if quick else 300
        settle()

    def round(self) -> Figures:
        adapter, prompt = self.adapter, self.prompt

        def run() -> None:
            for seq_id in range(self.num_prompts):
                seq, _ = adapter.admit(seq_id, prompt)
                adapter.free(seq)

        return {"": timed(run) / 1e3 / self.num_prompts}


class Decode(Workload):
    """W2: 256 running sequences get one token each a step; slots are returned.

    `turnover` sequences leave and as many join before each step. `way` names the method of the
    adapter: a block manager may have several.
    """

    BATCH, PROMPT = 256, 256

    def __init__(
        self,
        make: type[Adapter],
        *,
        quick: bool,
        caching: bool = False,
        way: str = "decode",
        turnover: int = 0,
    ) -> None:
        self.adapter = make(100_000, BLOCK_SIZE, caching=caching)
        self.decode = getattr(self.adapter, way)
        self.turnover = turnover
        self.num_steps = 16 if quick else 64
        self.ids, self.numbers = count(), count()
        # Lengths of all remainders: a sixteenth of the batch needs a block in every step.
        self.prompts = [
            self.adapter.pack(random_tokens(f"W2 {row}", self.PROMPT + row % BLOCK_SIZE))
            for row in range(self.BATCH)
        ]
        settle()

    def round(self) -> Figures:
        adapter, decode, turnover = self.adapter, self.decode, self.turnover
        seqs = [adapter.admit(next(self.ids), prompt)[0] for prompt in self.prompts]
        lengths = [self.PROMPT + row % BLOCK_SIZE for row in range(self.BATCH)]
        batch = adapter.start(seqs, self.prompts)
        number = next(self.numbers)
        steps = [random_tokens(f"W2 {number} {step}", self.BATCH) for step in range(self.num_steps)]
        nanoseconds = 0
        for tokens in steps:
            joining = [(next(self.ids), prompt) for prompt in self.prompts[:turnover]]
            decoded: list[object] = []

            def run(
                tokens: list[int] = tokens,
                joining: list[tuple[int, object]] = joining,
                decoded: list[object] = decoded,
            ) -> None:
                if turnover:
                    adapter.exchange(batch, turnover, joining)
                decoded.append(decode(batch, tokens))

            nanoseconds += timed(run)
            lengths = lengths[turnover:] + [
                self.PROMPT + row % BLOCK_SIZE for row in range(turnover)
            ]
            lengths = [length + 1 for length in lengths]
        self._check(adapter.sequences(batch), adapter.slots(decoded[0]), lengths)
        free_all(adapter, adapter.sequences(batch))
        return {"": nanoseconds / 1e3 / self.num_steps / self.BATCH}

    def _check(self, seqs: Sequence[object], slots: list[int], lengths: list[int]) -> None:
        """The slots of the last step are where the tables say, and no two sequences share one."""
        tables = [self.adapter.table(seq) for seq in seqs]
        require_decoded(self.adapter, tables, slots, lengths)
        require(len(tables), len({table[-1] for table in tables}), "the number of last blocks")


def require_decoded(
    adapter: Adapter, tables: Sequence[Sequence[int]], slots: Sequence[int], lengths: Sequence[int]
) -> None:
    """Tables and slots after a step belong to sequences of these lengths, in whatever order."""
    expected = sorted(
        (num_blocks_for(length, BLOCK_SIZE), (length - 1) % BLOCK_SIZE) for length in lengths
    )
    offsets = [slot - adapter.slot(table[-1], 0) for table, slot in zip(tables, slots, strict=True)]
    got = sorted(zip(map(len, tables), offsets, strict=True))
    for right, answer in zip(expected, got, strict=True):
        require(right, answer, "the length of a table and the last slot in its last block")


class Prompts(Workload):
    """Prompts one after another: request, look-up, blocks, publish, free. Hits are checked."""

    def __init__(self, make: type[Adapter], num_blocks: int, *, array: bool) -> None:
        self.make, self.num_blocks, self.array = make, num_blocks, array
        self.adapter = make(num_blocks, BLOCK_SIZE, caching=True)
        self.ids, self.numbers = count(), count()
        self.num_hit_tokens = self.num_tokens = 0

    def pack(self, prompts: Sequence[list[int]]) -> list[Prompt]:
        """Prompts as a block manager gets them: lists, or in the form it takes fastest."""
        return [self.adapter.pack(prompt) for prompt in prompts] if self.array else list(prompts)

    def serve(self, prompts: Sequence[Prompt]) -> tuple[int, list[int]]:
        """Serve packed prompts: nanoseconds in all, cached tokens of each."""
        adapter = self.adapter
        hits: list[int] = []

        def run() -> None:
            for seq_id, prompt in zip(self.ids, prompts, strict=False):
                seq, num_cached = adapter.admit(seq_id, prompt)
                adapter.free(seq)
                hits.append(num_cached)
                if adapter.tells:
                    adapter.take_events()

        nanoseconds = timed(run)
        self.num_hit_tokens += sum(hits)
        self.num_tokens += sum(map(len, prompts))
        return nanoseconds, hits

    def facts(self) -> Figures:
        return {"hit_rate": self.num_hit_tokens / self.num_tokens}


def telling(make: type[Adapter]) -> type[Adapter]:
    """An adapter whose block manager tells what is cached by events."""
    return type(make.__name__, (make,), {"tells": True})


class SharedPrefix(Prompts):
    """W3: 4,096 tokens that all prompts share, and 128 of their own."""

    def __init__(self, make: type[Adapter], *, quick: bool, array: bool = False) -> None:
        super().__init__(make, 100_000, array=array)
        self.num_prompts = 10 if quick else 50
        self.shared = random_tokens("W3", 4096)
        self.serve(self.pack(self._prompts("first", 1)))
        self.num_hit_tokens = self.num_tokens = 0
        settle()

    def _prompts(self, name: object, num_prompts: int) -> list[list[int]]:
        return [self.shared + random_tokens(f"W3 {name} {i}", 128) for i in range(num_prompts)]

    def round(self) -> Figures:
        prompts = self.pack(self._prompts(next(self.numbers), self.num_prompts))
        nanoseconds, hits = self.serve(prompts)
        require_hits([4096] * self.num_prompts, hits)
        return {"": nanoseconds / 1e3 / self.num_prompts}


class UniquePrompts(Prompts):
    """W4: prompts of 2,048 tokens that nobody has sent before, through a pool full of cached blocks."""

    def __init__(
        self, make: type[Adapter], *, quick: bool, num_blocks: int, array: bool = False
    ) -> None:
        super().__init__(make, num_blocks, array=array)
        self.num_prompts = 10 if quick else 50
        num_filling = num_blocks_for(num_blocks * BLOCK_SIZE, 2048) + 1
        for number in range(num_filling):
            self.serve(self.pack(self._prompts(f"fill {number}", 1)))
        settle()

    def _prompts(self, name: object, num_prompts: int) -> list[list[int]]:
        return [random_tokens(f"W4 {name} {i}", 2048) for i in range(num_prompts)]

    def round(self) -> Figures:
        nanoseconds, hits = self.serve(
            self.pack(self._prompts(next(self.numbers), self.num_prompts))
        )
        require_hits([0] * self.num_prompts, hits)
        return {"": nanoseconds / 1e3 / self.num_prompts}


class Replay(Prompts):
    """W5: a fixed list of prompts through a fresh pool, every round the same."""

    def __init__(
        self, make: type[Adapter], prompts: list[list[int]], num_blocks: int, *, array: bool
    ) -> None:
        super().__init__(make, num_blocks, array=array)
        self.prompts = self.pack(prompts)
        self.expected = expected_hits(prompts, num_blocks, BLOCK_SIZE)
        self.possible = expected_hits(prompts, 1 << 40, BLOCK_SIZE)

    def round(self) -> Figures:
        del self.adapter
        self.adapter = self.make(self.num_blocks, BLOCK_SIZE, caching=True)
        settle()
        nanoseconds, hits = self.serve(self.prompts)
        if self.adapter.evicts_like_model or self.expected == self.possible:
            require_hits(self.expected, hits)
        elif any(hit > most for hit, most in zip(hits, self.possible, strict=True)):
            raise WrongAnswerError("more tokens were cached than prompts have in common")
        return {"": nanoseconds / 1e3 / len(self.prompts)}


def replay_chats(
    make: type[Adapter], *, quick: bool, num_blocks: int, array: bool = False
) -> Workload:
    """W5: 200 chats of 10 turns of 300 tokens."""
    return Replay(make, chats()[: 200 if quick else None], num_blocks, array=array)


def replay_mooncake(make: type[Adapter], *, quick: bool, array: bool = False) -> Workload:
    """W5m: 250 requests of the Mooncake conversation trace."""
    return Replay(make, mooncake(25 if quick else 250), 100_000, array=array)


class Fork(Workload):
    """W6: eight children of a 1,000-token parent get 24 tokens each and go."""

    CHILDREN, TOKENS, PARENT = 8, 24, 1000

    def __init__(self, make: type[Adapter], *, quick: bool) -> None:
        self.adapter = make(100_000, BLOCK_SIZE, caching=make.forks_need_caching)
        self.ids, self.families = count(1), count()
        self.num_families = 5 if quick else 25
        prompt = self.adapter.pack(random_tokens("W6", self.PARENT))
        parent, _ = self.adapter.admit(0, prompt)
        self.parent = self.adapter.sequences(self.adapter.start([parent], [prompt]))[0]
        settle()

    def round(self) -> Figures:
        parts = {"fork": 0, "append": 0, "free": 0}
        for _ in range(self.num_families):
            self._family(parts)
        num_children = self.num_families * self.CHILDREN
        units = {"fork": num_children, "append": num_children * self.TOKENS, "free": num_children}
        return {part: nanoseconds / 1e3 / units[part] for part, nanoseconds in parts.items()}

    def _family(self, parts: dict[str, int]) -> None:
        adapter, family = self.adapter, next(self.families)
        children: list[object] = []
        num_copies = 0
        unborn = [adapter.prepare_fork(self.parent, next(self.ids)) for _ in range(self.CHILDREN)]

        def fork() -> None:
            children.extend([adapter.fork(self.parent, child) for child in unborn])

        parts["fork"] += timed(fork)
        for step in range(self.TOKENS):
            tokens = random_tokens(f"W6 {family} {step}", self.CHILDREN)
            adapter.prepare_append(children, tokens)

            def append(tokens: list[int] = tokens) -> None:
                nonlocal num_copies
                num_copies += adapter.append_to_forks(children, tokens)

            parts["append"] += timed(append)
        self._check(children, num_copies + adapter.copies_of_forks())
        parts["free"] += timed(lambda: free_all(adapter, children))

    def _check(self, children: Sequence[object], num_copies: int) -> None:
        require(self.CHILDREN, num_copies, "the number of copied blocks")
        num_shared = self.PARENT // BLOCK_SIZE
        parent = self.adapter.table(self.parent)
        tables = [self.adapter.table(child) for child in children]
        for table in tables:
            num_blocks = num_blocks_for(self.PARENT + self.TOKENS, BLOCK_SIZE)
            require(num_blocks, len(table), "the length of a child's table")
            require(parent[:num_shared], table[:num_shared], "the shared blocks of a child")
        own = list(chain(parent[num_shared:], *(table[num_shared:] for table in tables)))
        require(len(own), len(set(own)), "the number of blocks that are not shared")


class FreeLong(Workload):
    """W7: one sequence of 100,000 tokens is freed."""

    def __init__(self, make: type[Adapter], *, quick: bool, caching: bool = False) -> None:
        self.adapter = make(100_000, BLOCK_SIZE, caching=caching)
        self.prompt = self.adapter.pack(random_tokens("W7", 100_000))
        self.num_frees = 3 if quick else 10
        settle()

    def round(self) -> Figures:
        nanoseconds = 0
        for seq_id in range(self.num_frees):
            seq, _ = self.adapter.admit(seq_id, self.prompt)
            require(6250, len(self.adapter.table(seq)), "the length of a table")
            nanoseconds += timed(partial(self.adapter.free, seq))
        return {"": nanoseconds / 1e3 / self.num_frees}


class Memory(Workload):
    """W8: bytes a block, as Python's allocator counts them, and the bytes of tensors besides."""

    def __init__(self, make: type[Adapter], *, quick: bool) -> None:
        self.make = make
        self.num_blocks = 20_000 if quick else 100_000
        self.prompts = [
            random_tokens(f"W8 {i}", 2048)
            for i in range(num_blocks_for(self.num_blocks * BLOCK_SIZE, 2048) + 1)
        ]

    def round(self) -> Figures:
        caching = Can.CACHE in self.make.abilities
        gc.collect()
        tracemalloc.start()
        try:
            adapter = self.make(self.num_blocks, BLOCK_SIZE, caching=caching)
            parts = {"empty": self._bytes_per_block(adapter)}
            if caching:
                for seq_id, prompt in enumerate(self.prompts):
                    seq, _ = adapter.admit(seq_id, adapter.pack(prompt))
                    adapter.free(seq)
                del seq
                parts["full"] = self._bytes_per_block(adapter)
        finally:
            tracemalloc.stop()
        return parts

    def _bytes_per_block(self, adapter: Adapter) -> float:
        gc.collect()
        traced, _ = tracemalloc.get_traced_memory()
        return (traced + adapter.untraced_bytes()) / self.num_blocks
