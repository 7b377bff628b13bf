"""The invariants of a manager, proved from scratch.

Knows every structure. Does not trust any counter: each is compared with what it counts.
"""

from collections import Counter
from collections.abc import Mapping

from kvblocks.errors import InvariantViolation
from kvblocks.pool import BlockPool
from kvblocks.prefix import PrefixIndex
from kvblocks.results import SequenceId
from kvblocks.sequence import Sequence


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 -- reads as "require (this)"
    if not holds:
        raise InvariantViolation(message)


def check_pool(pool: BlockPool) -> None:
    """free + cached + held + fenced = pool, and no block is in two states."""
    fenced = [block for blocks in pool.fenced.values() for block in blocks]
    held = [block for block, count in enumerate(pool.ref_counts) if count]
    seen = Counter([*pool.free, *pool.cached, *fenced, *held])
    _require(
        seen == Counter(range(pool.num_blocks)),
        f"{len(pool.free)} free + {len(pool.cached)} cached + {len(held)} held + {len(fenced)} "
        f"fenced blocks must be the pool of {pool.num_blocks}, each once",
    )
    _require(len(held) == pool.num_held, f"{len(held)} blocks are held, {pool.num_held} counted")
    _require(
        pool.keyed.isdisjoint(pool.free) and pool.keyed.issuperset(pool.cached),
        "cached blocks must be keyed, and free ones must not",
    )
    _require(
        all(pool.completed_step < s <= pool.step for s in (*pool.fenced, *pool.touched.values())),
        f"blocks are fenced by {sorted(pool.fenced)} and used in {pool.touched}, open steps are "
        f"{pool.completed_step + 1}..{pool.step}",
    )


def check_references(pool: BlockPool, sequences: Mapping[SequenceId, Sequence]) -> None:
    """A block's reference count is the number of tables that hold it."""
    holders = Counter(block for seq in sequences.values() for block in seq.block_table)
    for block, count in enumerate(pool.ref_counts):
        _require(
            count == holders[block],
            f"block {block} has reference count {count} and {holders[block]} holders",
        )


def check_index(pool: BlockPool, index: PrefixIndex) -> None:
    """Index and keyed blocks are a bijection, and no block outlives its parent."""
    items = dict(index.items())
    _require(
        items.keys() == pool.keyed and len(index) == len(items),
        f"{len(items)} blocks have a key, {len(pool.keyed)} are kept, {len(index)} are indexed",
    )
    order = {block: place for place, block in enumerate(pool.cached)}
    for block, (parent, tokens) in items.items():
        _require(index.find((parent, tokens)) == block, f"block {block} is not under its key")
        if isinstance(parent, int):
            _require(parent in items, f"block {block} is indexed, its parent {parent} is not")
            _require(
                order.get(parent, pool.num_blocks) >= order.get(block, pool.num_blocks)
                or parent not in order,
                f"parent {parent} would be evicted before its child {block}",
            )


def check_published(index: PrefixIndex, sequences: Mapping[SequenceId, Sequence]) -> None:
    """Every full committed block of a sequence is found under the sequence's own tokens."""
    for seq_id, seq in sequences.items():
        num_full = seq.num_committed // seq.block_size
        found = index.match(seq.root, seq.block_tokens(0, num_full))
        _require(
            found == seq.block_table[:num_full].tolist(),
            f"sequence {seq_id!r} holds {num_full} full committed blocks, its tokens lead to {found}",
        )


def check_sequences(sequences: Mapping[SequenceId, Sequence]) -> None:
    """committed <= computed <= capacity, and every committed position has a known token id."""
    for seq_id, seq in sequences.items():
        _require(
            0 <= seq.num_committed <= seq.num_computed <= seq.capacity,
            f"sequence {seq_id!r}: committed {seq.num_committed} <= computed {seq.num_computed} "
            f"<= capacity {seq.capacity} must hold",
        )
        _require(
            seq.num_committed <= len(seq.token_ids),
            f"sequence {seq_id!r}: {seq.num_committed} committed, {len(seq.token_ids)} ids known",
        )
        _require(
            len(set(seq.block_table)) == len(seq.block_table),
            f"sequence {seq_id!r} holds a block twice: {list(seq.block_table)}",
        )
