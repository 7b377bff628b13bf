"""The invariants of a manager, proved from scratch.

Knows every structure. Does not trust any counter: each is compared with what it counts.
"""

from collections import Counter
from collections.abc import Mapping

from kvblocks.errors import InvariantViolation
from kvblocks.events import AllBlocksCleared, BlockStored, EventLog
from kvblocks.hashing import NAMESPACE_BYTES, TOKEN_BYTES, Digest, chain_packed
from kvblocks.host import HostBlocks, Swapped, contents_of
from kvblocks.ledger import Ledger
from kvblocks.pool import BlockPool
from kvblocks.results import SequenceId
from kvblocks.runs import Run, path_of
from kvblocks.sequence import Sequence
from kvblocks.tree import RunTree

Sequences = Mapping[SequenceId, Sequence]


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 -- reads as "require (this)"
    if not holds:
        raise InvariantViolation(message)


def check(ledger: Ledger) -> None:
    """Prove all of a manager's invariants, or raise `InvariantViolation`."""
    pool, runs, sequences = ledger.pool, ledger.runs, ledger.all_sequences()
    swapped = {seq_id: each.sequence for seq_id, each in ledger.swapped.items()}
    everyone = sequences | swapped
    pins = [run for _, run in ledger.pins.held.values()]
    pinned = {block for end in pins for run in path_of(end) for block in run.blocks}
    pinned |= set(ledger.pins.companions)
    check_pool(ledger, sequences, pinned)
    check_holders(ledger, everyone, pins)
    check_runs(pool, runs, ledger.block_size)
    check_queue(runs)
    check_forgotten(runs, everyone, pins)
    check_sequences(sequences)
    check_paths(sequences, findable=ledger.prefix_caching)
    check_swapped(ledger.swapped)
    check_host(ledger.host, ledger.swapped)
    check_windows(ledger, sequences)
    if ledger.needs_hashes:
        check_keys(runs, everyone, ledger.block_size, ledger.digest)
    if ledger.log:
        check_events(runs, ledger.log)
    _require(
        len(pinned) == ledger.pins.num_blocks <= ledger.pins.max_blocks,
        f"{len(pinned)} blocks are pinned, {ledger.pins.num_blocks} counted, of at most "
        f"{ledger.pins.max_blocks}",
    )


def check_pool(ledger: Ledger, sequences: Sequences, pinned: set[int]) -> None:
    """free + cached + held + fenced = pool over all groups, and no block is in two states."""
    pool, runs, windows = ledger.pool, ledger.runs, ledger.windows
    tables = [table[start:] for seq in sequences.values() for table, start in seq.tables]
    held = {block for table in tables for block in table} | pinned
    cached = [b for run in runs if not run.holders and not run.fence for b in run.blocks]
    fenced_runs = [b for fenced in runs.fenced.values() for run in fenced for b in run.blocks]
    fenced_loose = [block for blocks in pool.fenced.values() for block in blocks]
    free = pool.free
    all_cached = [*cached, *windows.cached]
    all_fenced = [*fenced_runs, *fenced_loose, *windows.fenced]
    _require(
        Counter([*free, *all_cached, *all_fenced, *held]) == Counter(range(pool.num_blocks)),
        f"{len(free)} free + {len(all_cached)} cached + {len(held)} held + "
        f"{len(all_fenced)} fenced blocks must be the pool of {pool.num_blocks}, each once",
    )
    counted = (runs.num_cached, runs.num_fenced, pool.num_fenced)
    found = (
        len(all_cached),
        len(fenced_runs) + len(windows.fenced),
        len(fenced_loose),
    )
    _require(
        counted == found,
        f"cached, fenced in runs and fenced loose: {counted} counted, {found} found",
    )
    steps = {*pool.fenced, *pool.touched.values(), *(s for s in runs.fenced if runs.fenced[s])}
    steps |= set(windows.fenced.values())
    _require(
        all(pool.completed_step < step <= pool.step for step in steps),
        f"blocks wait for the steps {sorted(steps)}, open are "
        f"{pool.completed_step + 1}..{pool.step}",
    )


def check_holders(ledger: Ledger, sequences: Sequences, pins: list[Run]) -> None:
    """A run is held by the paths that end in it and by held children; another block by tables."""
    pool, runs = ledger.pool, ledger.runs
    holders = Counter([*pins, *(sequence.run for sequence in sequences.values())])
    held = {run for end in [*holders] for run in path_of(end)}
    for run in held:
        assert run.parent is not None, "a path leaves the root out"
        holders[run.parent] += 1
    holders[runs.root] += 1
    for run in {runs.root, *runs, *held}:
        _require(
            run.holders == holders[run],
            f"a run has {run.holders} holders counted, {holders[run]} found",
        )
    tables = Counter(block for sequence in sequences.values() for block in sequence.loose_blocks)
    tables += ledger.pins.companions
    for sequence in sequences.values():
        for table in sequence.windows:
            tables.update(table.held)
    shared = {block: count for block, count in tables.items() if count > 1}
    _require(shared == pool.shared, f"loose blocks are shared {shared}, counted {pool.shared}")


