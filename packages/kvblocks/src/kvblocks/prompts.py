"""Admitting a prompt: what of it is cached, what it needs, and the sequence that comes of it.

Knows how a prompt is read, judged and given its blocks on a ledger. Does not know what happens to a
sequence afterwards.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from kvblocks.errors import InvalidLength, InvalidTokens
from kvblocks.hashing import (
    TOKEN_BYTES,
    Adapter,
    Media,
    Namespace,
    keys_of,
    make_namespace,
    pack_tokens,
    read_media,
)
from kvblocks.ledger import Ledger
from kvblocks.results import Allocation, BlockCopy, SequenceId, Verdict
from kvblocks.runs import Found, Partial, Stretch, cut_stretches
from kvblocks.sequence import Sequence, WindowTable

_NAMESPACE = make_namespace()
_KEYS = keys_of(_NAMESPACE, (), 1)


class Prompt(NamedTuple):
    """A prompt as it was read, and what of it is cached: whole blocks, and a part of the next one."""

    num_tokens: int
    tokens: array[int]  # none where only their number is known
    namespace: Namespace
    media: tuple[Media, ...]
    keys: Mapping[int, bytes]  # what stands before blocks: the namespace, media
    found: Found
    partial: Partial | None


def read_prompt(
    ledger: Ledger,
    tokens: Iterable[int] | int,
    salt: str | None,
    adapter: Adapter | str | int | None,
    media: Iterable[Media],
) -> Prompt:
    """Pack a prompt and find its cached prefix. Changes nothing."""
    if isinstance(tokens, int) and not ledger.prefix_caching:
        packed, num_tokens = array("I"), tokens
    else:
        packed = pack_tokens(tokens)  # type: ignore[arg-type]  # which refuses a count
        num_tokens = len(packed)
    if num_tokens < 1:
        raise InvalidTokens(f"a prompt must have at least 1 token, got {num_tokens}")
    namespace = make_namespace(salt, adapter)
    items = read_media(media) if media != () else ()
    keys = keys_of(namespace, items, ledger.block_size)
    if not ledger.prefix_caching:
        found = ledger.runs.find(())
        return Prompt(num_tokens, packed, namespace, items, keys, found, None)
    # One token is always left to compute: its logits are what a prompt is run for.
    num_full = (num_tokens - 1) // ledger.block_size
    found = find_prefix(ledger, packed, num_full, keys)
    partial = None
    if ledger.partial_reuse:
        index = len(found.blocks)
        start = index * ledger.block_size
        rest = packed[start : min(start + ledger.block_size, num_tokens - 1)]
        partial = ledger.runs.find_partial(found, Stretch(keys.get(index, b""), rest.tobytes()))
    return Prompt(num_tokens, packed, namespace, items, keys, found, partial)


def find_prefix(
    ledger: Ledger, packed: array[int], num_full: int, keys: Mapping[int, bytes]
) -> Found:
    """What is cached of the first `num_full` blocks of a prompt."""
    full = bytes(memoryview(packed)[: num_full * ledger.block_size])
    found = ledger.runs.find(cut_stretches(full, 0, keys, ledger.block_size * TOKEN_BYTES))
    return ledger.windows.reach(found) if ledger.windows.sizes else found


def judge_allocation(
    ledger: Ledger, prompt: Prompt, num_lookahead_tokens: int
) -> tuple[Verdict, Partial | None]:
    """Judge a prompt's need for new blocks; and what to copy, if there is room beside its source."""
    num_total = ledger.num_blocks_for(prompt.num_tokens + num_lookahead_tokens)
    found, partial = prompt.found, prompt.partial
    beside = num_total - ledger.pins.num_pinned(found.run, found.num_blocks)
    if partial:
        cached, fenced = ledger.runs.reused(partial.run, partial.num_blocks + 1)
        verdict = ledger.judge(num_total - len(found.blocks), beside, cached, fenced)
        if verdict.is_now:
            return verdict, partial
    cached, fenced = ledger.runs.reused(found.run, found.num_blocks)
    num_needed = num_total - len(found.blocks)
    windows = ledger.windows
    if windows.sizes:
        num_new = sum(windows.num_new_blocks(len(found.blocks), num_total))
        companions = [*chain.from_iterable(windows.companions_of(found.blocks))]
        num_needed += num_new
        beside += num_new + len(companions) - ledger.pins.num_pinned_companions(companions)
        cached += windows.reused(companions, fenced)
    return ledger.judge(num_needed, beside, cached, fenced), None


