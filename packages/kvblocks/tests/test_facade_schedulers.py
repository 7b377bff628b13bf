"""A toy scheduler has the same tables and hits on either facade as on the manager itself."""

import random
from typing import Protocol

import pytest

from kvblocks import BlockManager, OutOfBlocks
from kvblocks.facades import SGLangFacade, VLLMFacade

from .facade_requests import Request, look_up

BLOCK_SIZE, BUDGET, SEATS = 4, 24, 6
SEEDS = range(6)


class Memory(Protocol):
    """What the scheduler asks of memory; a None or a False has taken nothing."""

    def admit(self, one: Request, budget: int) -> tuple[int, int] | None:
        """Begin a request: how much of it was cached, and where its first chunk ends."""

    def grow(self, one: Request, num_tokens: int) -> bool:
        """Commit what is computed, then take the next positions."""

    def free(self, one: Request) -> None:
        """Commit what is computed, then give all up."""

    def table(self, one: Request) -> list[int]:
        """The blocks of its computed positions, as its engine knows them."""


class Direct:
    """The step protocol."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def admit(self, one: Request, budget: int) -> tuple[int, int] | None:
        num_cached = self.manager.match(one.all_token_ids).num_tokens
        stop = min(num_cached + budget, one.num_tokens)
        try:
            self.manager.allocate(one.name, one.all_token_ids[:stop])
        except OutOfBlocks:
            return None
        self.manager.append({one.name: one.all_token_ids[num_cached:stop]})
        return num_cached, stop

    def grow(self, one: Request, num_tokens: int) -> bool:
        start = one.num_computed_tokens
        self.manager.commit(one.name, start)
        try:
            self.manager.append({one.name: one.all_token_ids[start : start + num_tokens]})
        except OutOfBlocks:
            return False
        return True

    def free(self, one: Request) -> None:
        self.manager.commit(one.name, one.num_computed_tokens)
        self.manager.free(one.name)

    def table(self, one: Request) -> list[int]:
        return self.manager.block_table(one.name).tolist()


class LikeVLLM:
    """vLLM's calls, and a worker whose tables grow by what it is sent."""

    def __init__(self, manager: BlockManager) -> None:
        self.cache = VLLMFacade(manager, max_model_len=1000)
        self.tables: dict[str, list[int]] = {}

    def admit(self, one: Request, budget: int) -> tuple[int, int] | None:
        blocks, num_cached, _ = self.cache.get_computed_blocks(one)
        num_new = min(budget, one.num_tokens - num_cached)
        new_blocks = self.cache.allocate_slots(one, num_new, num_cached, blocks)
        if new_blocks is None:
            return None
        self.tables[one.name] = [*blocks.blocks[0], *new_blocks.blocks[0]]
        return num_cached, num_cached + num_new

    def grow(self, one: Request, num_tokens: int) -> bool:
        new_blocks = self.cache.allocate_slots(one, num_tokens)
        changed = self.cache.take_changed_block_ids()
        self.tables |= {name: table for name, (table,) in changed.items()}
        if new_blocks is None:
            return False
        if one.name not in changed:
            self.tables[one.name] += new_blocks.blocks[0]
        return True

    def free(self, one: Request) -> None:
        self.cache.free(one)

    def table(self, one: Request) -> list[int]:
        return self.tables[one.name]


