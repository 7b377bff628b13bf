"""Swapping: sequences leave the device for host memory and come back, several at once, all or nothing.

    device [3 5 8]  ── swap_out: pairs (device block, host block) ──►  host [0 1 2]
    device [4 1 7]  ◄── swap_in: pairs (host block, device block) ──   host [0 1 2]

A sequence that is swapped out holds no device block. It keeps its ids, its lengths and its place below
the root of the prefix cache, or below what a reset has set apart, and so finds its content again.

Knows how swaps are read, judged and carried out on a ledger. Does not know who is to be swapped, or
how bytes are moved.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from kvblocks.errors import InvalidSwap
from kvblocks.hashing import TOKEN_BYTES
from kvblocks.host import Swapped, contents_of
from kvblocks.ledger import Ledger
from kvblocks.results import BlockSwap, SequenceId, Verdict
from kvblocks.runs import Found, Run, cut_stretches, path_of
from kvblocks.sequence import Sequence


class Leaving(NamedTuple):
    """A sequence to be swapped out: its known tokens, packed, and its content on the host."""

    seq_id: SequenceId
    sequence: Sequence
    base: Run
    tokens: bytes
    found: array[int]  # host blocks that hold its first blocks already
    num_blocks: int  # those that hold computed positions

    @property
    def moving(self) -> array[int]:
        """The device blocks whose content is not on the host."""
        return self.sequence.block_table[len(self.found) : self.num_blocks]


def read_leaving(ledger: Ledger, seq_ids: Iterable[SequenceId]) -> list[Leaving]:
    """Check who is to be swapped out, and find what is on the host already. Changes nothing."""
    leaving = []
    for seq_id in _read_once(seq_ids):
        sequence = ledger.get(seq_id)
        if sequence.num_committed != sequence.num_computed:
            raise InvalidSwap(
                f"sequence {seq_id!r} must have committed = computed to be swapped out, got "
                f"{sequence.num_committed} and {sequence.num_computed}: commit or truncate first"
            )
        base = _base_of(sequence.run, ledger.runs.root)
        tokens = ledger.runs.path_tokens(sequence.run) + sequence.token_ids.tobytes()
        found = ledger.host.find(base.serial, _contents(ledger, sequence, tokens))
        num_blocks = ledger.num_blocks_for(sequence.num_computed)
        leaving.append(Leaving(seq_id, sequence, base, tokens, found, num_blocks))
    _require_arrived(ledger, leaving)
    return leaving


def _require_arrived(ledger: Ledger, leaving: list[Leaving]) -> None:
    """Refuse to move what the same step brings: it carries out its swap-outs first."""
    for each in leaving if ledger.arriving else ():
        if not ledger.arriving.isdisjoint(each.moving):
            raise InvalidSwap(
                f"sequence {each.seq_id!r} has blocks that the open step swaps in or copies to: "
                f"swap it out in a later step"
            )


def judge_swap_out(ledger: Ledger, leaving: list[Leaving]) -> Verdict:
    """Judge the need for host blocks; what several share counts once."""
    num_moving = len(_moving(leaving))
    num_found = len({block for each in leaving for block in each.found})
    return ledger.host.judge(num_moving, num_found + num_moving)


def swap_out(ledger: Ledger, leaving: list[Leaving]) -> tuple[BlockSwap, ...]:
    """Give sequences host blocks for device blocks, all or nothing; see `BlockManager.swap_out`."""
    ledger.serve(judge_swap_out(ledger, leaving))
    host, step = ledger.host, ledger.pool.open_step
    moving = _moving(leaving)
    taken = host.pool.take(len(moving))
    host_of = dict(zip(moving, taken, strict=True))
    begun: set[int] = set()
    for each in leaving:
        sequence = each.sequence
        table = array("i", map(host_of.__getitem__, each.moving))
        host.pool.share(each.found)
        host.pool.share(begun.intersection(table))
        begun.update(table)
        table = each.found + table
        host.note(each.base.serial, table, _contents(ledger, sequence, each.tokens))

        ledger.leave_batch(sequence)
        del ledger.sequences[each.seq_id]
        _give_up_device_blocks(ledger, each, step)
        sequence.token_ids, sequence.first_id = array("I", each.tokens), 0
        sequence.last_step = step
        ledger.swapped[each.seq_id] = Swapped(sequence, table)
    ledger.count["swapped_out_blocks"] += len(moving)
    return tuple(map(BlockSwap, moving, taken))


def read_returning(ledger: Ledger, seq_ids: Iterable[SequenceId]) -> dict[SequenceId, Swapped]:
    """Check who is to be swapped in. Changes nothing."""
    returning = {}
    for seq_id in _read_once(seq_ids):
        if seq_id not in ledger.swapped:
            ledger.get(seq_id)
            raise InvalidSwap(f"sequence {seq_id!r} must be swapped out to be swapped in")
        returning[seq_id] = ledger.swapped[seq_id]
    return returning


def judge_swap_in(ledger: Ledger, returning: Iterable[Swapped]) -> Verdict:
    """Judge the need for device blocks; what is in the prefix cache is not needed, nor had."""
    return _plan_in(ledger, returning)[0]


def swap_in(ledger: Ledger, returning: dict[SequenceId, Swapped]) -> tuple[BlockSwap, ...]:
    """Give sequences device blocks again, all or nothing; see `BlockManager.swap_in`."""
    verdict, moving = _plan_in(ledger, returning.values())
    ledger.serve(verdict)
    hashes = {
        seq_id: ledger.hash_news(sequence, sequence.num_committed, array("I"))
        for seq_id, (sequence, _) in (returning.items() if ledger.needs_hashes else ())
    }
    # Before anything is evicted: what is found must stay.
    for swapped in returning.values():
        _hold_found(ledger, swapped.sequence)
    taken = ledger.take(len(moving))
    device_of = dict(zip(moving, taken, strict=True))
    step = ledger.pool.open_step
    begun: set[int] = set()
    for seq_id, (sequence, host_table) in returning.items():
        missing = host_table[sequence.num_run_blocks :]
        sequence.block_table.extend(map(device_of.__getitem__, missing))
        sequence.last_step = step if missing else 0
        del ledger.swapped[seq_id]
        ledger.sequences[seq_id] = sequence
        if sequence.keeps_ids and sequence.num_unpublished >= ledger.block_size:
            ledger.publish(sequence, hashes.get(seq_id, [])[sequence.num_run_blocks :])
        loose = sequence.loose_blocks
        ledger.pool.share(begun.intersection(loose))
        begun.update(loose)
        ledger.host.give_back(host_table, step)
    ledger.note_arriving(taken)
    ledger.count["swapped_in_blocks"] += len(moving)
    ledger.note_peak()
    return tuple(map(BlockSwap, moving, taken))


def free_swapped(ledger: Ledger, seq_id: SequenceId) -> None:
    """Give up a sequence that is swapped out. O(its blocks)."""
    sequence, host_table = ledger.swapped.pop(seq_id)
    ledger.host.give_back(host_table, sequence.last_step)
    ledger.runs.release(sequence.run, 0)


def _read_once(seq_ids: Iterable[SequenceId]) -> list[SequenceId]:
    listed: dict[SequenceId, None] = {}
    for seq_id in seq_ids:
        if seq_id in listed:
            raise InvalidSwap(f"a sequence is swapped once in a call, got {seq_id!r} again")
        listed[seq_id] = None
    return list(listed)


def _base_of(run: Run, root: Run) -> Run:
    """What a path hangs from: the root, or the run without blocks that a reset has set apart."""
    top = root
    for each in path_of(run):
        top = each
    return top if not top.blocks else root


def _contents(ledger: Ledger, sequence: Sequence, tokens: bytes) -> Iterator[bytes]:
    """What a sequence's full blocks hold; nothing that could be told without a prefix cache."""
    num_full = sequence.num_committed // ledger.block_size if sequence.keeps_ids else 0
    return contents_of(tokens, sequence.keys, ledger.block_size * TOKEN_BYTES, num_full)


