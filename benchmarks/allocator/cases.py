"""The workloads by name: what a unit of each is, who can run it and how often it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.allocator.adapters.base import Adapter, Can
from benchmarks.allocator.workloads import (
    AllocateFree,
    Decode,
    Fork,
    FreeLong,
    Memory,
    SharedPrefix,
    UniquePrompts,
    Workload,
    replay_chats,
    replay_mooncake,
    telling,
)


@dataclass(frozen=True)
class Case:
    """A workload as a row of the table. `build` takes an adapter class and `quick`."""

    key: str
    about: str
    unit: str
    needs: frozenset[Can]
    build: Callable[..., Workload]
    num_rounds: int = 9
    measure: str = "microseconds"


ALLOCATE, DECODE, CACHE, FORK, TELL, MEMORY = (
    frozenset({can})
    for can in (Can.ALLOCATE, Can.DECODE, Can.CACHE, Can.FORK, Can.TELL, Can.SHOW_MEMORY)
)


def _decoding() -> Iterator[Case]:
    unit = "sequence and step"
    ways = (
        ("", "", "decode"),
        ("/together", ", one call a step", "decode_together"),
        ("/singly", ", one call a sequence", "decode_singly"),
    )
    for suffix, about, way in ways:
        build = partial(Decode, way=way)
        yield Case(f"W2{suffix}", f"decode, 256 running{about}", unit, DECODE, build)
    turnover = partial(Decode, turnover=13)
    yield Case("W2j", "decode, 13 of 256 leave and join a step", unit, DECODE, turnover)
    for suffix, about, way in ways:
        build = partial(Decode, way=way, caching=True)
        yield Case(f"W2c{suffix}", f"decode with caching{about}", unit, DECODE | CACHE, build)


def _caching(build: Callable[..., Workload], key: str, about: str, unit: str) -> Iterator[Case]:
    """One workload with its prompts as lists, and in the form each block manager takes fastest."""
    num_rounds = 5 if key.startswith("W5") else 9  # a round of W5 is long
    for form in ("list", "array"):
        with_form = partial(build, array=form == "array")
        yield Case(f"{key}/{form}", f"{about}, {form}", unit, CACHE, with_form, num_rounds)


def _with_events(build: Callable[..., Workload], key: str, as_: str, unit: str) -> Iterator[Case]:
    """A workload of `_caching` whose events are taken after every prompt."""

    def build_telling(make: type[Adapter], **options: object) -> Workload:
        return build(telling(make), **options)

    for case in _caching(build_telling, key, f"{as_} with events", unit):
        yield replace(case, needs=case.needs | TELL)


def _cases() -> Iterator[Case]:
    yield Case("W1", "2,048 tokens, no cache", "prompt", ALLOCATE, AllocateFree)
    yield from _decoding()
    yield from _caching(SharedPrefix, "W3", "4,096 shared + 128 own tokens", "prompt")
    for name, num_blocks in (("10k", 10_000), ("100k", 100_000)):
        build = partial(UniquePrompts, num_blocks=num_blocks)
        yield from _caching(build, f"W4/{name}", f"2,048 new tokens, {name} blocks", "prompt")
    yield from _with_events(SharedPrefix, "W3e", "W3", "prompt")
    yield from _with_events(partial(UniquePrompts, num_blocks=10_000), "W4e", "W4/10k", "prompt")
    for name, num_blocks in (("10k", 10_000), ("100k", 100_000)):
        chats = partial(replay_chats, num_blocks=num_blocks)
        yield from _caching(chats, f"W5/{name}", f"chats, {name} blocks", "turn")
    yield from _caching(replay_mooncake, "W5m", "Mooncake trace, 100k blocks", "request")
    yield Case("W6", "8 children of 1,000 tokens", "child or token", FORK, Fork)
    yield Case("W7", "free 100,000 tokens", "free", ALLOCATE, FreeLong)
    freeing = partial(FreeLong, caching=True)
    yield Case("W7c", "free 100,000 cached tokens", "free", CACHE, freeing)
    yield Case("W8", "memory of the bookkeeping", "block", MEMORY, Memory, 1, "bytes")


CASES = tuple(_cases())


def select(names: list[str]) -> list[Case]:
    """The cases that names ask for: a key, or its beginning up to a slash. `ValueError` for others."""
    chosen = [case for case in CASES if any(_fits(case.key, name) for name in names)]
    unknown = [name for name in names if not any(_fits(case.key, name) for case in CASES)]
    if unknown:
        known = ", ".join(case.key for case in CASES)
        raise ValueError(f"workloads are {known}; got {', '.join(unknown)}")
    return chosen if names else list(CASES)


def _fits(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}/")
