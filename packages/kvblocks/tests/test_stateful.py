"""Hypothesis looks for a short program that breaks a rule: a failure prints the program itself.

    nox -s fuzz -- --steps 200000

The rules are those a caller relies on: who has which tokens, lengths and blocks; what is refused
leaves no trace; `check()` holds after every call.
"""

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvblocks import BlockManager, InvalidBatch, InvalidLength, InvalidSwap, OutOfBlocks, StepPlan

TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)
SALTS = st.sampled_from([None, "", "x"])
STEPS_A_PROGRAM = 50


class Told:
    """What a caller knows of a sequence: its token ids as far as they were told, and its lengths."""

    def __init__(self, salt: str | None, tokens: list[int], num_cached: int) -> None:
        self.salt = salt
        self.tokens = tokens
        self.computed = self.committed = num_cached
        self.num_reserved = 0  # blocks
        self.membership = 0  # the number of its last joining, while it is in the batch


class Calls(RuleBasedStateMachine):
    """One manager, and what its answers must be."""

    names = Bundle("names")
    num_calls = 0  # of all programs

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.booleans(),
        policy=st.sampled_from(["lru", "lru", "lfu", "fifo", "slru", "priority"]),
        windows=st.sampled_from([(), (), (), (3,), (5, 2)]),
    )
    def begin(
        self,
        *,
        num_blocks: int,
        block_size: int,
        caching: bool,
        policy: str,
        windows: tuple[int, ...],
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=caching,
            policy=policy,
            windows=windows,
            num_host_blocks=0 if windows else 5,
        )
        with_batches = BlockManager(num_blocks) if windows else self.manager
        self.batch = with_batches.decode_batch()
        self.told: dict[int, Told] = {}
        self.out: dict[int, Told] = {}  # those that are swapped out
        self.num_names = self.step = self.completed = 0
        self.num_joins = 0
        # The rows of batch steps that are not committed, each with its membership then.
        self.pending: list[list[tuple[int, Told, int]]] = []
        self.ever: set[tuple[str | None, tuple[int, ...]]] = set()  # committed full blocks

    # ── sequences ────────────────────────────────────────────────────────────────────────────

    def new_name(self) -> int:
        self.num_names += 1
        return self.num_names

    @rule(target=names, tokens=PROMPTS, salt=SALTS, priority=st.integers(0, 2))
    def allocate(self, tokens: list[int], salt: str | None, priority: int) -> int:
        name, before = self.new_name(), self.manager.state_digest()
        match = self.manager.match(tokens, salt=salt)
        verdict = self.manager.can_allocate(tokens, salt=salt)
        assert self.manager.state_digest() == before
        assert match.num_tokens < len(tokens)
        found = (salt, tuple(tokens[: match.num_tokens]))
        assert not match.num_tokens or found in self.ever, "found what nobody ever committed"
        if verdict.is_now:
            answer = self.manager.allocate(name, tokens, salt=salt, priority=priority)
            assert answer.num_cached_tokens == match.num_tokens
            assert answer.block_ids[: len(match.block_ids)] == match.block_ids
            self.told[name] = Told(salt, list(tokens), match.num_tokens)
        else:
            with pytest.raises(OutOfBlocks) as caught:
                self.manager.allocate(name, tokens, salt=salt)
            assert caught.value.verdict == verdict
            assert self.manager.state_digest() == before
        return name

    @rule(name=names, num_tokens=st.integers(1, 9))
    def append(self, name: int, num_tokens: int) -> None:
        if name in self.told:
            self.append_all({name: num_tokens})

    @rule(entries=st.dictionaries(names, st.integers(1, 3), max_size=4))
    def append_several(self, entries: dict[int, int]) -> None:
        self.append_all({name: n for name, n in entries.items() if name in self.told})

    @rule(name=names, tokens=st.lists(TOKENS, min_size=1, max_size=5))
    def append_ids(self, name: int, tokens: list[int]) -> None:
        told = self.told.get(name)
        if told and len(told.tokens) >= told.computed:
            known = told.tokens[told.computed :][: len(tokens)]
            tokens = known + tokens[len(known) :]
            if self.append_all({name: tokens}):
                told.tokens += tokens[len(known) :]

    def append_all(self, entries: dict[int, int] | dict[int, list[int]]) -> bool:
        before = self.manager.state_digest()
        verdict = self.manager.can_append(entries)
        assert self.manager.state_digest() == before
        if not verdict.is_now:
            with pytest.raises(OutOfBlocks) as caught:
                self.manager.append(entries)
            assert caught.value.verdict == verdict
            assert self.manager.state_digest() == before
            return False
        counts = {n: e if isinstance(e, int) else len(e) for n, e in entries.items()}
        self.see(self.manager.append(entries), counts)
        for name in counts:
            self.told[name].membership = 0
        return True

    def see(self, plan: StepPlan, counts: dict[int, int]) -> None:
        """Each position's slot is where the sequence's tables say, and nobody else's."""
        size = self.manager.block_size
        for group, mapping in enumerate(plan.slot_mappings):
            slots = iter(mapping.tolist())
            for name, num_tokens in counts.items():
                table = self.manager.block_table(name, group)
                start = self.told[name].computed
                for position in range(start, start + num_tokens):
                    block = table[position // size]
                    assert next(slots) == block * size + position % size
                    assert self.manager.ref_count(block) == 1
            assert next(slots, None) is None
        for name, num_tokens in counts.items():
            self.told[name].computed += num_tokens

    @rule(name=names, back=st.integers(0, 3), tokens=st.lists(TOKENS, min_size=20, max_size=20))
    def commit(self, name: int, back: int, tokens: list[int]) -> None:
        told = self.told.get(name)
        if told:
            n = max(told.committed, told.computed - back)
            late = (tokens * (1 + n // 20))[: max(0, n - len(told.tokens))]
            self.manager.commit(name, n, late)
            told.tokens += late
            self.note_committed(told, n)
            told.membership = 0

    def note_committed(self, told: Told, num_tokens: int) -> None:
        size = self.manager.block_size
        for end in range(told.committed // size * size + size, num_tokens + 1, size):
            self.ever.add((told.salt, tuple(told.tokens[:end])))
        told.committed = num_tokens

    @rule(name=names, back=st.integers(0, 9))
    def truncate(self, name: int, back: int) -> None:
        told = self.told.get(name)
        if told:
            n = max(told.committed, told.computed - back)
            self.manager.truncate(name, n)
            del told.tokens[n:]
            told.computed, told.membership = n, 0

    @rule(target=names, name=names)
    def fork(self, name: int) -> int:
        told, child = self.told.get(name), self.new_name()
        if told and told.committed == told.computed:
            self.manager.fork(name, child)
            self.told[child] = Told(told.salt, list(told.tokens), told.computed)
            told.membership = 0
        elif told:
            before = self.manager.state_digest()
            with pytest.raises(InvalidLength):
                self.manager.fork(name, child)
            assert self.manager.state_digest() == before
        return child

    @rule(name=consumes(names))
    def free(self, name: int) -> None:
        if self.told.pop(name, None) or self.out.pop(name, None):
            self.manager.free(name)

    @precondition(lambda self: not self.manager.windows)
    @rule(entries=st.dictionaries(names, st.integers(0, 20), max_size=3))
    def reserve(self, entries: dict[int, int]) -> None:
        lengths = {name: n for name, n in entries.items() if name in self.told}
        before, verdict = self.manager.state_digest(), self.manager.can_reserve(lengths)
        assert self.manager.state_digest() == before
        if not verdict.is_now:
            with pytest.raises(OutOfBlocks) as caught:
                self.manager.reserve(lengths)
            assert caught.value.verdict == verdict
            assert self.manager.state_digest() == before
            return
        for name in self.manager.reserve(lengths).new_blocks:
            self.told[name].membership = 0  # type: ignore[index]  # ints are all we use
        for name, num_tokens in lengths.items():
            told, size = self.told[name], self.manager.block_size
            told.num_reserved = -(-num_tokens // size)
            assert len(self.manager.block_table(name)) >= told.num_reserved
            if num_tokens > told.computed:
                assert self.manager.can_append({name: num_tokens - told.computed})[1] == 0

    @precondition(lambda self: not self.manager.windows)
    @rule(several=st.lists(names, max_size=3, unique=True))
    def swap_out(self, several: list[int]) -> None:
        leaving = [name for name in several if name in self.told]
        before = self.manager.state_digest()
        try:
            self.manager.swap_out(leaving)
        except (OutOfBlocks, InvalidSwap):
            assert self.manager.state_digest() == before
            return
        for name in leaving:
            self.out[name] = told = self.told.pop(name)
            assert told.committed == told.computed
            told.num_reserved = told.membership = 0

    @rule(several=st.lists(names, max_size=3, unique=True))
    def swap_in(self, several: list[int]) -> None:
        returning = [name for name in several if name in self.out]
        before, verdict = self.manager.state_digest(), self.manager.can_swap_in(returning)
        assert self.manager.state_digest() == before
        if verdict.is_now:
            assert len(self.manager.swap_in(returning)) == verdict.num_needed_blocks
            self.told |= {name: self.out.pop(name) for name in returning}
        else:
            with pytest.raises(OutOfBlocks) as caught:
                self.manager.swap_in(returning)
            assert caught.value.verdict == verdict
            assert self.manager.state_digest() == before

    # ── decode batches ───────────────────────────────────────────────────────────────────────

    @precondition(lambda self: not self.manager.windows)
    @rule(name=names)
    def join(self, name: int) -> None:
        told = self.told.get(name)
        if told and not told.membership and self.can_join(name, told):
            self.batch.join(name)
            self.num_joins += 1
            told.membership = self.num_joins
        elif told:
            before = self.manager.state_digest()
            with pytest.raises(InvalidBatch):
                self.batch.join(name)
            assert self.manager.state_digest() == before

    def can_join(self, name: int, told: Told) -> bool:
        """All of the prompt is computed; without a cache, which keeps no ids, all its blocks are begun."""
        if told.committed != told.computed:
            return False
        if self.manager.prefix_caching and len(told.tokens) != told.computed:
            return False
        table, num_begun = (
            self.manager.block_table(name),
            -(-told.computed // self.manager.block_size),
        )
        is_own = all(self.manager.ref_count(block) == 1 for block in table[num_begun:])
        return len(table) == num_begun or (is_own and len(table) <= told.num_reserved)

    @rule(name=names)
    def leave(self, name: int) -> None:
        told = self.told.get(name)
        if told and told.membership:
            self.batch.leave(name)
            told.membership = 0

    @precondition(lambda self: len(self.pending) < 2 and not self.manager.windows)
    @rule()
    def append_batch(self) -> None:
        names: list[int] = list(self.batch.seq_ids)  # type: ignore[arg-type]  # ints are all we use
        verdict, before = self.batch.can_append(), self.manager.state_digest()
        assert verdict == self.manager.can_append(dict.fromkeys(names, 1))
        if verdict.is_now:
            self.see(self.batch.append(), dict.fromkeys(names, 1))
            self.pending.append([(n, self.told[n], self.told[n].membership) for n in names])
        else:
            with pytest.raises(OutOfBlocks) as caught:
                self.batch.append()
            assert caught.value.verdict == verdict
            assert self.manager.state_digest() == before

    @precondition(lambda self: self.pending)
    @rule(bits=st.integers(0, 255))
    def commit_batch(self, bits: int) -> None:
        rows = self.pending.pop(0)
        tokens = [bits >> i & 1 for i in range(len(rows))]
        self.batch.commit(tokens)
        for (name, told, membership), token in zip(rows, tokens, strict=True):
            if self.told.get(name) is told and told.membership == membership:
                told.tokens.append(token)
                self.note_committed(told, told.committed + 1)

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.step - self.completed < 2)
    @rule()
    def begin_step(self) -> None:
        self.step += 1
        assert self.manager.begin_step() == self.step

    @precondition(lambda self: self.completed < self.step)
    @rule(both=st.booleans())
    def complete_step(self, *, both: bool) -> None:
        self.completed = self.step if both else self.completed + 1
        self.manager.complete_step(self.completed)

    # ── what always holds ────────────────────────────────────────────────────────────────────

    @invariant()
    def all_is_as_told(self) -> None:
        Calls.num_calls += 1
        self.manager.check()
        for name, told in self.told.items():
            assert self.manager.num_computed_tokens(name) == told.computed
            assert self.manager.num_committed_tokens(name) == told.committed
            for group, window in enumerate(self.manager.windows, 1):
                gone = max(0, told.committed - window + 1) // self.manager.block_size
                table = self.manager.block_table(name, group)
                assert [index for index, block in enumerate(table) if block < 0] == [*range(gone)]
        assert set(self.batch.seq_ids) == {n for n, told in self.told.items() if told.membership}

    def teardown(self) -> None:
        """Who frees everything and completes every step has the whole pool, and the host."""
        for name in (*self.told, *self.out):
            self.manager.free(name)
        if self.step:
            self.manager.complete_step(self.step)
        self.manager.check()
        stats = self.manager.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks


def run_programs(num_programs: int, *, seed: int | None = None) -> None:
    """Make programs of up to so many calls, and shrink the first that breaks a rule."""
    machine = Calls if seed is None else hypothesis.seed(seed)(Calls)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=STEPS_A_PROGRAM,
            deadline=None,
            database=None,
            derandomize=seed is None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_short_program_breaks_a_rule() -> None:
    run_programs(150)
