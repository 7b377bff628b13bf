"""Policies of eviction: the order of each, worked by hand, and how others come in."""

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvblocks import BlockManager, InvalidConfig
from kvblocks.policies import CachedRun

from .helpers import filled

POLICIES = ("lru", "lfu", "fifo", "slru", "span", "priority")


class Youngest:
    """A policy of somebody else: what was created last goes first. It notes what it is asked."""

    asked = 0

    def rank(self, run: CachedRun) -> int:
        Youngest.asked += 1
        return -run.created


def broken() -> None:
    raise ImportError("no such thing")


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that brings three policies, one with a name of ours."""
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{what}", "kvblocks.policies")
        for name, what in (("youngest", "Youngest"), ("lru", "Youngest"), ("broken", "broken"))
    )
    things = {f"{__name__}:Youngest": Youngest, f"{__name__}:broken": broken}
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points.select(group=group)
    )
    monkeypatch.setattr(EntryPoint, "load", lambda point: things[point.value])
    Youngest.asked = 0


def cached(manager: BlockManager, letter: str, priority: int = 0) -> None:
    """Find or compute a prompt of one full block, and give it up."""
    prompt = [ord(letter)] * 4 + [0]
    num_cached = manager.allocate(letter, prompt, priority=priority).num_cached_tokens
    manager.append({letter: 5 - num_cached})
    manager.commit(letter, 5)
    manager.free(letter)


def evicted(manager: BlockManager, letters: str) -> str:
    """What goes, letter by letter, when one block after the other is taken."""
    order = ""
    for number in range(manager.stats().num_free_blocks):
        manager.allocate(("filler", number), [1])
    while len(order) < len(letters):
        manager.allocate(len(order), [1])
        for letter in letters:
            if letter not in order and not manager.match([ord(letter)] * 4 + [0]).num_tokens:
                order += letter
        manager.check()
        assert len(order) == manager.stats().num_evicted_blocks
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "DCBAE"),
        ("lfu", "DECAB"),
        ("fifo", "ABCDE"),
        ("slru", "DECBA"),
        ("span", "DCEBA"),
        ("priority", "DBECA"),
    ],
)
def test_a_policy_evicts_in_its_order(policy: str, order: str) -> None:
    manager = BlockManager(6, 4, policy=policy)
    for letter, priority in zip("ABCD", (2, 0, 1, 0), strict=True):
        cached(manager, letter, priority)
    for letter in "CBBA":  # found once, twice and once
        cached(manager, letter)
    cached(manager, "E")
    assert evicted(manager, "ABCDE") == order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tail_goes_before_its_head_whatever_the_policy(policy: str) -> None:
    manager = BlockManager(6, 4, policy=policy)
    filled(manager, "A", 8)
    manager.free("A")
    for _ in range(3):  # the head is found often, and in the end by one of little importance
        filled(manager, "A", 5)
        manager.free("A")
    filled(manager, "B", [0, 1, 2, 3, 7, 7, 7, 7, 7])
    manager.free("B")
    for left in (4, 4, 0):
        manager.allocate(object(), range(900, 900 + 4 * (1 + manager.stats().num_free_blocks)))
        assert manager.match(range(5)).num_tokens == left
        manager.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_caches_nothing_goes_before_what_does(policy: str) -> None:
    manager = BlockManager(4, 4, policy=policy)
    cached(manager, "A")
    for number in range(50):
        filled(manager, number, 3)
        manager.free(number)
    assert manager.match([ord("A")] * 4 + [0]).num_tokens == 4


def test_a_scan_does_not_evict_what_was_found_again() -> None:
    left = {}
    for policy in ("lru", "slru"):
        manager = BlockManager(8, 4, policy=policy)
        cached(manager, "A")
        cached(manager, "A")
        for number in range(20):
            filled(manager, "scan", 8, first_token=1000 * number)
            manager.free("scan")
        left[policy] = manager.match([ord("A")] * 4 + [0]).num_tokens
    assert left == {"lru": 0, "slru": 4}


def test_span_counts_from_when_a_conversation_began() -> None:
    """A grows by a turn while B, used last, is new."""
    left = {}
    for policy in ("lru", "span"):
        manager = BlockManager(6, 4, policy=policy)
        for turn in range(1, 5):
            filled(manager, "A", 4 * turn)
            manager.free("A")
        cached(manager, "B")
        manager.allocate("C", range(900, 900 + 4 * (1 + manager.stats().num_free_blocks)))
        left[policy] = manager.match(range(17)).num_tokens
    assert left == {"lru": 12, "span": 16}


@pytest.mark.parametrize("first", [0, 5])
def test_content_has_the_highest_priority_of_all_who_held_it(first: int) -> None:
    manager = BlockManager(4, 4, policy="priority")
    cached(manager, "A", first)
    cached(manager, "A", 5 - first)
    cached(manager, "B", 4)
    assert evicted(manager, "AB") == "BA"


def test_who_finds_a_prefix_raises_all_of_it() -> None:
    manager = BlockManager(4, 4, policy="priority")
    filled(manager, "A", 8)
    manager.allocate("B", range(9), priority=3)
    manager.append({"B": 1})
    manager.free("B")
    manager.free("A")
    cached(manager, "C", 2)
    manager.allocate("D", range(900, 908))
    assert manager.match([ord("C")] * 4 + [0]).num_tokens == 0
    assert manager.match(range(9)).num_tokens == 8


def test_twins_that_merge_have_the_higher_priority() -> None:
    manager = BlockManager(6, 4, policy="priority")
    manager.allocate("A", [ord("A")] * 4)
    manager.allocate("twin", [ord("A")] * 4, priority=2)
    manager.append({"A": 4, "twin": 4})
    manager.commit("A", 4)
    manager.commit("twin", 4)
    manager.free("A")
    manager.free("twin")
    cached(manager, "B", 1)
    assert evicted(manager, "AB") == "BA"


def test_what_joins_a_run_shares_its_record(twins: BlockManager) -> None:
    """B finds block 0 of A there, which nobody holds, and block 1 joins it: older than C."""
    twins.commit("A", 4)
    twins.free("A")
    cached(twins, "C")
    twins.commit("B", 8)
    twins.free("B")
    twins.allocate("D", range(900, 900 + 4 * (1 + twins.stats().num_free_blocks)))
    assert twins.match([ord("C")] * 4 + [0]).num_tokens == 4
    assert twins.match(range(9)).num_tokens == 4


@pytest.fixture
def twins() -> BlockManager:
    """A and B computed the same 8 tokens side by side; what comes first goes first."""
    manager = BlockManager(8, 4, policy="fifo")
    for name in "AB":
        manager.allocate(name, range(8))
    manager.append({"A": 8, "B": 8})
    return manager


def test_a_fork_computes_with_the_priority_of_its_parent() -> None:
    manager = BlockManager(6, 4, policy="priority")
    manager.allocate("parent", [ord("A")] * 3, priority=2)
    manager.append({"parent": 3})
    manager.commit("parent", 3)
    manager.fork("parent", "child")
    manager.append({"child": [ord("A")]})
    manager.commit("child", 4)
    manager.free("child")
    manager.free("parent")
    cached(manager, "B", 1)
    assert evicted(manager, "AB") == "BA"


def test_a_priority_is_an_integer() -> None:
    manager = BlockManager(4)
    with pytest.raises(TypeError, match="integer"):
        manager.allocate("A", [1], priority="high")  # type: ignore[arg-type]  # which is the point
    assert "A" not in manager


@pytest.mark.parametrize("policy", ["LRU", "", "mru", None, ["lru"], 3])
def test_an_unknown_policy_is_refused_with_the_ones_there_are(policy: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        BlockManager(4, policy=policy)
    assert str(caught.value) == (
        f"policy must be one of fifo, lfu, lru, priority, slru, span, got {policy!r}"
    )


@pytest.mark.usefixtures("foreign")
def test_an_entry_point_brings_a_policy_of_somebody_else() -> None:
    manager = BlockManager(4, 4, policy="youngest")
    for letter in "ABC":
        cached(manager, letter)
    assert evicted(manager, "ABC") == "CBA"
    assert manager.policy == "youngest"


@pytest.mark.usefixtures("foreign")
def test_a_policy_is_asked_once_for_what_is_given_up_however_much_is_cached() -> None:
    asked = []
    for num_cached in (10, 1000):
        manager = BlockManager(num_cached + 1, 4, policy="youngest")
        for number in range(num_cached):
            filled(manager, "A", 4, first_token=4 * number)
            manager.free("A")
        before = Youngest.asked
        manager.allocate("B", range(10**6, 10**6 + 8))
        manager.append({"B": 8})
        manager.commit("B", 8)
        manager.free("B")
        assert manager.stats().num_evicted_blocks == 1
        asked.append(Youngest.asked - before)
    assert asked == [1, 1]


@pytest.mark.usefixtures("foreign")
def test_our_names_cannot_be_replaced() -> None:
    manager = BlockManager(4, 4, policy="lru")
    cached(manager, "A")
    assert Youngest.asked == 0


@pytest.mark.usefixtures("foreign")
def test_an_unknown_policy_is_refused_with_those_of_others_too() -> None:
    with pytest.raises(
        InvalidConfig, match="broken, fifo, lfu, lru, priority, slru, span, youngest, got"
    ):
        BlockManager(4, policy="mru")


@pytest.mark.usefixtures("foreign")
def test_a_policy_that_cannot_be_made_is_refused_with_its_reason() -> None:
    with pytest.raises(
        InvalidConfig, match=r"policy 'broken' of \S+:broken cannot be made"
    ) as caught:
        BlockManager(4, policy="broken")
    assert isinstance(caught.value.__cause__, ImportError)