def allocate(
    ledger: Ledger,
    seq_id: SequenceId,
    prompt: Prompt,
    priority: int,
    num_lookahead_tokens: int,
) -> Allocation:
    """Take blocks for a prompt, all or nothing; see `BlockManager.allocate`."""
    ledger.require_new(seq_id)
    verdict, partial = judge_allocation(ledger, prompt, num_lookahead_tokens)
    ledger.serve(verdict)

    num_tokens, found = prompt.num_tokens, prompt.found
    num_full = len(found.blocks) * ledger.block_size
    num_cached = num_full + (partial.num_tokens if partial else 0)
    # Before anything is evicted: a hit must not evict itself.
    run = ledger.runs.hold(found, priority)
    ledger.runs.count_hit(run)
    source = ledger.runs.hold_source(partial) if partial else None
    windows = ledger.windows
    if windows.sizes:
        windows.hold(chain.from_iterable(windows.companions_of(found.blocks)))
    new = ledger.take(verdict.num_needed_blocks)
    copies: tuple[BlockCopy, ...] = ()
    if partial and source:
        copies = (BlockCopy(source.blocks[-1], new[0], partial.num_tokens),)
        ledger.runs.release(source, ledger.pool.open_step)
        ledger.note_arriving(new[:1])
        ledger.count["copies"] += 1
    keeps_ids, block_table = ledger.prefix_caching, found.blocks + new
    tables: tuple[WindowTable, ...] = ()
    if windows.sizes:
        num_total = ledger.num_blocks_for(num_tokens + num_lookahead_tokens)
        tables = windows.open_tables(found.blocks, block_table[num_total:], num_total)
        del block_table[num_total:]
    ledger.sequences[seq_id] = Sequence(
        block_size=ledger.block_size,
        namespace=prompt.namespace,
        media=prompt.media,
        keys=prompt.keys,
        run=run,
        num_run_blocks=len(found.blocks),
        block_table=block_table,
        keeps_ids=keeps_ids,
        token_ids=prompt.tokens[num_full:] if keeps_ids else array("I"),
        first_id=num_full,
        num_committed=num_full,
        num_computed=num_cached,
        priority=priority,
        last_step=ledger.pool.open_step if partial else 0,
        windows=tables,
    )
    if keeps_ids:
        ledger.count["queried_tokens"] += num_tokens
        ledger.count["cached_tokens"] += num_cached
    return Allocation(num_cached, len(new), block_table[:], copies)


def allocate_count(
    ledger: Ledger, seq_id: SequenceId, num_tokens: int, priority: int, num_lookahead_tokens: int
) -> Allocation | None:
    """Take free blocks for so many tokens, where nothing is cached and the namespace is the plain one.

    The commonest call of such a manager, in the fewest steps. None, with nothing changed, where
    there is more to it, if only a refusal.
    """
    size, pool = ledger.block_size, ledger.pool
    num_blocks = -(-(num_tokens + num_lookahead_tokens) // size)
    is_short = num_blocks > pool.num_free
    if num_tokens < 1 or is_short or seq_id in ledger.sequences or seq_id in ledger.swapped:
        return None
    ledger.tick()
    table, root = pool.take(num_blocks), ledger.runs.root
    ledger.note_peak()
    root.holders += 1
    ledger.sequences[seq_id] = Sequence(
        size, _NAMESPACE, (), _KEYS, root, 0, table, False, array("I"), 0, 0, 0, priority
    )
    return Allocation(0, num_blocks, table[:], ())


def read_lookahead(num_lookahead_tokens: int) -> int:
    """Check a number of positions beyond the prompt."""
    num_lookahead_tokens = operator.index(num_lookahead_tokens)
    if num_lookahead_tokens < 0:
        raise InvalidLength(
            f"num_lookahead_tokens must not be negative, got {num_lookahead_tokens}"
        )
    return num_lookahead_tokens
