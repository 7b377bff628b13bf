"""The naive model of blocks: dicts and sets, looked through from one end to the other.

A history is a number: the node of a tree that grows by one token at a time, so two positions hold
the same KV exactly if their nodes are equal. Each namespace has a root of its own; a token behind which
media begin is another token.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvblocks import Adapter, Verdict, When

GARBAGE = -1
Namespace: TypeAlias = tuple[str | None, Adapter | str | None]  # salt, adapter
Media: TypeAlias = dict[int, str]  # position -> what begins there


class Histories:
    """The tree of all histories."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, object], int] = {}
        self.hashes: dict[int, bytes] = {}
        self.parents: dict[int, int] = {}
        self.tokens: dict[int, object] = {}
        self.namespaces: dict[int, Namespace] = {}

    def root(self, namespace: Namespace) -> int:
        root = self.step(-2, ("namespace", namespace))
        self.namespaces[root] = namespace
        return root

    def step(self, node: int, token: object) -> int:
        child = self.children.setdefault((node, token), len(self.children))
        self.parents[child], self.tokens[child] = node, token
        if node in self.namespaces:
            self.namespaces[child] = self.namespaces[node]
        return child

    def walk(self, namespace: Namespace, tokens: list[int], media: Media) -> list[int]:
        nodes = [self.root(namespace)]
        for position, token in enumerate(tokens):
            nodes.append(self.step(nodes[-1], (token, media.get(position))))
        return nodes[1:]

    def last(self, node: int, n: int) -> list[int]:
        """The last `n` nodes of a history."""
        nodes = [node]
        while len(nodes) < n:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]


@dataclass
class Seq:
    """What the engine knows of a sequence. `tokens` are true, `num_known` of them were told."""

    namespace: Namespace
    media: Media
    tokens: list[int]
    nodes: list[int]
    table: list[int]
    num_known: int
    computed: int
    committed: int
    priority: int = 0
    generation: int = 0
    reserved: int = 0  # blocks
    last_step: int = 0
    flights: list[list[int]] = field(default_factory=list)  # step, first position, first copied one

    @property
    def settled(self) -> int:
        """Positions written by completed steps."""
        return min([self.computed, *(start for _, start, _ in self.flights)])

    @property
    def readable(self) -> int:
        """Positions that can be read through today's table before the open steps run."""
        return min([self.settled, *(copied for _, _, copied in self.flights)])


