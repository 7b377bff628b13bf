"""An engine in some sixty lines on `kvblocks` alone: batches, chunks, prefix cache, samples, preemption.

Its model is arithmetic, its memory one number a slot, so that a wrong block is a wrong answer: a token
follows from all tokens before it, and they are read through the block table.
"""

# %% The model.
from collections import deque

from kvblocks import BlockManager


def next_token(context: list[int]) -> int:
    """The model: every token counts, and so does its place."""
    return sum((place + 1) * token for place, token in enumerate(context)) % 997


# %% The engine.
class ToyEngine:
    """Requests in, answers out; `budget` is how many tokens a step may compute."""

    def __init__(self, num_blocks: int, block_size: int = 4, budget: int = 16) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.memory = [0] * (num_blocks * block_size)
        self.budget = budget
        self.waiting: deque[str] = deque()
        self.running: list[str] = []
        self.tokens: dict[str, list[int]] = {}  # known: of the prompt, then of the answer
        self.lengths: dict[str, int] = {}  # where each ends

    def add(self, name: str, prompt: list[int], num_tokens: int) -> None:
        """Queue a request."""
        self.tokens[name], self.lengths[name] = list(prompt), len(prompt) + num_tokens
        self.waiting.append(name)

    def sample(self, name: str, child: str, first: int) -> None:
        """A second answer to the same prompt, that begins with another token: nothing is copied."""
        computed = self.manager.num_computed_tokens(name)
        self.tokens[child], self.lengths[child] = self.tokens[name][:computed], self.lengths[name]
        self.tokens[child].append(first)
        self.manager.fork(name, child)
        self.running.append(child)

    def schedule(self) -> dict[str, list[int]]:
        """Who computes which tokens now: the running first, then whoever gets blocks."""
        while self.waiting and self.manager.can_allocate(self.tokens[self.waiting[0]]).is_now:
            name = self.waiting.popleft()
            self.manager.allocate(name, self.tokens[name])  # cached blocks by reference
            self.running.append(name)
        batch, left = {}, self.budget
        for name in self.running:
            computed = self.manager.num_computed_tokens(name)
            if ids := self.tokens[name][computed : computed + left]:
                batch[name] = ids
                left -= len(ids)
        while not self.manager.can_append(batch).is_now:  # the last one gives its blocks up
            victim = self.running.pop()
            batch.pop(victim, None)
            self.manager.free(victim)
            self.waiting.appendleft(victim)
        return batch

    def step(self) -> None:
        """Schedule, copy, write, commit, choose."""
        batch = self.schedule()
        step = self.manager.begin_step()
        plan = self.manager.append(batch)
        size = self.manager.block_size
        for source, destination, num_tokens in plan.copies:  # before the first write
            here, there = source * size, destination * size
            self.memory[there : there + num_tokens] = self.memory[here : here + num_tokens]
        new = (token for ids in batch.values() for token in ids)
        for slot, token in zip(plan.slot_mapping, new, strict=True):
            self.memory[slot] = token
        self.manager.complete_step(step)
        for name in batch:
            computed = self.manager.num_computed_tokens(name)
            self.manager.commit(name, computed)  # full blocks can be found from now on
            if computed == len(self.tokens[name]):
                self.tokens[name].append(next_token(self.read(name)))
            if len(self.tokens[name]) == self.lengths[name]:
                self.manager.free(name)  # what is full stays cached until it is evicted
                self.running.remove(name)

    def read(self, name: str) -> list[int]:
        """What the model sees: every token, through the block table."""
        table, size = self.manager.block_table(name), self.manager.block_size
        places = range(self.manager.num_computed_tokens(name))
        return [self.memory[table[place // size] * size + place % size] for place in places]

    def run(self) -> None:
        """Step until everything has ended."""
        while self.waiting or self.running:
            self.step()


# %% What it answers must be what no paging at all would answer.
def plain(prompt: list[int], num_tokens: int) -> list[int]:
    """The same model on a list."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens


system = list(range(100, 112))
requests = {f"user {n}": [*system, n, n + 1, n + 2] for n in range(6)}

engine = ToyEngine(num_blocks=16)
for name, prompt in requests.items():
    engine.add(name, prompt, num_tokens=9)
engine.run()
for name, prompt in requests.items():
    assert engine.tokens[name] == plain(prompt, 9), name

# %% What the manager did: shared the system prompt, and when blocks ran out somebody waited.
stats = engine.manager.stats()
print("tokens from the cache:", stats.num_cached_tokens)
print("blocks in use at most:", stats.peak_held_blocks)
engine.manager.check()

# %% Two samples of one prompt: the second shares the blocks of the first, and one of them is copied.
prompt = list(range(200, 210))  # ends within a block
engine.add("first", prompt, num_tokens=6)
engine.step()
engine.sample("first", "second", first=5)
engine.run()
assert engine.tokens["first"] == plain(prompt, 6)
assert engine.tokens["second"] == plain([*prompt, 5], 5)
assert engine.manager.stats().num_copies == 1
print("two samples:", engine.tokens["first"][10:], engine.tokens["second"][10:])
