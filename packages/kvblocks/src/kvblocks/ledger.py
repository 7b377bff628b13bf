"""What all of a manager's calls work on: the pool, the runs and the sequences, kept consistent.

Knows how blocks are judged, taken and published. Does not know the public calls, nor what a caller
may get wrong.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvblocks.errors import InvalidSwap, OutOfBlocks, SequenceExists, UnknownSequence
from kvblocks.events import EventLog
from kvblocks.hashing import TOKEN_BYTES, Digest, chain_packed, media_keys
from kvblocks.host import HostBlocks, Swapped
from kvblocks.lifetimes import Lifetimes
from kvblocks.memory import Memory
from kvblocks.pins import Pins
from kvblocks.policies import Policy
from kvblocks.pool import BlockPool
from kvblocks.results import (
    BlockCopy,
    BlockMerge,
    Durations,
    Forgotten,
    PinName,
    SequenceId,
    Stats,
    Usage,
    Verdict,
    When,
)
from kvblocks.runs import Found, cut_stretches
from kvblocks.sequence import Sequence, Write
from kvblocks.tree import RunTree
from kvblocks.windows import Windows


class Ledger:
    """The state of one manager."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        partial_reuse: bool,
        policy: Policy,
        max_pinned: int,
        num_host_blocks: int,
        windows: tuple[int, ...],
        digest: Digest,
        log: EventLog | None,
        memory: Memory | None,
        lifetimes: Lifetimes | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.partial_reuse = partial_reuse
        self.pool = BlockPool(num_blocks)
        self.digest = digest
        self.log = log
        self.memory = memory
        self.lifetimes = lifetimes
        self.needs_hashes = log is not None or memory is not None
        self.runs = RunTree(
            self.pool, block_size, policy, log=log, memory=memory, lifetimes=lifetimes
        )
        self.windows = Windows(self.pool, self.runs, block_size, windows)
        self.pins = Pins(self.runs, self.windows, max_pinned)
        self.host = HostBlocks(num_host_blocks)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.swapped: dict[SequenceId, Swapped] = {}  # those out of the pool
        self.arriving: set[int] = set()  # blocks that swaps or copies of the open step fill
        self.has_reservations = False  # whether there ever was one
        self.count: Counter[str] = Counter()
        self.peak_held = 0

    @property
    def num_held(self) -> int:
        """Blocks in tables, or pinned. O(1)."""
        runs, pool = self.runs, self.pool
        resting = runs.num_cached + runs.num_fenced + pool.num_fenced
        return self.num_blocks - pool.num_free - resting

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones. O(1)."""
        return self.pool.num_free + self.runs.num_cached

    def get(self, seq_id: SequenceId) -> Sequence:
        """A sequence in the pool, with its lengths up to date. `UnknownSequence`, `InvalidSwap`."""
        try:
            sequence = self.sequences[seq_id]
        except KeyError:
            raise self._absent(seq_id) from None
        if sequence.batch is not None:
            sequence.batch.settle(sequence)
        return sequence

    def get_all(self, seq_ids: Iterable[SequenceId]) -> list[Sequence]:
        """Sequences in the pool, with their lengths up to date. Raises what `get` does."""
        listed = self.get_tables(seq_ids)
        for sequence in listed:
            if sequence.batch is not None:
                sequence.batch.settle(sequence)
        return listed

    def get_tables(self, seq_ids: Iterable[SequenceId]) -> list[Sequence]:
        """Sequences in the pool, whose lengths are not asked for. Raises what `get` does."""
        try:
            return [self.sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise self._absent(error.args[0]) from None

    def find(self, seq_id: SequenceId) -> Sequence:
        """A sequence in the pool or out of it, with its lengths up to date. `UnknownSequence`."""
        swapped = self.swapped.get(seq_id)
        return swapped.sequence if swapped else self.get(seq_id)

    def _absent(self, seq_id: SequenceId) -> InvalidSwap | UnknownSequence:
        """Why a sequence is not in the pool."""
        if seq_id in self.swapped:
            return InvalidSwap(f"sequence {seq_id!r} is swapped out: swap it in first")
        return UnknownSequence(f"no sequence {seq_id!r}")

    def require_new(self, seq_id: SequenceId) -> None:
        """Refuse an id that is taken. `SequenceExists`."""
        if seq_id in self.sequences or seq_id in self.swapped:
            raise SequenceExists(f"a sequence {seq_id!r} exists already; free it first")

    def tick(self) -> None:
        """Read the caller's clock, if there is one. First in a call that changes something."""
        if self.lifetimes:
            self.lifetimes.tick()

    def leave_batch(self, sequence: Sequence) -> None:
        """Take a sequence that is about to change by itself out of its batch, if it is in one."""
        if sequence.batch is not None:
            sequence.batch.drop(sequence)

    def all_sequences(self) -> dict[SequenceId, Sequence]:
        """Every sequence in the pool, with its lengths up to date."""
        return dict(zip(self.sequences, self.get_all(self.sequences), strict=True))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_beside_pins(self, sequence: Sequence, num_blocks: int) -> int:
        """Of so many blocks of a sequence, those that are not pinned."""
        run = sequence.run
        return num_blocks - self.pins.num_pinned(run, len(run.blocks))

    def num_windows_beside_pins(self, write: Write) -> int:
        """Window blocks that a write needs to be there, once all before it is committed."""
        sequence, num_beside = write.sequence, 0
        stop = self.num_blocks_for(sequence.num_computed + write.num_tokens)
        for size, table in zip(self.windows.sizes, sequence.windows, strict=True):
            start = self.windows.start(size, sequence.num_computed)
            held = table.blocks[max(start, table.start) :]
            num_beside += (
                max(stop, len(table.blocks)) - start - self.pins.num_pinned_companions(held)
            )
        return num_beside

    def judge(
        self,
        num_needed: int,
        num_beside: int,
        reused_cached: int = 0,
        reused_fenced: Mapping[int, int] = MappingProxyType({}),
    ) -> Verdict:
        """Judge a need for new blocks.

        `num_beside` is what one sequence would have in all, beside what of it is pinned.
        What the need reuses of cached and of fenced blocks cannot be taken. O(open steps), and
        O(fenced runs) if it cannot be served now.
        """
        available = self.num_available - reused_cached
        if num_beside > self.num_blocks - self.pins.num_blocks:
            return Verdict(When.NEVER, num_needed, available)
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available)
        within_reach = available
        for step, num_fenced in sorted(self.fenced_blocks().items()):
            within_reach += num_fenced - reused_fenced.get(step, 0)
            if num_needed <= within_reach:
                return Verdict(When.AFTER_STEP, num_needed, available, step)
        return Verdict(When.LATER, num_needed, available)

    def fenced_blocks(self) -> Counter[int]:
        """How many blocks wait for each open step. O(fenced runs)."""
        fenced = Counter(self.windows.fenced.values())
        for step, blocks in self.pool.fenced.items():
            fenced[step] += len(blocks)
        for step, runs in self.runs.fenced.items():
            fenced[step] += sum(len(run.blocks) for run in runs)
        return +fenced

    def serve(self, verdict: Verdict) -> None:
        """Refuse what cannot be had now. `OutOfBlocks`."""
        if not verdict.is_now:
            self.count["refusals"] += 1
            raise OutOfBlocks(verdict)

    def take(self, num_blocks: int) -> array[int]:
        """Take blocks, free ones before cached ones. A verdict has made sure of enough."""
        if not num_blocks:
            return array("i")
        taken = self.pool.take(min(num_blocks, self.pool.num_free))
        if len(taken) < num_blocks:
            evict = self.windows.evict if self.windows.sizes else self.runs.evict
            taken += evict(num_blocks - len(taken))
        self.note_peak()
        return taken

    def note_peak(self) -> None:
        """Note how many blocks are held, if that is news. O(1)."""
        self.peak_held = max(self.peak_held, self.num_held)

    def note_arriving(self, blocks: Iterable[int]) -> None:
        """Note blocks that get their content in the open step, before it writes."""
        if self.pool.open_step:
            self.arriving.update(blocks)

    def exchange(
        self,
        sequence: Sequence,
        table: array[int],
        indices: Iterable[int],
        blocks: Iterable[int],
    ) -> list[BlockCopy]:
        """Give one of its tables blocks of its own for shared ones; returns copies of what is there."""
        copies = []
        for index, block in zip(indices, blocks, strict=False):
            source = table[index]
            if num_valid := sequence.num_valid(index):
                copies.append(BlockCopy(source, block, num_valid))
            table[index] = block
            self.pool.give_back(array("i", (source,)), sequence.last_step)
        self.note_arriving(copy.destination for copy in copies)
        self.count["copies"] += len(copies)
        return copies

    def hash_news(self, sequence: Sequence, num_tokens: int, news: array[int]) -> list[bytes]:
        """The keys of the blocks that a commit of `num_tokens` makes full; `news` are ids it brings.

        No keys if nobody could find the blocks. Changes nothing: a digest may raise.
        """
        start, size = sequence.num_run_blocks, self.block_size
        num_ids = (num_tokens // size - start) * size
        if num_ids <= 0 or not sequence.run.is_kept:
            return []
        tokens = sequence.token_ids[:num_ids]
        tokens += news[: num_ids - len(tokens)]
        media = {}
        if sequence.media:
            keys = media_keys(sequence.media, size)
            media = {index - start: key for index, key in keys.items() if index >= start}
        before = sequence.run.hashes
        root = before[-1] if before else sequence.namespace.root
        return chain_packed(root, tokens.tobytes(), size, media, self.digest)

    def publish(self, sequence: Sequence, hashes: list[bytes]) -> tuple[BlockMerge, ...]:
        """Make blocks findable that became full; exchange those whose content is here already.

        `hashes` are what `hash_news` said of them before anything changed.
        """
        num_full = sequence.num_committed // self.block_size
        start = sequence.num_run_blocks
        num_tokens = num_full * self.block_size - sequence.first_id
        tokens = sequence.token_ids[:num_tokens].tobytes()
        del sequence.token_ids[:num_tokens]
        sequence.first_id += num_tokens
        parent = sequence.run.hashes[-1:] if hashes else []
        merges: tuple[BlockMerge, ...] = ()
        if start and len(sequence.keys) == 1 and self.runs.can_grow(sequence.run):
            self.runs.grow(sequence.run, tokens, sequence.block_table[start:num_full], hashes)
            sequence.num_run_blocks = num_full
            num_known = 0
        else:
            merges, num_known = self._publish_stretches(sequence, tokens, hashes)
        if sequence.windows:
            merges = (*merges, *self.windows.publish(sequence, start))
        if num_known < len(hashes) and self.log:
            # What was here already comes first.
            self.log.stored(
                sequence.namespace,
                sequence.media,
                start + num_known,
                (parent + hashes[:num_known])[-1:],
                hashes=hashes[num_known:],
                tokens=tokens[num_known * self.block_size * TOKEN_BYTES :],
            )
        return merges

    def _publish_stretches(
        self, sequence: Sequence, tokens: bytes, hashes: list[bytes]
    ) -> tuple[tuple[BlockMerge, ...], int]:
        """Publish what follows a path, in stretches that something may stand before.

        Returns the blocks that were exchanged, and how many were here already.
        """
        start, width = sequence.num_run_blocks, self.block_size * TOKEN_BYTES
        num_known = 0
        merges: list[BlockMerge] = []
        for stretch in cut_stretches(tokens, start, sequence.keys, width):
            first = sequence.num_run_blocks
            stop = first + len(stretch.tokens) // width
            blocks, keys = sequence.block_table[first:stop], hashes[first - start : stop - start]
            published = self.runs.publish(sequence.run, stretch, blocks, sequence.priority, keys)
            if published.blocks:
                merges += self._merge(sequence, published.blocks)
                num_known += len(published.blocks)
            sequence.run, sequence.num_run_blocks = published.run, stop
        return tuple(merges), num_known

    def _merge(self, sequence: Sequence, adopted: array[int]) -> list[BlockMerge]:
        """Exchange the first unpublished blocks of a sequence for those of equal content."""
        start = sequence.num_run_blocks
        stop = start + len(adopted)
        given_up = sequence.block_table[start:stop]
        if given_up == adopted:
            return []  # one that was swapped in with it has published them
        sequence.block_table[start:stop] = adopted
        self.pool.give_back(given_up, sequence.last_step)
        self.count["merged_blocks"] += len(adopted)
        return list(map(BlockMerge, range(start, stop), given_up, adopted))

    def pin(self, name: PinName, key: bytes, found: Found, num_full: int) -> None:
        """Hold what was found under a name; see `Pins.pin`."""
        self.pins.pin(name, key, found, num_full)
        self.note_peak()

    def forget(self, key: bytes) -> Forgotten:
        """Forget the content of the namespaces whose keys begin so, and what of it is on its way."""
        self.pins.forget(key)
        of_windows = self.windows.forget(key) if self.windows.sizes else ()
        apart, forgotten = self.runs.forget(key)
        self.host.move(key, self.runs.root.serial, apart.serial)
        if of_windows:
            forgotten = Forgotten(*map(sum, zip(forgotten, of_windows, strict=True)))
        for sequence in (
            *self.sequences.values(),
            *(each.sequence for each in self.swapped.values()),
        ):
            if sequence.run is self.runs.root and sequence.namespace.key.startswith(key):
                sequence.run = apart
                self.runs.move_holder(apart)
        return forgotten

    def begin_step(self) -> int:
        """Open the next step and return its number. O(1)."""
        self.host.pool.begin_step()
        self.arriving.clear()
        return self.pool.begin_step()

    def complete_step(self, step: int) -> None:
        """Complete all steps up to `step`. O(blocks whose fence falls). `InvalidStep`."""
        if self.pool.complete_step(step):
            self.runs.complete_step(step)
            self.windows.complete_step(step)
            self.host.pool.complete_step(step)
            if not self.pool.open_step:
                self.arriving.clear()

    def usage(self) -> Usage:
        """What the blocks in tables hold, shared blocks counted once. O(blocks in all tables)."""
        stored: dict[int, int] = {}
        for sequence in self.all_sequences().values():
            for table, start in sequence.tables:
                for index in range(start, len(table)):
                    num_valid = max(stored.get(table[index], 0), sequence.num_valid(index))
                    stored[table[index]] = num_valid
        return Usage(len(stored), len(stored) * self.block_size, sum(stored.values()))

    def stats(self) -> Stats:
        """The counters. O(1)."""
        return Stats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.runs.num_cached,
            num_held_blocks=self.num_held,
            num_pinned_blocks=self.pins.num_blocks,
            num_fenced_blocks=self.pool.num_fenced + self.runs.num_fenced,
            peak_held_blocks=self.peak_held,
            num_sequences=len(self.sequences),
            num_swapped_sequences=len(self.swapped),
            num_host_blocks=self.host.pool.num_blocks,
            num_free_host_blocks=self.host.pool.num_free,
            num_held_host_blocks=self.host.num_held,
            num_fenced_host_blocks=self.host.pool.num_fenced,
            num_swapped_out_blocks=self.count["swapped_out_blocks"],
            num_swapped_in_blocks=self.count["swapped_in_blocks"],
            num_forks=self.count["forks"],
            num_copies=self.count["copies"],
            num_merged_blocks=self.count["merged_blocks"],
            num_evicted_blocks=self.runs.num_evicted,
            idle_time=self.lifetimes.idle if self.lifetimes else Durations(),
            lifetime=self.lifetimes.lifetime if self.lifetimes else Durations(),
            num_queried_tokens=self.count["queried_tokens"],
            num_cached_tokens=self.count["cached_tokens"],
            num_refusals=self.count["refusals"],
        )

    def state(self) -> tuple[object, ...]:
        """All that a caller could observe but the counter of refusals. O(state)."""
        pool = self.pool
        refusals = ("refusals", self.count["refusals"])
        return (
            (pool.free, sorted(pool.shared.items()), sorted(pool.touched.items())),
            (pool.step, pool.completed_step, sorted(pool.fenced.items())),
            (self.runs.state(), self.pins.state(), self.windows.state()),
            [
                (seq_id, sequence.state(pool.completed_step), self.runs.path_state(sequence.run))
                for seq_id, sequence in self.all_sequences().items()
            ],
            [
                (
                    seq_id,
                    sequence.state(pool.completed_step),
                    self.runs.path_state(sequence.run),
                    table,
                )
                for seq_id, (sequence, table) in self.swapped.items()
            ],
            (self.host.state(), sorted(self.arriving)),
            (self.peak_held, sorted((+self.count).items() - {refusals})),
        )