def check_runs(pool: BlockPool, runs: RunTree, block_size: int) -> None:
    """Runs are whole, found under their keys, and none rests before its children do."""
    blocks: Counter[int] = Counter()
    for run in runs:
        parent = run.parent
        assert parent is not None, "only the root has none"
        blocks.update(run.blocks)
        _require(
            len(run.tokens) == 4 * block_size * len(run.blocks) > 0,
            f"a run of {len(run.blocks)} blocks has {len(run.tokens)} bytes of tokens",
        )
        _require(
            parent.children.get(run.key) is run
            and run.key.endswith(bytes(run.tokens[: 4 * block_size])),
            "a run must be found under its first block's tokens",
        )
        _require(bool(parent.holders) or not run.holders, "a held run must hold its parent")
        if not parent.holders:
            _require(
                parent.last_used >= run.last_used and parent.fence >= run.fence,
                "a run must not be evicted before its children",
            )
        _require(
            not run.fence or (not run.holders and run in runs.fenced[run.fence]),
            f"a run waits for step {run.fence} without resting there",
        )
        _require(
            parent is runs.root
            or (parent.num_hits >= run.num_hits and parent.priority >= run.priority),
            "who used a run must have used its parent",
        )
    _require(max(blocks.values(), default=1) == 1, "no block is in two runs")
    _require(not blocks.keys() & pool.shared.keys(), "no block of a run is loose")