def _moving(leaving: list[Leaving]) -> dict[int, None]:
    """The device blocks to be copied, each once. Equal content is one device block."""
    return dict.fromkeys(chain.from_iterable(each.moving for each in leaving))


def _give_up_device_blocks(ledger: Ledger, leaving: Leaving, step: int) -> None:
    """Release a table. The open step reads what is moved; the blocks behind that it does not."""
    sequence, num_blocks = leaving.sequence, leaving.num_blocks
    surplus = sequence.block_table[num_blocks:]
    loose = sequence.block_table[sequence.num_run_blocks : num_blocks]
    ledger.pool.give_back(surplus, sequence.last_step)
    ledger.pool.give_back(loose, step)
    ledger.runs.add_holder(leaving.base)
    ledger.runs.release(sequence.run, step)
    sequence.run, sequence.num_run_blocks = leaving.base, 0
    sequence.block_table = array("i")
    sequence.num_reserved_blocks = 0


def _find_on_device(ledger: Ledger, sequence: Sequence) -> Found:
    if not sequence.keeps_ids:
        return ledger.runs.find((), sequence.run)
    num_full = sequence.num_committed // ledger.block_size
    full = sequence.token_ids[: num_full * ledger.block_size].tobytes()
    width = ledger.block_size * TOKEN_BYTES
    return ledger.runs.find(cut_stretches(full, 0, sequence.keys, width), sequence.run)


def _plan_in(ledger: Ledger, returning: Iterable[Swapped]) -> tuple[Verdict, dict[int, None]]:
    """Whether they can come back, and the host blocks to be copied, each once."""
    found = []
    moving: dict[int, None] = {}
    for sequence, host_table in returning:
        found.append(_find_on_device(ledger, sequence))
        moving.update(dict.fromkeys(host_table[len(found[-1].blocks) :]))
    used: dict[Run, int] = {}  # of each run on the paths that were found, how many blocks
    for run, num_blocks, _ in found:
        for each in path_of(run):
            used[each] = max(used.get(each, 0), num_blocks if each is run else len(each.blocks))
    cached, fenced = 0, dict[int, int]()
    for run, num_blocks in used.items():
        if run.fence:
            fenced[run.fence] = fenced.get(run.fence, 0) + num_blocks
        elif not run.holders:
            cached += num_blocks
    num_beside = len(moving) + sum(used.values()) - ledger.pins.num_pinned_of(used)
    return ledger.judge(len(moving), num_beside, cached, fenced), moving


def _hold_found(ledger: Ledger, sequence: Sequence) -> None:
    """Hold what a sequence finds of its content on the device; its table begins with it."""
    found = _find_on_device(ledger, sequence)
    base = sequence.run
    sequence.run = ledger.runs.hold(found, sequence.priority)
    ledger.runs.release(base, 0)
    sequence.block_table = found.blocks
    sequence.num_run_blocks = len(found.blocks)
    sequence.first_id = len(found.blocks) * ledger.block_size
    del sequence.token_ids[: sequence.first_id]
