"""What each block of a manager is used for, at a moment and over a replay.

Knows which kinds of use there are, how they follow each other, and where sequences come from. Does not
know how that is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from kvblocks.ledger import Ledger
from kvblocks.manager import BlockManager
from kvblocks.replay import Applied, Replay, id_of
from kvblocks.results import SequenceId, StepPlan

KINDS = ("held", "shared", "in flight", "cached", "pinned", "fenced", "free")
FREE = KINDS.index("free")


class Use(NamedTuple):
    """What a block is used for: the index of one of `KINDS`, and the sequences that hold it.

    `held` by one sequence or `shared` by several, `in flight` when one of them has scheduled positions
    in it that are not committed; `cached` and `pinned` by no sequence; `fenced` until a step completes.
    """

    kind: int
    holders: tuple[SequenceId, ...] = ()


class Frame(NamedTuple):
    """What calls changed: which blocks are used otherwise, and how many blocks are of each kind.

    `num_evicted`: blocks whose content was given up since the frame before.
    """

    number: int
    text: str
    changes: dict[int, Use]
    counts: tuple[int, ...]
    num_evicted: int


@dataclass
class Life:
    """A sequence from the call that made it to that which freed it, or None.

    `copies` are calls, each with the blocks that it copied for this sequence: source and destination.
    """

    seq_id: SequenceId
    parent: int | None  # the index of the life that it was forked from
    born: int
    num_cached_tokens: int = 0
    died: int | None = None
    copies: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class History:
    """A replay as it is drawn: frames, at most as many as asked for, and the lives of sequences."""

    num_blocks: int
    num_calls: int
    frames: list[Frame]
    lives: list[Life]


def block_map(manager: BlockManager) -> list[Use]:
    """The use of every block. O(pool + blocks in all tables).

    >>> manager = BlockManager(num_blocks=3, block_size=4)
    >>> _ = manager.allocate("a", [1, 2, 3])
    >>> [KINDS[use.kind] for use in block_map(manager)]
    ['held', 'free', 'free']
    """
    ledger = manager._ledger  # noqa: SLF001 -- it draws what the manager keeps to itself
    uses = [Use(KINDS.index("cached"))] * manager.num_blocks
    fenced: list[Iterable[int]] = [ledger.windows.fenced, *ledger.pool.fenced.values()]
    fenced += [run.blocks for runs in ledger.runs.fenced.values() for run in runs]
    for kind, blocks in (
        ("free", ledger.pool.free),
        ("fenced", chain.from_iterable(fenced)),
        ("pinned", ledger.pins.blocks),
    ):
        for block in blocks:
            uses[block] = Use(KINDS.index(kind))
    holders, in_flight = _holders(ledger)
    for block, names in holders.items():
        kind = "in flight" if block in in_flight else "shared" if len(names) > 1 else "held"
        uses[block] = Use(KINDS.index(kind), tuple(names))
    return uses


def _holders(ledger: Ledger) -> tuple[dict[int, list[SequenceId]], set[int]]:
    """Who holds each block in a table, and the blocks with positions that are not committed."""
    holders: dict[int, list[SequenceId]] = {}
    in_flight: set[int] = set()
    for seq_id, sequence in ledger.all_sequences().items():
        first = sequence.num_committed // ledger.block_size
        end = ledger.num_blocks_for(sequence.num_computed)
        for table, start in sequence.tables:
            for block in table[start:]:  # before that, a window has left blocks behind
                holders.setdefault(block, []).append(seq_id)
            if sequence.num_committed < sequence.num_computed:
                in_flight.update(table[first:end])
    return holders, in_flight


def observe(
    replay: Replay,
    num_calls: int,
    num_frames: int,
    seen: Callable[[Applied], None] = lambda _: None,
) -> History:
    """Carry out a replay of about `num_calls` calls and note what becomes of blocks and sequences.

    `seen` is called with each call. O(calls + frames x pool).
    """
    every = max(1, -(-num_calls // num_frames))
    uses = [Use(FREE)] * replay.manager.num_blocks
    history = History(replay.manager.num_blocks, 0, [], [])
    alive: dict[SequenceId, int] = {}
    applied = None
    for applied in replay:
        _note_lives(history.lives, alive, applied)
        if applied.number % every == 0:
            uses = _add_frame(history, uses, replay.manager, applied)
        seen(applied)
    if applied is not None:
        history.num_calls = applied.number
        if applied.number % every:
            _add_frame(history, uses, replay.manager, applied)
    return history


def _add_frame(
    history: History, before: Sequence[Use], manager: BlockManager, applied: Applied
) -> list[Use]:
    uses = block_map(manager)
    changes = {
        block: use for block, (use, old) in enumerate(zip(uses, before, strict=True)) if use != old
    }
    counted = Counter(use.kind for use in uses)
    counts = tuple(counted[kind] for kind in range(len(KINDS)))
    num_evicted = manager.stats().num_evicted_blocks
    num_evicted -= sum(frame.num_evicted for frame in history.frames)
    history.frames.append(Frame(applied.number, call_text(applied), changes, counts, num_evicted))
    return uses


def _note_lives(lives: list[Life], alive: dict[SequenceId, int], applied: Applied) -> None:
    if applied.error is not None:
        return
    number, answer = applied.number, applied.answer
    seq_id = id_of(applied.arguments.get("seq"))
    if applied.op == "allocate":
        alive[seq_id] = len(lives)
        copies = [(number, copy.source, copy.destination) for copy in answer.copies]
        lives.append(Life(seq_id, None, number, answer.num_cached_tokens, copies=copies))
    elif applied.op == "fork":
        child = id_of(applied.arguments["child"])
        lives.append(Life(child, alive[seq_id], number))
        alive[child] = len(lives) - 1
    elif applied.op == "free":
        lives[alive.pop(seq_id)].died = number
    elif isinstance(answer, StepPlan):
        owner = {
            block: seq
            for group in answer.new_blocks_by_group
            for seq, blocks in group.items()
            for block in blocks
        }
        for source, destination, _ in answer.copies:
            lives[alive[owner[destination]]].copies.append((number, source, destination))


def call_text(applied: Applied) -> str:
    """A call in a line, its tokens counted instead of listed."""
    said = ", ".join(f"{name}={_short(value)}" for name, value in applied.arguments.items())
    refused = f": {applied.error}" if applied.error is not None else ""
    return f"{applied.op}({said}){refused}"


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= 40:
        return text
    return f"{len(value)} items" if isinstance(value, list) else f"{text[:37]}..."


def life_order(lives: Sequence[Life]) -> Iterator[tuple[int, int]]:
    """Every life and how deep it stands, each right after what it was forked from."""
    children: dict[int | None, list[int]] = {}
    for index, life in enumerate(lives):
        children.setdefault(life.parent, []).append(index)
    stack = [(index, 0) for index in reversed(children.get(None, []))]
    while stack:
        index, depth = stack.pop()
        yield index, depth
        stack += [(child, depth + 1) for child in reversed(children.get(index, []))]
