"""An engine that swaps sequences to host memory and back, on top of the one that pins.

Host block *i* is block `n + i` of the simulated memory, so that a swap is a copy like any other.
"""

from collections.abc import Iterable
from itertools import chain

from kvblocks import InvalidSwap, SequenceExists, UnknownSequence, Verdict, When

from .naive_blocks import GARBAGE, Launch, Seq
from .naive_pins import PinningEngine


class SwappingEngine(PinningEngine):
    """What must be true of swaps: content goes where it is said to, shared blocks stay shared."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        block_size: int,
        num_host: int,
        *,
        caching: bool,
        policy: str = "lru",
    ) -> None:
        super().__init__(
            seed, num_blocks, block_size, caching=caching, policy=policy, num_host=num_host
        )
        self.num_host = num_host
        self.slots += [GARBAGE] * (num_host * block_size)
        self.swapped: dict[int, Seq] = {}  # their tables are of host blocks
        self.on_host: dict[tuple[int, int], int] = {}  # generation, last node of a full block
        self.host_fence: dict[int, int] = {}
        self.num_swaps_out = self.num_swaps_in = self.num_found = 0

    @property
    def host_held(self) -> set[int]:
        return {block for seq in self.swapped.values() for block in seq.table}

    @property
    def host_states(self) -> dict[str, set[int]]:
        rest = set(range(self.num_host)) - self.host_held
        fenced = {block for block in rest if self.host_fence.get(block, 0) > self.completed}
        return {"held": self.host_held, "fenced": fenced, "free": rest - fenced}

    def judge_host(self, num_needed: int, num_total: int) -> Verdict:
        states = self.host_states
        available = len(states["free"])
        if num_total > self.num_host:
            return Verdict(When.NEVER, num_needed, available, pool="host")
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available, pool="host")
        for step in range(self.completed + 1, self.step + 1):
            back = [block for block in states["fenced"] if self.host_fence[block] <= step]
            if num_needed <= available + len(back):
                return Verdict(When.AFTER_STEP, num_needed, available, step, pool="host")
        return Verdict(When.LATER, num_needed, available, pool="host")

    def found_in(self, present: dict[tuple[int, int], int], seq: Seq) -> list[int]:
        """The blocks that hold the first full blocks of a sequence, host blocks or others."""
        found = []
        for end in range(self.size, seq.committed + 1, self.size):
            if not self.caching or (seq.generation, seq.nodes[end - 1]) not in present:
                break
            found.append(present[seq.generation, seq.nodes[end - 1]])
        return found

    @property
    def arriving(self) -> set[int]:
        """What the open step swaps in or copies to."""
        launch = self.launches[self.step] if self.is_open else Launch()
        return {destination for _, destination, _ in launch.swaps_in + launch.copies}

    def move(self, out: list[tuple[int, int]], back: Iterable[tuple[int, int]] = ()) -> None:
        """Copy whole blocks when the device comes to it."""
        launch = self.launches[self.step] if self.is_open else Launch()
        launch.swaps_out += [(source, destination, self.size) for source, destination in out]
        launch.swaps_in += [(source, destination, self.size) for source, destination in back]
        if not self.is_open:
            self.run(launch)

    def swap_out(self) -> None:
        settled = [name for name, seq in self.seqs.items() if seq.committed == seq.computed]
        names = self.some_of(settled if self.rng.random() < 0.95 else list(self.seqs))
        if not set(names) <= set(settled):
            self.refuse(lambda: self.manager.can_swap_out(names), InvalidSwap)
            self.refuse(lambda: self.manager.swap_out(names), InvalidSwap)
            return
        found = {name: self.found_in(self.on_host, self.seqs[name]) for name in names}
        moving: dict[int, None] = {}
        for name in names:
            num_blocks = self.num_blocks_for(self.seqs[name].computed)
            moving |= dict.fromkeys(self.seqs[name].table[len(found[name]) : num_blocks])
        if not self.arriving.isdisjoint(moving):
            self.refuse(lambda: self.manager.can_swap_out(names), InvalidSwap)
            self.refuse(lambda: self.manager.swap_out(names), InvalidSwap)
            return
        num_found = len(set(chain.from_iterable(found.values())))
        verdict = self.judge_host(len(moving), len(moving) + num_found)
        assert self.manager.can_swap_out(iter(names)) == verdict
        if not verdict.is_now:
            self.expect_refusal(lambda: self.manager.swap_out(names), verdict)
            return
        swaps = self.manager.swap_out(iter(names))
        assert [swap.source for swap in swaps] == list(moving)
        taken = {swap.destination for swap in swaps}
        assert len(taken) == len(swaps)
        assert taken <= self.host_states["free"]
        for block in taken:
            start = (self.n + block) * self.size
            self.slots[start : start + self.size] = [GARBAGE] * self.size
        self.move([(source, self.n + destination) for source, destination in swaps])
        for name in names:
            self.leave_device(name, found[name], dict(swaps))
        self.num_swaps_out += len(swaps)

    def leave_device(self, name: int, found: list[int], host_of: dict[int, int]) -> None:
        seq = self.seqs.pop(name)
        seq.reserved = 0
        num_blocks = self.num_blocks_for(seq.computed)
        used, surplus = seq.table[:num_blocks], seq.table[num_blocks:]
        self.give_up(surplus[::-1], seq.last_step)
        self.give_up(used[::-1], self.step if self.is_open else 0)
        seq.last_step = self.step if self.is_open else 0
        seq.flights = []
        seq.table = found + [host_of[block] for block in used[len(found) :]]
        if self.caching:
            for i in range(seq.committed // self.size):
                self.on_host[seq.generation, seq.nodes[(i + 1) * self.size - 1]] = seq.table[i]
        self.swapped[name] = seq

    def swap_in(self) -> None:
        if not self.swapped:
            return
        names = self.some_of(list(self.swapped))
        found = {name: self.found_in(self.present, self.swapped[name]) for name in names}
        hits = set(chain.from_iterable(found.values()))
        moving: dict[int, None] = {}
        for name in names:
            moving |= dict.fromkeys(self.swapped[name].table[len(found[name]) :])
        beside = len(hits) + len(moving) + len(self.pinned - hits)
        verdict = self.judge(len(moving), beside, list(hits))
        assert self.manager.can_swap_in(iter(names)) == verdict
        if not verdict.is_now:
            self.expect_refusal(lambda: self.manager.swap_in(names), verdict)
            return
        swaps = self.manager.swap_in(iter(names))
        assert [swap.source for swap in swaps] == list(moving)
        host_tables = {name: self.swapped[name].table for name in names}
        for name in names:
            self.seqs[name] = self.swapped.pop(name)
            self.seqs[name].table = found[name]
        self.expect_handed_out([swap.destination for swap in swaps])
        self.move([], [(self.n + source, destination) for source, destination in swaps])
        for name in names:
            self.enter_device(self.seqs[name], host_tables[name], dict(swaps))
        self.num_swaps_in += len(swaps)
        self.num_found += len(hits)

    def enter_device(self, seq: Seq, host_table: list[int], device_of: dict[int, int]) -> None:
        num_found = len(seq.table)
        missing = host_table[num_found:]
        seq.table = seq.table + [device_of[block] for block in missing]
        seq.last_step = self.step if missing and self.is_open else 0
        if self.caching:
            for i in range(num_found, seq.committed // self.size):
                self.publish_naively(seq, i)
        self.give_up_host(host_table, self.step if self.is_open else 0)

    def give_up_host(self, blocks: list[int], last_step: int) -> None:
        for block in blocks:
            self.host_fence[block] = max(self.host_fence.get(block, 0), last_step)
        held = self.host_held
        self.on_host = {key: block for key, block in self.on_host.items() if block in held}

    def free_swapped(self) -> None:
        if not self.swapped:
            return
        name = self.rng.choice(list(self.swapped))
        self.manager.free(name)
        seq = self.swapped.pop(name)
        self.past.append(seq)
        self.give_up_host(seq.table, seq.last_step)

    def misuse_swaps(self) -> None:
        m = self.manager
        self.refuse(lambda: m.swap_in([*self.swapped, "none"]), UnknownSequence)
        self.refuse(lambda: m.swap_out([*self.seqs, "none"]), UnknownSequence, InvalidSwap)
        if self.seqs:
            name, _ = self.some_sequence()
            self.refuse(lambda: m.swap_in([*self.swapped, name]), InvalidSwap)
        if self.swapped:
            name = self.rng.choice(list(self.swapped))
            calls = [
                lambda: m.append({**dict.fromkeys(self.seqs, 1), name: 1}),
                lambda: m.commit(name, 1),
                lambda: m.truncate(name, 0),
                lambda: m.fork(name, "child"),
                lambda: m.block_table(name),
                lambda: m.swap_out([*self.seqs, name]),
                lambda: m.swap_in([name, name]),
                lambda: m.decode_batch([name]),
            ]
            self.refuse(self.rng.choice(calls), InvalidSwap)
            self.refuse(lambda: m.allocate(name, [1]), SequenceExists)

    def some_of(self, names: list[int]) -> list[int]:
        return self.rng.sample(names, min(len(names), self.rng.choice((0, 1, 1, 1, 2, 2, 3))))

    def num_readable(self, seq: Seq) -> int:
        """Positions before the first block that a copy is still to come to."""
        return min(super().num_readable(seq), self.num_arrived(seq.table))

    def num_arrived(self, table: list[int]) -> int:
        launches = self.launches.values()
        coming = {move[1] for launch in launches for move in launch.swaps_out + launch.swaps_in}
        there = next((i for i, block in enumerate(table) if block in coming), len(table))
        return there * self.size

    def operate(self) -> None:
        if self.rng.random() < 0.25:
            calls = (self.swap_out, self.swap_in, self.free_swapped, self.misuse_swaps)
            self.rng.choices(calls, (10, 7, 1, 1))[0]()
        else:
            super().operate()

    def verify(self) -> None:
        super().verify()
        stats = self.manager.stats()
        assert stats.num_swapped_sequences == len(self.swapped)
        assert {
            "held": stats.num_held_host_blocks,
            "fenced": stats.num_fenced_host_blocks,
            "free": stats.num_free_host_blocks,
        } == {name: len(blocks) for name, blocks in self.host_states.items()}
        for seq in self.swapped.values():
            table = [self.n + block for block in seq.table]
            n = min(seq.computed, self.num_arrived(table))
            assert self.read(table, n) == seq.nodes[:n], "host memory holds another history"

    def verify_rarely(self) -> None:
        super().verify_rarely()
        for name, seq in self.swapped.items():
            assert self.manager.is_swapped(name)
            assert self.manager.num_computed_tokens(name) == seq.computed
            assert self.manager.num_committed_tokens(name) == seq.committed
            for i, digest in enumerate(self.manager.block_hashes(name)):
                node = seq.nodes[(i + 1) * self.size - 1]
                assert self.tree.hashes.setdefault(node, digest) == digest
        assert not any(self.manager.is_swapped(name) for name in self.seqs)
