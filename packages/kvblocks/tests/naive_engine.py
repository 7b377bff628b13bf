"""An engine and its device, simulated on top of the naive blocks, that use a real manager.

The engine knows the true history of each sequence, and asks for what a real one would; the device
executes copies and writes as late or as early as it could. Each answer is compared with the naive
one, and what each slot of the device holds with what must be there.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvblocks import (
    ALL_SALTS,
    Adapter,
    BlockCopy,
    BlockManager,
    InvalidLength,
    InvalidTokens,
    KVBlocksError,
    OutOfBlocks,
    UnknownSequence,
    Verdict,
    When,
)

from .helpers import interrupted
from .naive_blocks import Launch, Media, NaiveBlocks, Namespace, Seq

NAMESPACES: list[Namespace] = [
    *((None, None), ("", None), ("x", None)),
    *(("x", "x"), (None, "x"), (None, Adapter("x", generation=1))),
]


class Engine(NaiveBlocks):
    """A manager, the engine that uses it, its device, and what must be true."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool,
        partial: bool = False,
        policy: str = "lru",
        num_host: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, policy)
        self.rng = random.Random(seed)  # noqa: S311 -- replayable, not secret
        self.caching, self.partial = caching, partial
        self.manager = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=caching,
            partial_reuse=partial,
            policy=policy,
            num_host_blocks=num_host,
        )
        self.names = 0
        self.num_partial_hits = 0
        self.launches: dict[int, Launch] = {}

    # ── the device ───────────────────────────────────────────────────────────────────────────

    def run(self, launch: Launch) -> None:
        for source, destination, n in launch.swaps_out + launch.swaps_in + launch.copies:
            start, to = source * self.size, destination * self.size
            self.slots[to : to + n] = self.slots[start : start + n]
        for _, _, slot, node in launch.writes:
            self.slots[slot] = node
        for _, table, nodes in launch.reads:
            assert self.read(table, len(nodes)) == nodes, "a step read another history"
        launch.swaps_out, launch.swaps_in, launch.copies = [], [], []
        launch.writes, launch.reads = [], []

    def read(self, table: list[int], n: int) -> list[int]:
        return [self.slots[table[p // self.size] * self.size + p % self.size] for p in range(n)]

    # ── what an engine does ──────────────────────────────────────────────────────────────────

    def refuse(self, call: Callable[[], object], *errors: type[BaseException]) -> BaseException:
        before = self.manager.state_digest()
        with pytest.raises(errors) as caught:
            call()
        assert self.manager.state_digest() == before
        return caught.value

    def expect_refusal(self, call: Callable[[], object], verdict: Verdict) -> None:
        error = self.refuse(call, OutOfBlocks)
        assert isinstance(error, OutOfBlocks)
        assert error.verdict == verdict

    def some_tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(1, most))]

    def some_prompt(self) -> tuple[Namespace, list[int], Media]:
        """A prompt that often continues, cuts or repeats one that is there."""
        known = [*self.seqs.values(), *self.past]
        if known and self.often():
            seq = self.rng.choice(known)
            namespace = seq.namespace if self.often() else self.rng.choice(NAMESPACES)
            cut = self.rng.randint(0, len(seq.tokens))
            tokens = seq.tokens[:cut] + self.some_tokens(self.size + 1)
            media = {position: name for position, name in seq.media.items() if position < cut}
        else:
            namespace, tokens, media = (
                self.rng.choice(NAMESPACES),
                self.some_tokens(3 * self.size + 2),
                {},
            )
        if self.rng.random() < 0.2:
            media[self.rng.randrange(len(tokens))] = self.rng.choice("ab")
        return namespace, tokens, media

    def allocate(self) -> None:
        namespace, tokens, media = self.some_prompt()
        nodes = self.tree.walk(namespace, tokens, media)
        hits = self.match_naively(namespace, nodes) if self.caching else []
        sources: set[int] = set()
        num_partial = 0
        if self.partial:
            sources, num_partial = self.match_in_part(namespace, nodes, len(hits))
        lookahead = self.rng.choice((0, 0, 0, self.rng.randint(0, self.size)))
        total = self.num_blocks_for(len(tokens) + lookahead)
        needs = (total - len(hits), self.num_with_pins(total, hits))

        kwargs: dict[str, Any] = {"salt": namespace[0], "adapter": namespace[1]}
        if media or self.often():
            kwargs["media"] = list(media.items())
        match = self.manager.match(tokens, **kwargs)
        assert (list(match.block_ids), match.num_tokens) == (hits, len(hits) * self.size)
        assert match.num_partial_tokens == num_partial
        assert match.num_tokens + num_partial < len(tokens)
        kwargs["num_lookahead_tokens"] = lookahead
        verdict = self.manager.can_allocate(tokens, **kwargs)
        # Which of several sources is copied is free to choose.
        with_source = [self.judge(*needs, [*hits, source]) for source in sources]
        copies_at_once = [each for each in with_source if each.is_now]
        assert verdict in (copies_at_once or [self.judge(*needs, hits)]) or (
            len(sources) > 1 and verdict == self.judge(*needs, hits)
        )
        self.names += 1
        name = self.names
        if not verdict.is_now:
            self.expect_refusal(lambda: self.manager.allocate(name, tokens, **kwargs), verdict)
            return
        priority = self.rng.randint(-1, 1)
        answer = self.manager.allocate(name, iter(tokens), priority=priority, **kwargs)
        table, cached = list(answer.block_ids), len(hits) * self.size
        assert table[: len(hits)] == hits
        assert answer.num_new_blocks == total - len(hits) == len(table) - len(hits)
        num_copied = sum(copy.num_tokens for copy in answer.copies)
        assert answer.num_cached_tokens == cached + num_copied
        seq = Seq(
            namespace,
            media,
            tokens,
            nodes,
            table[: len(hits)],
            len(tokens),
            cached + num_copied,
            cached,
            priority,
        )
        seq.generation = self.generations.get(namespace, 0)
        self.use(seq)
        self.seqs[name] = seq
        source = self.hold_source(seq, answer.copies, sources, num_partial, table[len(hits) :])
        self.expect_handed_out(table[len(hits) :])
        seq.table = table
        self.copy_in_part(seq, answer.copies, source)

    def hold_source(
        self,
        seq: Seq,
        copies: tuple[BlockCopy, ...],
        sources: set[int],
        num_partial: int,
        new: list[int],
    ) -> Seq | None:
        """While blocks are taken, the source of a copy is nobody's to evict."""
        if not copies:
            return None
        self.num_partial_hits += 1
        ((source, destination, num_tokens),) = copies
        assert source in sources
        assert (destination, num_tokens) == (new[0], num_partial)
        holder = Seq(seq.namespace, {}, [], [], [source], 0, 0, 0)
        self.seqs[-1] = holder
        return holder

    def copy_in_part(self, seq: Seq, copies: tuple[BlockCopy, ...], holder: Seq | None) -> None:
        if holder is None:
            return
        del self.seqs[-1]
        open_step = self.step if self.is_open else 0
        self.give_up(self.path_to(holder.table[0]), open_step)
        launch = self.launches[self.step] if self.is_open else Launch()
        launch.copies += [(source, to, n) for source, to, n in copies]
        if self.is_open:
            seq.last_step = self.step
            seq.flights.append([self.step, seq.committed, seq.committed])
        else:
            self.run(launch)

    def path_to(self, block: int) -> list[int]:
        """A block and all before it that nobody else holds now, its end first."""
        key = next(key for key, b in self.present.items() if b == block)
        path = []
        while key in self.present:
            path.append(self.present[key])
            key = self.parent_of[key]
        return path

    def some_lengths(self) -> dict[int, int]:
        names = self.rng.sample(list(self.seqs), self.rng.randint(1, len(self.seqs)))
        most = 2 * self.size + 1
        return {name: self.rng.choice((1, 1, 2, self.rng.randint(1, most))) for name in names}

    def as_batch(self, lengths: dict[int, int]) -> dict[int, list[int] | int]:
        """Token ids where they are known or known by now, else counts; the truth grows along."""
        batch: dict[int, list[int] | int] = {}
        for name, n in lengths.items():
            seq = self.seqs[name]
            while len(seq.tokens) < seq.computed + n:
                seq.tokens.append(self.rng.randrange(2))
                end = seq.nodes[-1] if seq.nodes else self.tree.root(seq.namespace)
                seq.nodes.append(self.tree.step(end, (seq.tokens[-1], None)))
            ids = seq.tokens[seq.computed : seq.computed + n]
            batch[name] = n if seq.computed > seq.num_known or self.rng.random() < 0.5 else ids
        return batch

    def plan_naively(self, lengths: dict[int, int]) -> dict[int, list[int]]:
        """The table indices that each entry replaces: what others still hold when its turn comes."""
        holders = {b: self.num_holders(b) for b in range(self.n)}
        plans: dict[int, list[int]] = {}
        for name, n in lengths.items():
            seq = self.seqs[name]
            indices = range(seq.computed // self.size, self.num_blocks_for(seq.computed + n))
            plans[name] = [i for i in indices if i < len(seq.table) and holders[seq.table[i]] > 1]
            for i in plans[name]:
                holders[seq.table[i]] -= 1
        return plans

    def append(self, lengths: dict[int, int] | None = None) -> None:
        lengths = lengths or self.some_lengths()
        batch = self.as_batch(lengths)
        plans = self.plan_naively(lengths)
        grown = {
            name: max(len(self.seqs[name].table), self.num_blocks_for(self.seqs[name].computed + n))
            for name, n in lengths.items()
        }
        num_new = {
            name: len(plans[name]) + grown[name] - len(self.seqs[name].table) for name in grown
        }
        longest = [self.num_with_pins(n, self.seqs[name].table) for name, n in grown.items()]
        verdict = self.judge(sum(num_new.values()), max(longest), [])
        assert self.manager.can_append(batch) == verdict
        if not verdict.is_now:
            self.expect_refusal(lambda: self.manager.append(batch), verdict)
            if verdict.when is not When.AFTER_STEP:
                self.free()
            return
        plan = self.manager.append(
            {name: v if isinstance(v, int) else iter(v) for name, v in batch.items()}
        )
        launch = self.launches[self.step] if self.is_open else Launch()
        slots, num_copies = iter(plan.slot_mapping), len(launch.copies)
        assert plan.new_blocks.keys() == {name for name, n in num_new.items() if n}
        for name, entry in batch.items():
            new = list(plan.new_blocks.get(name, ()))
            assert len(new) == num_new[name]
            seq = self.seqs[name]
            self.change_table(launch, seq, plans[name], new)
            self.schedule(launch, seq, lengths[name], slots)
            if not isinstance(entry, int):
                seq.num_known = max(seq.num_known, seq.computed)
        assert next(slots, None) is None
        copies = launch.copies[num_copies:]
        assert [tuple(copy) for copy in plan.copies] == copies
        assert {c[0] for c in copies}.isdisjoint(c[1] for c in copies)
        if not self.is_open:
            self.run(launch)

    def change_table(self, launch: Launch, seq: Seq, replaced: list[int], new: list[int]) -> None:
        self.expect_handed_out(new)
        if self.is_open:
            seq.last_step = self.step
            first = min([seq.computed, *(i * self.size for i in replaced)])
            seq.flights.append([self.step, seq.computed, first])
        for i in replaced:
            block = new.pop(0)
            num_valid = min(self.size, seq.computed - i * self.size)
            if num_valid > 0:
                launch.copies.append((seq.table[i], block, num_valid))
            source, seq.table[i] = seq.table[i], block
            self.give_up([source], seq.last_step)
        seq.table += new

    def schedule(self, launch: Launch, seq: Seq, n: int, slots: Iterator[int]) -> None:
        kept, fenced = set(self.present.values()), self.states()["fenced"]
        for position in range(seq.computed, seq.computed + n):
            slot = next(slots)
            block = seq.table[position // self.size]
            assert slot == block * self.size + position % self.size
            assert self.num_holders(block) == 1, "a shared block is written"
            assert block not in kept, "an indexed block is written"
            assert block not in fenced, "a fenced block is written"
            launch.writes.append((seq, position, slot, seq.nodes[position]))
        seq.computed += n
        launch.reads.append((seq, list(seq.table), seq.nodes[: seq.computed]))

    def commit(self) -> None:
        name, seq = self.some_sequence()
        n = seq.settled if self.often() else self.rng.randint(seq.committed, seq.settled)
        stop = seq.computed
        if seq.num_known < seq.computed and not self.often():
            stop = self.rng.randint(max(n, seq.num_known), seq.computed)
        late = seq.tokens[seq.num_known : stop]
        before = list(seq.table)
        merges = self.manager.commit(name, n, iter(late))
        if self.caching:
            for i in range(seq.committed // self.size, n // self.size):
                self.publish_naively(seq, i)
        changed = [(i, b, seq.table[i], 0) for i, b in enumerate(before) if b != seq.table[i]]
        assert [tuple(merge) for merge in merges] == changed
        seq.num_known += len(late)
        seq.committed = n

    def truncate(self) -> None:
        name, seq = self.some_sequence()
        n = self.rng.randint(seq.committed, seq.computed)
        self.manager.truncate(name, n)
        keep = max(self.num_blocks_for(n), seq.reserved)
        surplus = seq.table[keep:]
        del seq.table[keep:], seq.tokens[n:], seq.nodes[n:]
        self.give_up(surplus[::-1], seq.last_step)
        seq.num_known, seq.computed = min(seq.num_known, n), n
        seq.media = {position: name for position, name in seq.media.items() if position < n}
        for flight in seq.flights:
            flight[1] = min(flight[1], n)
        if self.is_open:  # the step is still being planned: it writes less now
            launch = self.launches[self.step]
            launch.writes = [w for w in launch.writes if w[0] is not seq or w[1] < n]
            launch.reads = [
                (s, table, nodes[:n] if s is seq else nodes) for s, table, nodes in launch.reads
            ]

    def fork(self) -> None:
        name, seq = self.some_sequence()
        self.names += 1
        child = self.names
        if seq.committed != seq.computed:
            self.refuse(lambda: self.manager.fork(name, child), InvalidLength)
            return
        self.manager.fork(name, child)
        self.seqs[child] = Seq(
            seq.namespace,
            seq.media,
            seq.tokens[: seq.num_known],
            seq.nodes[: seq.num_known],
            self.table_for_a_fork(seq),
            seq.num_known,
            seq.computed,
            seq.committed,
            seq.priority,
            seq.generation,
            flights=[list(flight) for flight in seq.flights],
        )
        if self.often():
            self.append({name: 1, child: 1})

    def table_for_a_fork(self, seq: Seq) -> list[int]:
        known = seq.num_known if self.caching else seq.computed
        return seq.table[: self.num_blocks_for(known)] if seq.reserved else list(seq.table)

    def reserve(self) -> None:
        lengths = {
            name: max(0, self.seqs[name].computed + self.rng.randint(-self.size, 3 * self.size))
            for name in self.rng.sample(list(self.seqs), min(2, len(self.seqs)))
        }
        todo = {name: n - self.seqs[name].computed for name, n in lengths.items()}
        plans = self.plan_naively({name: n for name, n in todo.items() if n > 0})
        plans |= {name: [] for name, n in todo.items() if n <= 0}
        grown = {
            name: max(len(self.seqs[name].table), self.num_blocks_for(n))
            for name, n in lengths.items()
        }
        num_new = {
            name: len(plans[name]) + grown[name] - len(self.seqs[name].table) for name in grown
        }
        kept = {
            block
            for name in lengths
            for i, block in enumerate(self.seqs[name].table)
            if i not in plans[name]
        }
        needed = sum(num_new.values())
        verdict = self.judge(needed, needed + len(kept | self.pinned), [])
        assert self.manager.can_reserve(lengths) == verdict
        if not verdict.is_now:
            self.expect_refusal(lambda: self.manager.reserve(lengths), verdict)
            return
        answer = self.manager.reserve(lengths)
        launch = self.launches[self.step] if self.is_open else Launch()
        num_copies = len(launch.copies)
        assert answer.new_blocks.keys() == {name for name, n in num_new.items() if n}
        for name, n in lengths.items():
            seq = self.seqs[name]
            last_step, flights = seq.last_step, len(seq.flights)
            self.change_table(launch, seq, plans[name], list(answer.new_blocks.get(name, ())))
            if not plans[name]:  # no step touches a block that is reserved
                seq.last_step = last_step
                del seq.flights[flights:]
            seq.reserved = self.num_blocks_for(n)
        assert [tuple(copy) for copy in answer.copies] == launch.copies[num_copies:]
        if not self.is_open:
            self.run(launch)

    def free(self) -> None:
        name, seq = self.some_sequence()
        self.manager.free(name)
        self.past.append(self.seqs.pop(name))
        self.give_up(seq.table[::-1], seq.last_step)

    def reset(self) -> None:
        salt = self.rng.choice((ALL_SALTS, None, "", "x"))
        namespaces = [each for each in NAMESPACES if salt in {ALL_SALTS, each[0]}]
        assert self.manager.reset_prefix_cache(salt=salt) == self.forget_naively(namespaces)

    def begin(self) -> None:
        if self.step - self.completed == 3:
            return
        if self.is_open and self.often():
            self.run_up_to(self.step)
        self.step += 1
        assert self.manager.begin_step() == self.step
        self.launches[self.step] = Launch()

    def run_up_to(self, step: int) -> None:
        for number in range(self.completed + 1, step + 1):
            self.run(self.launches[number])

    def complete(self) -> None:
        if not self.is_open:
            return
        step = self.step if self.often() else self.rng.randint(self.completed + 1, self.step)
        self.run_up_to(step)
        self.manager.complete_step(step)
        self.manager.complete_step(self.rng.randint(1, step))  # once more is no harm
        self.completed = step
        for seq in self.seqs.values():
            seq.flights = [flight for flight in seq.flights if flight[0] > step]

    @property
    def is_open(self) -> bool:
        return self.step > self.completed

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def often(self) -> bool:
        return self.rng.random() < 0.7

    def some_sequence(self) -> tuple[int, Seq]:
        return self.rng.choice(list(self.seqs.items()))

    def misuse(self) -> None:
        """A call that must fail, whatever the state, and leave no trace."""
        m = self.manager
        calls: list[tuple[Callable[[], object], type[BaseException]]] = [
            (lambda: m.free("none"), UnknownSequence),
            (lambda: m.fork("none", "child"), UnknownSequence),
            (lambda: m.allocate("new", [0, -1]), InvalidTokens),
            (lambda: m.allocate("new", interrupted([0, 1])), ZeroDivisionError),
            (lambda: m.complete_step(self.step + 1), ValueError),
        ]
        if self.seqs:
            name, seq = self.some_sequence()
            everyone: dict[object, int] = dict.fromkeys(self.seqs, 1)
            keeps_ids, known = m.prefix_caching, seq.computed < seq.num_known
            other = 1 - seq.tokens[seq.computed] if keeps_ids and known else -1
            too_many = [0] * self.n * self.size * 9 if keeps_ids else [-1]
            calls += [
                (lambda: m.allocate(name, [0]), KVBlocksError),
                (lambda: m.fork(name, name), KVBlocksError),
                (lambda: m.commit(name, seq.computed + 1), InvalidLength),
                (lambda: m.commit(name, seq.committed - 1), InvalidLength),
                (lambda: m.commit(name, seq.computed, interrupted([])), ZeroDivisionError),
                (lambda: m.commit(name, seq.computed, too_many), InvalidTokens),
                (lambda: m.truncate(name, seq.committed - 1), InvalidLength),
                (lambda: m.truncate(name, seq.computed + 1), InvalidLength),
                (lambda: m.append({**everyone, name: [other]}), InvalidTokens),
                (lambda: m.append({**everyone, name: []}), InvalidLength),
                (lambda: m.append({**everyone, "none": 1}), UnknownSequence),
                (lambda: m.append({**everyone, name: interrupted([])}), ZeroDivisionError),
                (lambda: m.append({**everyone, name: 10**12}), OutOfBlocks),
            ]
        self.refuse(*self.rng.choice(calls))

    # ── what must be true ────────────────────────────────────────────────────────────────────

    def verify(self) -> None:
        self.manager.check()
        stats, states = self.manager.stats(), self.states()
        assert {
            "held": stats.num_held_blocks,
            "fenced": stats.num_fenced_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks,
        } == {name: len(blocks) for name, blocks in states.items()}
        for name, seq in self.seqs.items():
            assert self.manager.block_table(name).tolist() == seq.table
            n = self.num_readable(seq)
            assert self.read(seq.table, n) == seq.nodes[:n], "a sequence reads another history"

    def num_readable(self, seq: Seq) -> int:
        """Positions of a sequence that are in its blocks by now."""
        return seq.readable

    def verify_rarely(self) -> None:
        for block in range(self.n):
            assert self.manager.ref_count(block) == self.num_holders(block)
        for name, seq in self.seqs.items():
            assert self.manager.num_computed_tokens(name) == seq.computed
            assert self.manager.num_committed_tokens(name) == seq.committed
            for i, digest in enumerate(self.manager.block_hashes(name)):
                node = seq.nodes[(i + 1) * self.size - 1]
                assert self.tree.hashes.setdefault(node, digest) == digest
        assert len(set(self.tree.hashes.values())) == len(self.tree.hashes)
        self.verify_freeing(self.rng.sample(list(self.seqs), self.rng.randint(0, len(self.seqs))))
        self.verify_occupancy()
        stored = {
            b * self.size + p % self.size
            for seq in self.seqs.values()
            for p in range(seq.computed)
            for b in [seq.table[p // self.size]]
        }
        assert self.manager.usage().num_stored_tokens == len(stored)

    def verify_freeing(self, names: list[int]) -> None:
        """What nobody but these holds could be had, at once or after the last of their steps."""
        others = {b for name, seq in self.seqs.items() if name not in names for b in seq.table}
        last_step: dict[int, int] = {}
        for seq in map(self.seqs.__getitem__, names):
            for block in set(seq.table) - others - self.pinned:
                steps = (last_step.get(block, 0), self.fence.get(block, 0), seq.last_step)
                last_step[block] = max(steps)
        fenced = Counter(step for step in last_step.values() if step > self.completed)
        answer = self.manager.freeing(iter(names))
        assert answer == (len(last_step) - fenced.total(), dict(sorted(fenced.items())))

    def verify_occupancy(self) -> None:
        answer, states = self.manager.why_full(), self.states()
        found = enumerate(self.manager.block_states())
        assert {block: state.value for block, state in found} == {
            block: state for state, blocks in states.items() for block in blocks
        }
        tables = [seq.table for seq in self.seqs.values()]
        counts = Counter(block for table in tables for block in table)
        own = {block for block, n in counts.items() if n == 1} - self.pinned
        assert answer.num_fenced_blocks == Counter(self.fence[b] for b in states["fenced"])
        assert answer.num_shared_blocks == len(counts.keys() - own)
        assert answer.num_pinned_blocks == len(self.pinned - counts.keys())
        for holder in answer.holders:
            seq = self.seqs[holder.seq_id]  # type: ignore[index]  # ints are all we use
            num_unused = len(seq.table) - self.num_blocks_for(seq.computed)
            assert holder[1:] == (len(seq.table), len(own & set(seq.table)), num_unused)
        parts = [answer.num_free_blocks, answer.num_cached_blocks, answer.num_shared_blocks]
        parts += [answer.num_pinned_blocks, *answer.num_fenced_blocks.values()]
        parts += [holder.num_own_blocks for holder in answer.holders]
        assert sum(parts) == self.n

    def operate(self) -> None:
        operations: list[tuple[Callable[[], None], float]] = [
            (self.allocate, 4),
            (self.begin, 4),
            (self.complete, 4),
            (self.misuse, 1),
            (self.reset, 0.3),
        ]
        if self.seqs:
            crowd = len(self.seqs) > 5
            operations += [
                (self.append, 8),
                (self.commit, 14),
                (self.truncate, 2),
                (self.fork, 2 if crowd else 6),
                (self.reserve, 1),
                (self.free, 9 if crowd else 2),
            ]
        choices, weights = zip(*operations, strict=True)
        self.rng.choices(choices, weights)[0]()