@dataclass
class Launch:
    """What one step was told to do; the device may do it at any time until it completes."""

    swaps_out: list[tuple[int, int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    # sequence, position, slot, node
    writes: list[tuple[Seq, int, int, int]] = field(default_factory=list)
    # sequence, table, nodes
    reads: list[tuple[Seq, list[int], list[int]]] = field(default_factory=list)


@dataclass
class Record:
    """How the content of a block was used."""

    created: int
    priority: int
    num_hits: int = 0


# What is evicted first, by its record and the time when it was given up last.
POLICIES: dict[str, Callable[[Record, int], list[int]]] = {
    "lru": lambda _, given_up: [given_up],
    "lfu": lambda record, given_up: [record.num_hits, given_up],
    "fifo": lambda record, _: [record.created],
    "slru": lambda record, given_up: [record.num_hits > 0, given_up],
    "priority": lambda record, given_up: [record.priority, given_up],
}


class NaiveBlocks:
    """Who holds which block, which content is where, and what may be handed out."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.n, self.size = num_blocks, block_size
        self.rank = POLICIES[policy]
        self.tree = Histories()
        self.slots = [GARBAGE] * (num_blocks * block_size)
        self.seqs: dict[int, Seq] = {}
        self.past: deque[Seq] = deque(maxlen=4)  # freed not long ago
        # What is there: the generation and node at the end of a full block -> block.
        self.present: dict[tuple[int, int], int] = {}
        self.parent_of: dict[tuple[int, int], tuple[int, int]] = {}  # -> that of the block before
        self.records: dict[tuple[int, int], Record] = {}
        self.generations: dict[Namespace, int] = {}  # of those that were reset, each another
        self.num_resets = 0
        self.pins: dict[int, tuple[Namespace, list[int]]] = {}  # namespace and blocks
        self.fence: dict[int, int] = {}  # block -> newest step of a holder that gave it up
        self.given_up: dict[int, int] = {}  # block -> time
        self.time = 0
        self.step = self.completed = 0

    def num_holders(self, block: int) -> int:
        return sum(block in seq.table for seq in self.seqs.values())

    @property
    def pinned(self) -> set[int]:
        return {block for _, blocks in self.pins.values() for block in blocks}

    def unpin_naively(self, name: int) -> None:
        _, blocks = self.pins.pop(name)
        self.give_up(blocks[::-1], 0)

    def states(self) -> dict[str, set[int]]:
        held = {block for seq in self.seqs.values() for block in seq.table} | self.pinned
        kept = set(self.present.values())
        rest = set(range(self.n)) - held
        fenced = {b for b in rest if self.fence.get(b, 0) > self.completed}
        return {
            "held": held,
            "fenced": fenced,
            "cached": (rest - fenced) & kept,
            "free": rest - fenced - kept,
        }

    def give_up(self, blocks: list[int], last_step: int) -> None:
        for block in blocks:
            self.fence[block] = max(self.fence.get(block, 0), last_step)
            self.time += 1
            self.given_up[block] = self.time
        self.drop_forgotten()

    def drop_forgotten(self) -> None:
        """What was reset is there only for those that hold it."""
        held = self.states()["held"]
        self.present = {k: b for k, b in self.present.items() if b in held or self.is_found(k)}

    def is_found(self, key: tuple[int, int]) -> bool:
        return key[0] == self.generations.get(self.tree.namespaces[key[1]], 0)

    def forget_naively(self, namespaces: list[Namespace]) -> tuple[int, int, int]:
        """What of the content of these namespaces is free now, fenced and held."""
        for name in [name for name, (space, _) in self.pins.items() if space in namespaces]:
            self.unpin_naively(name)
        forgotten = {
            block
            for key, block in self.present.items()
            if self.is_found(key) and self.tree.namespaces[key[1]] in namespaces
        }
        states = self.states()
        for namespace in namespaces:
            self.num_resets += 1
            self.generations[namespace] = self.num_resets
        self.drop_forgotten()
        held, fenced = len(forgotten & states["held"]), len(forgotten & states["fenced"])
        return len(forgotten) - held - fenced, fenced, held

    def evict_naively(self) -> int:
        """Forget the cached block without cached children that the policy says."""
        cached = self.states()["cached"]
        parents = {self.parent_of[node] for node in self.present}
        leaves = [node for node, b in self.present.items() if b in cached and node not in parents]
        victim = min(
            leaves,
            key=lambda node: self.rank(self.records[node], self.given_up[self.present[node]]),
        )
        return self.present.pop(victim)

    def publish_naively(self, seq: Seq, i: int) -> None:
        """Block `i` of a sequence is full: others find it, unless its content was there already."""
        node, own = (seq.generation, seq.nodes[(i + 1) * self.size - 1]), seq.table[i]
        before_it = seq.nodes[i * self.size - 1] if i else self.tree.root(seq.namespace)
        parent = (seq.generation, before_it)
        if node in self.present:
            record, seq.table[i] = self.records[node], self.present[node]
            record.priority = max(record.priority, seq.priority)
            if seq.table[i] != own:
                self.give_up([own], seq.last_step)
            return
        self.time += 1
        record = Record(self.time, seq.priority)
        before = seq.table[i - 1]
        is_followed = any(self.parent_of[other] == parent for other in self.present)
        is_followed |= any(blocks[-1] == before for _, blocks in self.pins.values())
        is_in_flight = self.fence.get(before, 0) > self.completed
        has_media = any(position // self.size == i for position in seq.media)
        if (
            i
            and not has_media
            and self.num_holders(before) == 1
            and not is_followed
            and not is_in_flight
        ):
            record = replace(self.records[parent])  # it joins what it follows
        self.present[node], self.parent_of[node], self.records[node] = own, parent, record

    def expect_handed_out(self, blocks: list[int]) -> None:
        """New blocks are free ones; only when these are used up, the right cached ones."""
        free = self.states()["free"]
        if len(blocks) > len(free):
            free |= {self.evict_naively() for _ in range(len(blocks) - len(free))}
            assert set(blocks) == free
        assert set(blocks) <= free
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            self.slots[block * self.size : (block + 1) * self.size] = [GARBAGE] * self.size

    def use(self, seq: Seq) -> None:
        """A prompt found this content."""
        for node in seq.nodes[self.size - 1 : seq.committed : self.size]:
            record = self.records[seq.generation, node]
            record.num_hits += 1
            record.priority = max(record.priority, seq.priority)

    def match_naively(self, namespace: Namespace, nodes: list[int]) -> list[int]:
        generation = self.generations.get(namespace, 0)
        found: list[int] = []
        for end in range(self.size, len(nodes), self.size):
            if (generation, nodes[end - 1]) not in self.present:
                break
            found.append(self.present[generation, nodes[end - 1]])
        return found

    def match_in_part(
        self, namespace: Namespace, nodes: list[int], num_full: int
    ) -> tuple[set[int], int]:
        """The blocks after the full ones that go on longest as these nodes do, and how long."""
        generation = self.generations.get(namespace, 0)
        start = num_full * self.size
        parent = (generation, nodes[start - 1] if start else self.tree.root(namespace))
        prompt = nodes[start : min(start + self.size, len(nodes) - 1)]
        lengths: dict[int, int] = {}
        for key, block in self.present.items():
            if self.parent_of[key] == parent:
                theirs = self.tree.last(key[1], self.size)
                if self.media_of(theirs) == self.media_of(nodes[start : start + self.size]):
                    lengths[block] = len(set(theirs) & set(prompt))
        most = max(lengths.values(), default=0)
        return {b for b, n in lengths.items() if n == most > 0}, most

    def media_of(self, nodes: list[int]) -> list[tuple[int, object]]:
        """What begins in these positions, which are those of one block."""
        pairs = [(i, self.tree.tokens[node]) for i, node in enumerate(nodes)]
        return [(i, pair[1]) for i, pair in pairs if isinstance(pair, tuple) and pair[1]]

    def num_with_pins(self, num_blocks: int, table: list[int]) -> int:
        """Blocks of a table that has so many, and all that are pinned."""
        return num_blocks + len(self.pinned - set(table))

    def judge(self, num_needed: int, longest: int, hits: list[int]) -> Verdict:
        states = self.states()
        available = len(states["free"] | states["cached"] - set(hits))
        if longest > self.n:
            return Verdict(When.NEVER, num_needed, available)
        if num_needed <= available:
            return Verdict(When.NOW, num_needed, available)
        for step in range(self.completed + 1, self.step + 1):
            back = {b for b in states["fenced"] - set(hits) if self.fence[b] <= step}
            if num_needed <= available + len(back):
                return Verdict(When.AFTER_STEP, num_needed, available, step)
        return Verdict(When.LATER, num_needed, available)