def check_queue(runs: RunTree) -> None:
    """Each cached leaf is in the queue of eviction once, and not behind its turn."""
    queued = Counter(run for _, _, run in runs.queue.entries)
    _require(max(queued.values(), default=1) == 1, "no run is in the queue of eviction twice")
    for run in runs:
        _require(bool(run.queued) == (run in queued), "a run must know whether it is queued")
        _require(
            run in queued or not run.is_resting_leaf,
            "a cached leaf must be in the queue of eviction",
        )
    ranks = [entry[:2] for entry in runs.queue.entries]
    _require(
        all(ranks[(at - 1) // 2] < ranks[at] for at in range(1, len(ranks))),
        "the queue of eviction must be a heap",
    )
    for rank, _, run in runs.queue.entries:
        now = runs.queue.policy.rank(run)
        _require(not now < rank, f"a run is queued at {rank}, and ranks {now} now")


def check_forgotten(runs: RunTree, sequences: Sequences, pins: list[Run]) -> None:
    """What is found from the root is kept; all else is held, and hangs together as it did."""
    found = set(runs)
    ends = [*pins, *(sequence.run for sequence in sequences.values())]
    held = {run for end in ends for run in path_of(end)}
    for run in found | held:
        _require(run.is_kept == (run in found), "a run is kept exactly if it can be found")
    for run in held - found:
        children = run.children.values()
        _require(
            all(child.parent is run and child.holders for child in children),
            "what cannot be found must be held",
        )


def check_sequences(sequences: Sequences) -> None:
    """committed <= computed <= capacity, and every committed position has a known token id."""
    for seq_id, seq in sequences.items():
        _require(
            0 <= seq.num_committed <= seq.num_computed <= seq.capacity,
            f"sequence {seq_id!r}: committed {seq.num_committed} <= computed {seq.num_computed} "
            f"<= capacity {seq.capacity} must hold",
        )
        _require(
            seq.num_reserved_blocks <= len(seq.block_table),
            f"sequence {seq_id!r}: {seq.num_reserved_blocks} blocks reserved, "
            f"{len(seq.block_table)} in the table",
        )
        _require(
            seq.num_committed <= seq.num_known,
            f"sequence {seq_id!r}: {seq.num_committed} committed, {seq.num_known} ids known",
        )
        _require(
            len(set(seq.block_table)) == len(seq.block_table),
            f"sequence {seq_id!r} holds a block twice: {list(seq.block_table)}",
        )


def check_paths(sequences: Sequences, *, findable: bool) -> None:
    """A table begins with the blocks of its path; with a prefix cache these are all that are full."""
    for seq_id, seq in sequences.items():
        path = [run.blocks for run in path_of(seq.run)]
        blocks = [block for stretch in reversed(path) for block in stretch]
        table = list(seq.block_table[: seq.num_run_blocks])
        _require(
            blocks == table, f"sequence {seq_id!r}: the path holds {blocks}, the table {table}"
        )
        num_full = seq.num_committed // seq.block_size
        _require(
            seq.num_run_blocks == num_full or not findable,
            f"sequence {seq_id!r}: {num_full} full blocks, {seq.num_run_blocks} published",
        )


def check_swapped(swapped: Mapping[SequenceId, Swapped]) -> None:
    """Who is swapped out is settled, and has host blocks for its positions and none on the device."""
    for seq_id, (seq, table) in swapped.items():
        num_blocks = -(-seq.num_computed // seq.block_size)
        _require(
            seq.num_committed == seq.num_computed and len(table) == num_blocks,
            f"sequence {seq_id!r}: {seq.num_committed} committed, {seq.num_computed} computed, in "
            f"{len(table)} host blocks",
        )
        _require(
            not (seq.block_table or seq.num_run_blocks or seq.run.blocks or seq.batch),
            f"sequence {seq_id!r} is swapped out and holds {list(seq.block_table)}",
        )


def check_host(host: HostBlocks, swapped: Mapping[SequenceId, Swapped]) -> None:
    """free + held + fenced = the host's blocks; shared ones are counted, full ones have names."""
    pool = host.pool
    tables = Counter(block for each in swapped.values() for block in each.host_table)
    fenced = [block for blocks in pool.fenced.values() for block in blocks]
    _require(
        Counter([*pool.free, *fenced, *tables]) == Counter(range(pool.num_blocks))
        and pool.num_fenced == len(fenced),
        f"{len(pool.free)} free + {len(tables)} held + {len(fenced)} fenced host blocks must be the "
        f"{pool.num_blocks} there are, each once, and {pool.num_fenced} fenced",
    )
    shared = {block: count for block, count in tables.items() if count > 1}
    _require(shared == pool.shared, f"host blocks are shared {shared}, counted {pool.shared}")
    names: dict[int, tuple[int, bytes]] = {}
    for seq, table in swapped.values():
        num_full = seq.num_committed // seq.block_size if seq.keeps_ids else 0
        width = seq.block_size * TOKEN_BYTES
        before = -seq.run.serial
        contents = contents_of(seq.token_ids.tobytes(), seq.keys, width, num_full)
        for block, content in zip(table, contents, strict=False):
            names[block] = before, content
            before = block
    _require(
        names == host.name_of, "each full host block must be known by its content, and no other"
    )
    _require(
        {name: block for block, name in names.items()} == host.block_of,
        "equal content must be in one host block",
    )


def check_windows(ledger: Ledger, sequences: Sequences) -> None:
    """Companions belong to blocks that can be found; tables begin where their windows do."""
    windows = ledger.windows
    pairs = {
        block: full
        for companion in windows.companions
        for full, block in enumerate(companion)
        if block >= 0
    }
    known = {block: full for block, full in enumerate(windows.full_block_of) if full >= 0}
    _require(pairs == known, f"companions are {pairs}, and {known} from the other side")
    found = {block for run in ledger.runs for block in run.blocks}
    _require(found >= set(pairs.values()), "a companion's full block must be findable")
    resting = {*windows.cached, *windows.fenced}
    _require(resting <= set(pairs), "only companions rest in windows")
    for seq_id, seq in sequences.items():
        for group, table in enumerate(seq.windows):
            start = windows.start(windows.sizes[group], seq.num_committed)
            _require(
                table.start == start and set(table.blocks[:start]) <= {-1},
                f"sequence {seq_id!r}: window {group} must begin at block {start}, got "
                f"{list(table.blocks)}",
            )
            _require(
                seq.num_computed <= len(table.blocks) * seq.block_size,
                f"sequence {seq_id!r}: {seq.num_computed} computed, {len(table.blocks)} window blocks",
            )
            if seq.run.is_kept:
                published = range(start, seq.num_run_blocks)
                full = [windows.companions[group][seq.block_table[i]] for i in published]
                _require(
                    full == list(table.blocks[start : seq.num_run_blocks]),
                    f"sequence {seq_id!r}: companions {full} must be in its table",
                )


def check_keys(runs: RunTree, sequences: Sequences, block_size: int, digest: Digest) -> None:
    """The keys of a run are the chain of its tokens, from the key before them on.

    Before a first run stands the root of a namespace, which only sequences know in full.
    """
    roots = {seq.namespace.key: seq.namespace.root for seq in sequences.values()}
    width = TOKEN_BYTES * block_size
    for run in runs:
        parent, keys, start = run.parent, run.hashes, 0
        assert parent is not None, "only the root has none"
        media = run.key[NAMESPACE_BYTES if parent is runs.root else 0 : -width]
        root = parent.hashes[-1] if parent.hashes else roots.get(run.key[:NAMESPACE_BYTES])
        if root is None:
            root, media, start = keys[0], b"", 1
        chain = chain_packed(
            root,
            bytes(run.tokens[start * width :]),
            block_size,
            {0: media} if media else {},
            digest,
        )
        _require(
            keys[start:] == chain and len(keys) == len(run.blocks),
            f"the {len(keys)} keys of a run of {len(run.blocks)} blocks must be those of its tokens",
        )


def check_events(runs: RunTree, log: EventLog) -> None:
    """The events so far have made as many keys findable as there are, and those that wait, these."""
    keys = Counter(key for run in runs for key in run.hashes)
    _require(
        keys.total() == log.num_live,
        f"{keys.total()} keys can be found, {log.num_live} by the events",
    )
    for event in reversed(log.waiting):  # back to what there was before them
        if isinstance(event, AllBlocksCleared):
            _require(not keys, f"{keys.total()} keys came before all were cleared")
            return
        named = Counter(event.block_hashes)
        if isinstance(event, BlockStored):
            _require(named <= keys, "what an event stored must be there or removed by another")
            keys -= named
        else:
            keys += named
