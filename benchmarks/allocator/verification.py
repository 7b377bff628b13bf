"""Whether a block manager, as its adapter drives it, answers rightly: asked before it is timed.

Tables have the right length, no block is in two sequences that share nothing, slots are where the
tables say, cached prefixes are found and no others, what was freed can be had again, and a pool that
is too small says so.
"""

from __future__ import annotations

from itertools import chain

from benchmarks.allocator.adapters.base import Adapter, Can, free_all, num_blocks_for
from benchmarks.allocator.prompts import random_tokens
from benchmarks.allocator.workloads import WrongAnswerError, require, require_decoded, telling

BLOCK_SIZE = 16
NUM_BLOCKS = 64
WAYS = ("decode", "decode_together", "decode_singly")


def verify(make: type[Adapter]) -> None:
    """Run all checks, or raise `WrongAnswerError`."""
    _verify_pool(make(NUM_BLOCKS, BLOCK_SIZE, caching=False))
    if Can.DECODE in make.abilities:
        for way in WAYS:
            _verify_decoding(make, way, caching=False)
    if Can.CACHE in make.abilities:
        _verify_hits(make(NUM_BLOCKS, BLOCK_SIZE, caching=True))
        if Can.DECODE in make.abilities:
            for way in WAYS:
                _verify_decoding(make, way, caching=True)
    if Can.TELL in make.abilities:
        _verify_events(telling(make)(NUM_BLOCKS, BLOCK_SIZE, caching=True))


def _require_disjoint(tables: list[list[int]]) -> None:
    blocks = list(chain.from_iterable(tables))
    require(len(blocks), len(set(blocks)), "the number of different blocks")


def _verify_pool(adapter: Adapter) -> None:
    """Every usable block can be had, again and again, and not one more."""
    for first in (0, 10):
        lengths = [1, 15, 16, 17, 300, 500]
        seqs = [
            adapter.admit(first + i, adapter.pack(random_tokens(f"{i}", length)))[0]
            for i, length in enumerate(lengths)
        ]
        tables = [list(adapter.table(seq)) for seq in seqs]
        expected = [num_blocks_for(length, BLOCK_SIZE) for length in lengths]
        require(expected, [len(table) for table in tables], "the lengths of tables")
        _require_disjoint(tables)
        free_all(adapter, seqs)
        whole, _ = adapter.admit(first + 6, random_tokens("whole", NUM_BLOCKS * BLOCK_SIZE))
        require(NUM_BLOCKS, len(set(adapter.table(whole))), "the blocks of the whole pool")
        adapter.free(whole)
    try:
        adapter.admit(20, random_tokens("more", NUM_BLOCKS * BLOCK_SIZE + 1))
    except MemoryError:
        return
    raise WrongAnswerError("a prompt longer than the pool must be refused")


def _verify_decoding(make: type[Adapter], way: str, *, caching: bool) -> None:
    """Slots follow the tables over block boundaries, while sequences come and go."""
    adapter = make(NUM_BLOCKS, BLOCK_SIZE, caching=caching)
    lengths = [5, 16, 31]
    prompts = [
        adapter.pack(random_tokens(f"decode {i}", length)) for i, length in enumerate(lengths)
    ]
    seqs = [adapter.admit(i, prompt)[0] for i, prompt in enumerate(prompts)]
    batch = adapter.start(seqs, prompts)
    decode = getattr(adapter, way)
    for step in range(40):
        if step == 20:
            adapter.exchange(batch, 1, [(3, adapter.pack(random_tokens("join", 40)))])
            lengths = [*lengths[1:], 40]
        slots = adapter.slots(decode(batch, random_tokens(f"step {step}", len(lengths))))
        lengths = [length + 1 for length in lengths]
        tables = [list(adapter.table(seq)) for seq in adapter.sequences(batch)]
        require_decoded(adapter, tables, slots, lengths)
        _require_disjoint(tables)
    free_all(adapter, adapter.sequences(batch))
    whole, _ = adapter.admit(4, random_tokens("whole", NUM_BLOCKS * BLOCK_SIZE))
    require(NUM_BLOCKS, len(set(adapter.table(whole))), "the blocks of the whole pool")


def _verify_hits(adapter: Adapter) -> None:
    """A prefix is found in full blocks, never a whole prompt, never what only ends alike."""
    first = random_tokens("first", 100)
    seq, num_cached = adapter.admit(0, adapter.pack(first))
    require(0, num_cached, "cached tokens of a new prompt")
    longer, num_cached = adapter.admit(1, adapter.pack(first + random_tokens("more", 50)))
    require(96, num_cached, "cached tokens of a longer prompt")
    tables = list(adapter.table(seq)), list(adapter.table(longer))
    require(tables[0][:6], tables[1][:6], "the shared blocks")
    _require_disjoint([tables[0], tables[1][6:]])
    adapter.free(seq)
    other, num_cached = adapter.admit(2, adapter.pack([first[0] + 1, *first[1:]]))
    require(0, num_cached, "cached tokens of a prompt with another first token")
    _require_disjoint([list(adapter.table(longer)), list(adapter.table(other))])
    exact, num_cached = adapter.admit(3, list(first[:96]))
    require(80, num_cached, "cached tokens of a prompt that is cached whole")
    free_all(adapter, [longer, other, exact])
    again, num_cached = adapter.admit(4, adapter.pack(first))
    require(96, num_cached, "cached tokens of a prompt that came before")
    adapter.free(again)


def _verify_events(adapter: Adapter) -> None:
    """Each full block is told once, and none that was told before."""
    prompt = random_tokens("told", 100)
    seq, _ = adapter.admit(0, adapter.pack(prompt))
    require(6, adapter.num_told(adapter.take_events()), "the blocks told of a new prompt")
    longer, _ = adapter.admit(1, adapter.pack(prompt[:64] + random_tokens("tail", 40)))
    require(2, adapter.num_told(adapter.take_events()), "the blocks told of a prompt like it")
    free_all(adapter, [seq, longer])