class LikeSGLang:
    """SGLang's calls, and rows of slots."""

    def __init__(self, manager: BlockManager) -> None:
        self.cache = SGLangFacade(manager)
        self.rows: dict[str, list[int]] = {}

    def admit(self, one: Request, budget: int) -> tuple[int, int] | None:
        num_cached = look_up(self.cache, one)
        num_new = min(budget, one.num_tokens - num_cached)
        slots = self.cache.alloc(num_new, req=one)
        if slots is None:
            return None
        self.rows[one.name] = [*self.cache.path_device_indices(one.last_node), *slots]
        return num_cached, num_cached + num_new

    def grow(self, one: Request, num_tokens: int) -> bool:
        start = one.num_computed_tokens
        self.cache.checkpoint(one, up_to=start)
        self.rows[one.name] = self.cache.kv_indices(one).tolist()[:start]
        slots = self.cache.alloc(num_tokens, req=one)
        if slots is None:
            return False
        self.rows[one.name] += slots
        return True

    def free(self, one: Request) -> None:
        self.cache.checkpoint(one, up_to=one.num_computed_tokens)
        self.cache.release_kv_cache(one)

    def table(self, one: Request) -> list[int]:
        return [slot // BLOCK_SIZE for slot in self.rows[one.name][::BLOCK_SIZE]]


class Scheduler:
    """First come, first served, in chunks; who came last is preempted when blocks are too few."""

    def __init__(self, memory: Memory, prompts: list[list[int]]) -> None:
        self.memory = memory
        self.waiting = [Request(f"r{i}", list(prompt)) for i, prompt in enumerate(prompts)]
        self.goals = {one.name: one.num_tokens + 5 + i % 9 for i, one in enumerate(self.waiting)}
        self.running: list[Request] = []
        self.num_hits = self.num_preempted = 0

    def step(self) -> dict[str, list[int]]:
        budget, ends, row, is_short = BUDGET, dict[str, int](), 0, False
        while row < len(self.running) and budget:
            one = self.running[row]
            num_tokens = min(one.num_tokens - one.num_computed_tokens, budget)
            if self.memory.grow(one, num_tokens):
                ends[one.name] = one.num_computed_tokens + num_tokens
                budget, row = budget - num_tokens, row + 1
            else:
                self._preempt()
                is_short = True
        while self.waiting and len(self.running) < SEATS and budget and not is_short:
            admitted = self.memory.admit(self.waiting[0], budget)
            if admitted is None:
                break
            one, (num_cached, ends_at) = self.waiting.pop(0), admitted
            self.running.append(one)
            self.num_hits += num_cached
            ends[one.name], budget = ends_at, budget - (ends_at - num_cached)
        tables = {one.name: self.memory.table(one) for one in self.running if one.name in ends}
        self._compute(ends)
        return tables

    def _preempt(self) -> None:
        one = self.running.pop()
        self.memory.free(one)
        one.num_computed_tokens = 0
        self.waiting.insert(0, one)
        self.num_preempted += 1

    def _compute(self, ends: dict[str, int]) -> None:
        for one in [one for one in self.running if one.name in ends]:
            one.num_computed_tokens = ends[one.name]
            if one.num_computed_tokens == one.num_tokens:
                one.all_token_ids.append(sum(one.all_token_ids) % 1000)
            if one.num_tokens > self.goals[one.name]:
                self.memory.free(one)
                self.running.remove(one)


def make_prompts(seed: int) -> list[list[int]]:
    """Prompts that share beginnings, some of them altogether, so that content meets its equal."""
    chance = random.Random(seed)  # noqa: S311 -- replayable, not secret
    stems = [[chance.randrange(1000) for _ in range(20)] for _ in range(3)]
    prompts = []
    for _ in range(40):
        stem = chance.choice(stems)[: chance.randrange(1, 21)]
        prompts.append(stem + [chance.randrange(3) for _ in range(chance.randrange(1, 20))])
        if chance.random() < 0.3:
            prompts.append(list(prompts[-1]))
    return prompts


@pytest.mark.parametrize("facade", [LikeVLLM, LikeSGLang])
@pytest.mark.parametrize("seed", SEEDS)
def test_tables_and_hits_are_those_of_the_manager_itself(
    facade: type[LikeVLLM | LikeSGLang], seed: int
) -> None:
    managers = [BlockManager(24, BLOCK_SIZE) for _ in range(2)]
    ours = Scheduler(Direct(managers[0]), make_prompts(seed))
    theirs = Scheduler(facade(managers[1]), make_prompts(seed))
    while ours.waiting or ours.running:
        assert theirs.step() == ours.step()
        managers[1].check()
    assert not theirs.waiting
    assert not theirs.running
    assert theirs.num_hits == ours.num_hits


def test_the_toy_scheduler_meets_hits_evictions_merges_and_preemption() -> None:
    met = [0, 0, 0, 0]
    for seed in SEEDS:
        manager = BlockManager(24, BLOCK_SIZE)
        scheduler = Scheduler(Direct(manager), make_prompts(seed))
        while scheduler.waiting or scheduler.running:
            scheduler.step()
        stats = manager.stats()
        merged, evicted = stats.num_merged_blocks, stats.num_evicted_blocks
        found = (scheduler.num_hits, evicted, merged, scheduler.num_preempted)
        met = [total + each for total, each in zip(met, found, strict=True)]
    assert all(met), met
