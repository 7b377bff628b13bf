"""A naive model of groups with windows: a table a group and sets of content, looked through whole.

What is evicted is read off the blocks that the manager hands out, and must have been allowed; what a
prompt finds, needs and gets, and what every table and every slot holds, follows from first principles.
Slots remember the group that wrote them, so a block that two groups use at once is noticed.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import pytest

from kvblocks import BlockManager, OutOfBlocks, StepPlan, Verdict, When

GARBAGE = (-1, -1)


@dataclass
class Windowed:
    """A sequence: its tokens, the node of each position, a table for each group, its lengths."""

    tokens: list[int]
    nodes: list[int]
    tables: list[list[int]]
    computed: int
    committed: int
    last_step: int = 0


class WindowEngine:
    """A manager with windows, who uses it, and what must be true."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        *,
        caching: bool,
        policy: str = "lru",
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311 -- replayable, not secret
        self.n, self.size, self.windows, self.caching = num_blocks, block_size, windows, caching
        self.manager = BlockManager(
            num_blocks, block_size, windows=windows, prefix_caching=caching, policy=policy
        )
        self.groups = range(len(windows) + 1)
        self.children: dict[tuple[int, int], int] = {}  # histories: node and token -> node
        self.before: dict[int, int] = {}  # the last node of a full block -> that of the one before
        self.present: list[dict[int, int]] = [{} for _ in self.groups]  # last node -> block
        self.seqs: dict[int, Windowed] = {}
        self.past: list[list[int]] = []
        self.slots = [GARBAGE] * (num_blocks * block_size)
        self.fence: dict[int, int] = {}
        self.step = self.completed = self.names = 0
        self.num_hits = self.num_shortened = self.num_evicted = 0

    # ── what is where ────────────────────────────────────────────────────────────────────────

    def walk(self, tokens: Iterable[int]) -> list[int]:
        node, nodes = 0, []
        for position, token in enumerate(tokens):
            node = self.children.setdefault((node, token), len(self.children) + 1)
            nodes.append(node)
            if (position + 1) % self.size == 0:
                self.before[node] = nodes[position - self.size] if position >= self.size else 0
        return nodes

    def first_read(self, group: int, position: int) -> int:
        """The first block that a query at this position, or a later one, reads."""
        return max(0, position - self.windows[group - 1] + 1) // self.size if group else 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def num_holders(self, block: int) -> int:
        return sum(table.count(block) for seq in self.seqs.values() for table in seq.tables)

    def states(self) -> dict[str, set[int]]:
        tables = [table for seq in self.seqs.values() for table in seq.tables]
        held = {block for table in tables for block in table} - {-1}
        kept = {block for present in self.present for block in present.values()}
        rest = set(range(self.n)) - held
        fenced = {block for block in rest if self.fence.get(block, 0) > self.completed}
        cached = (rest - fenced) & kept
        return {"held": held, "fenced": fenced, "cached": cached, "free": rest - fenced - kept}

    def give_up(self, blocks: Iterable[int], last_step: int) -> None:
        for block in blocks:
            self.fence[block] = max(self.fence.get(block, 0), last_step)

    def hand_out(self, blocks: list[int]) -> None:
        """New blocks are free ones; only when these are used up, cached ones, leaves first."""
        states = self.states()
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= states["free"] | states["cached"]
        if len(blocks) <= len(states["free"]):
            assert set(blocks) <= states["free"], "evicted although there were free blocks"
        for present in self.present:
            for node in [node for node, block in present.items() if block in blocks]:
                del present[node]
                self.num_evicted += 1
        full = self.present[0]
        for node in full:
            assert self.before[node] in {0, *full}, "a block was evicted before one that follows"
        for present in self.present[1:]:
            for node in set(present) - set(full):
                assert self.num_holders(present.pop(node)) == 0
        for block in blocks:
            self.slots[block * self.size : (block + 1) * self.size] = [GARBAGE] * self.size

    def judge(self, num_needed: int, longest: int, hits: set[int]) -> Verdict:
        states = self.states()
        available = len(states["free"] | states["cached"] - hits)
        if longest > self.n:
            return Verdict(When.NEVER, num_needed, available)
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available)
        for step in range(self.completed + 1, self.step + 1):
            back = {block for block in states["fenced"] - hits if self.fence[block] <= step}
            if num_needed <= available + len(back):
                return Verdict(When.AFTER_STEP, num_needed, available, step)
        return Verdict(When.LATER, num_needed, available)

    def refuse(self, call: Callable[[], object], verdict: Verdict) -> None:
        before = self.manager.state_digest()
        with pytest.raises(OutOfBlocks) as caught:
            call()
        assert caught.value.verdict == verdict
        assert self.manager.state_digest() == before

    # ── what an engine does ──────────────────────────────────────────────────────────────────

    def find(self, ends: list[int]) -> int:
        """How many blocks a prompt finds whose full blocks end in these nodes."""
        most = 0
        while most < len(ends) and ends[most] in self.present[0]:
            most += 1
        for k in range(most, -1, -1):
            if all(
                ends[i] in self.present[group]
                for group in self.groups
                for i in range(self.first_read(group, k * self.size), k)
            ):
                self.num_shortened += k < most
                return k
        raise AssertionError("an empty prefix is always found")

    def allocate(self) -> None:
        known = [seq.tokens for seq in self.seqs.values()] + self.past
        tokens = self.some_tokens(3 * self.size + 2)
        if known and self.rng.random() < 0.7:
            continued = self.rng.choice(known)
            tokens = continued[: self.rng.randint(0, len(continued))] + tokens
        nodes = self.walk(tokens)
        ends = nodes[self.size - 1 : len(nodes) - 1 : self.size]
        k, total = self.find(ends) if self.caching else 0, self.num_blocks_for(len(tokens))
        tables, needed = [], 0
        for group in self.groups:
            start = self.first_read(group, k * self.size)
            found = [self.present[group][ends[i]] for i in range(start, k)]
            tables.append([-1] * start + found)
            depth = -(-(self.windows[group - 1] - 1) // self.size) if group else total
            needed += min(total, max(k, depth) + 1) - k
        hits = {block for table in tables for block in table} - {-1}
        verdict = self.judge(needed, needed + len(hits), hits)
        assert list(self.manager.match(tokens).block_ids) == tables[0]
        assert self.manager.can_allocate(tokens) == verdict
        self.names += 1
        name = self.names
        if not verdict.is_now:
            self.refuse(lambda: self.manager.allocate(name, tokens), verdict)
            return
        answer = self.manager.allocate(name, tokens)
        assert (answer.num_cached_tokens, answer.num_new_blocks) == (k * self.size, needed)
        self.num_hits += k
        self.seqs[name] = Windowed(tokens, nodes, tables, k * self.size, k * self.size)
        whole = [self.manager.block_table(name, group).tolist() for group in self.groups]
        assert [table[: len(found)] for table, found in zip(whole, tables, strict=True)] == tables
        self.hand_out([b for old, new in zip(tables, whole, strict=True) for b in new[len(old) :]])
        assert whole[0] == list(answer.block_ids)
        self.seqs[name].tables = whole

    def append(self) -> None:
        names = self.rng.sample(list(self.seqs), self.rng.randint(1, len(self.seqs)))
        entries: dict[int, list[int]] = {}
        for name in names:
            seq = self.seqs[name]
            n = self.rng.choice((1, 1, 2, self.rng.randint(1, 2 * self.size + 1)))
            missing = seq.computed + n - len(seq.tokens)
            entry = seq.tokens[seq.computed : seq.computed + n]
            entries[name] = entry + [self.rng.randrange(2) for _ in range(missing)]
        counts = {name: len(entry) for name, entry in entries.items()}
        batch = entries if self.caching else counts
        replaced = [self.replaced_by(group, counts) for group in self.groups]
        needed, longest = 0, 0
        for name, n in counts.items():
            seq, with_tables = self.seqs[name], 0
            stop = self.num_blocks_for(seq.computed + n)
            for group, table in enumerate(seq.tables):
                needed += len(replaced[group][name]) + max(0, stop - len(table))
                with_tables += max(stop, len(table)) - self.first_read(group, seq.computed)
            longest = max(longest, with_tables)
        verdict = self.judge(needed, longest, set())
        assert self.manager.can_append(batch) == verdict
        if not verdict.is_now:
            self.refuse(lambda: self.manager.append(batch), verdict)
            self.free()
            return
        plan = self.manager.append(batch)
        for name, entry in entries.items():
            seq = self.seqs[name]
            seq.tokens[seq.computed : seq.computed + len(entry)] = entry
            seq.nodes = self.walk(seq.tokens)
        gained = plan.new_blocks_by_group
        self.hand_out([block for news in gained for blocks in news.values() for block in blocks])
        copies = [
            copy
            for name in counts
            for group in self.groups
            for copy in self.change_table(name, group, replaced, list(gained[group].get(name, ())))
        ]
        assert sorted(tuple(copy) for copy in plan.copies) == sorted(copies)
        self.write(plan, counts)

    def replaced_by(self, group: int, counts: dict[int, int]) -> dict[int, list[int]]:
        """The table indices that each entry replaces: what others hold when its turn comes."""
        holders = {block: self.num_holders(block) for block in range(self.n)}
        plans: dict[int, list[int]] = {}
        for name, n in counts.items():
            seq = self.seqs[name]
            table = seq.tables[group]
            stop = min(len(table), self.num_blocks_for(seq.computed + n))
            plans[name] = [
                i for i in range(seq.computed // self.size, stop) if holders[table[i]] > 1
            ]
            for i in plans[name]:
                holders[table[i]] -= 1
        return plans

    def change_table(
        self, name: int, group: int, replaced: list[dict[int, list[int]]], new: list[int]
    ) -> list[tuple[int, int, int]]:
        seq, copies = self.seqs[name], []
        table = seq.tables[group]
        if self.step > self.completed:
            seq.last_step = self.step
        for i in replaced[group][name]:
            source, block = table[i], new.pop(0)
            num_valid = min(self.size, seq.computed - i * self.size)
            if num_valid > 0:
                start, to = source * self.size, block * self.size
                self.slots[to : to + num_valid] = self.slots[start : start + num_valid]
                copies.append((source, block, num_valid))
            table[i] = block
            self.give_up([source], seq.last_step)
        table += new
        return copies

    def write(self, plan: StepPlan, counts: dict[int, int]) -> None:
        kept = {block for present in self.present for block in present.values()}
        assert plan.slot_mapping == plan.slot_mappings[0]
        for group, mapping in enumerate(plan.slot_mappings):
            slots = iter(mapping)
            for name, n in counts.items():
                seq = self.seqs[name]
                for position in range(seq.computed, seq.computed + n):
                    block = seq.tables[group][position // self.size]
                    assert next(slots) == block * self.size + position % self.size
                    assert self.num_holders(block) == 1, "a shared block is written"
                    assert block not in kept, "an indexed block is written"
                    self.slots[block * self.size + position % self.size] = (
                        group,
                        seq.nodes[position],
                    )
            assert next(slots, None) is None
        for name, n in counts.items():
            self.seqs[name].computed += n

    def commit(self) -> None:
        name = self.rng.choice(list(self.seqs))
        seq = self.seqs[name]
        n = (
            seq.computed
            if self.rng.random() < 0.7
            else self.rng.randint(seq.committed, seq.computed)
        )
        merges = self.manager.commit(name, n)
        changed = set()
        for i in range(seq.committed // self.size, n // self.size) if self.caching else ():
            node = seq.nodes[(i + 1) * self.size - 1]
            for group, table in enumerate(seq.tables):
                own = table[i]
                table[i] = self.present[group].setdefault(node, own)
                if table[i] != own:
                    changed.add((i, own, table[i], group))
                    self.give_up([own], seq.last_step)
        assert len(merges) == len(changed)
        assert {tuple(merge) for merge in merges} == changed
        seq.committed = n
        for group, table in enumerate(seq.tables):
            start = self.first_read(group, n)
            self.give_up([block for block in table[:start] if block >= 0], seq.last_step)
            table[:start] = [-1] * start

    def truncate(self) -> None:
        name = self.rng.choice(list(self.seqs))
        seq = self.seqs[name]
        n = self.rng.randint(seq.committed, seq.computed)
        self.manager.truncate(name, n)
        for table in seq.tables:
            self.give_up(table[self.num_blocks_for(n) :], seq.last_step)
            del table[self.num_blocks_for(n) :]
        del seq.tokens[n:], seq.nodes[n:]
        seq.computed = n

    def fork(self) -> None:
        name = self.rng.choice(list(self.seqs))
        seq = self.seqs[name]
        if seq.committed == seq.computed:
            self.names += 1
            self.manager.fork(name, self.names)
            self.seqs[self.names] = Windowed(
                seq.tokens[:],
                seq.nodes[:],
                [table[:] for table in seq.tables],
                seq.computed,
                seq.committed,
            )

    def free(self) -> None:
        name = self.rng.choice(list(self.seqs))
        self.manager.free(name)
        seq = self.seqs.pop(name)
        for table in seq.tables:
            self.give_up([block for block in table if block >= 0], seq.last_step)
        self.past = [*self.past[-3:], seq.tokens]

    def begin(self) -> None:
        if self.step - self.completed < 2:
            self.step = self.manager.begin_step()

    def complete(self) -> None:
        if self.completed < self.step:
            self.completed = self.rng.randint(self.completed + 1, self.step)
            self.manager.complete_step(self.completed)

    def some_tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(1, most))]

    def operate(self) -> None:
        operations = [(self.allocate, 5), (self.begin, 2), (self.complete, 3)]
        if self.seqs:
            is_crowded = len(self.seqs) > 4
            operations += [
                (self.append, 9),
                (self.commit, 14),
                (self.truncate, 2),
                (self.fork, 1 if is_crowded else 4),
                (self.free, 8 if is_crowded else 2),
            ]
        choices, weights = zip(*operations, strict=True)
        self.rng.choices(choices, weights)[0]()

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
            for group, table in enumerate(seq.tables):
                assert self.manager.block_table(name, group).tolist() == table
                start = self.first_read(group, seq.committed) * self.size
                read = [
                    self.slots[table[p // self.size] * self.size + p % self.size]
                    for p in range(start, seq.computed)
                ]
                assert read == [(group, node) for node in seq.nodes[start : seq.computed]]

    def verify_rarely(self) -> None:
        """To free sequences yields what nobody else holds, now or after the step that uses it."""
        names = self.rng.sample(list(self.seqs), self.rng.randint(0, len(self.seqs)))
        tables = [table for name in names for table in self.seqs[name].tables]
        held = [block for table in tables for block in table if block >= 0]
        yields = {block for block in held if held.count(block) == self.num_holders(block)}
        steps = {block: self.fence.get(block, 0) for block in yields}
        for name in names:
            for block in yields.intersection(chain(*self.seqs[name].tables)):
                steps[block] = max(steps[block], self.seqs[name].last_step)
        later = Counter(step for step in steps.values() if step > self.completed)
        freeing = self.manager.freeing(names)
        assert freeing.num_fenced_blocks == later
        assert freeing.num_blocks == len(yields) - later.total()
        found = self.manager.block_states()
        for state, blocks in self.states().items():
            assert {block for block, each in enumerate(found) if each.value == state} == blocks
        full = self.manager.why_full()
        assert full.num_blocks == (
            full.num_free_blocks
            + full.num_cached_blocks
            + sum(full.num_fenced_blocks.values())
            + full.num_shared_blocks
            + sum(holder.num_own_blocks for holder in full.holders)
        )
