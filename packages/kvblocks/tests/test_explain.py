"""Explanations: why a prompt found as much of itself as it did, and no more."""

import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from kvblocks import Adapter, BlockManager, Explanation, InvalidConfig, Media, WhyNot

from .driver import Driver
from .helpers import filled

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def manager_of(num_blocks: int = 20, **options: Any) -> BlockManager:
    return BlockManager(num_blocks, 2, explains=True, **options)


def ask(manager: BlockManager, tokens: list[int], **options: Any) -> Explanation:
    manager.allocate("asked", tokens, **options)
    return manager.explain("asked")


def test_a_prompt_that_was_found_whole_says_so() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    assert ask(manager, PROMPT) == Explanation(7, 6, WhyNot.WHOLE, 6)


def test_one_token_is_left_of_a_prompt_of_full_blocks() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    assert ask(manager, PROMPT[:6]) == Explanation(6, 4, WhyNot.WHOLE, 4)


def test_what_was_never_there_is_new() -> None:
    manager = manager_of()
    assert ask(manager, PROMPT) == Explanation(7, 0, WhyNot.NEW, 0)


@pytest.mark.parametrize(("position", "num_cached"), [(1, 0), (3, 2), (5, 4)])
def test_the_first_token_that_differs_is_named(position: int, num_cached: int) -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    tokens = [*PROMPT[:position], 99, *PROMPT[position + 1 :]]
    assert ask(manager, tokens) == Explanation(7, num_cached, WhyNot.DIFFERS, position)


def test_what_goes_on_otherwise_from_a_block_on_is_new() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    assert ask(manager, [1, 2, 9, 9, 9]) == Explanation(5, 2, WhyNot.NEW, 2)


def test_what_was_evicted_says_when() -> None:
    manager = manager_of(4)
    filled(manager, "a", PROMPT[:5])
    manager.free("a")
    step = manager.begin_step()
    manager.allocate("b", range(20, 25))  # evicts the second block
    manager.complete_step(step)
    manager.free("b")
    assert ask(manager, PROMPT[:5]) == Explanation(5, 2, WhyNot.EVICTED, 2, step=step)


def test_how_much_was_evicted_since_is_counted() -> None:
    manager = manager_of(4)
    filled(manager, "a", PROMPT[:5])
    manager.free("a")
    filled(manager, "b", range(20, 28))
    manager.free("b")
    filled(manager, "c", range(30, 36))
    manager.free("c")
    explanation = ask(manager, PROMPT[:5])
    assert explanation == Explanation(5, 0, WhyNot.EVICTED, 0, num_evicted_since=3)


def test_what_a_reset_forgot_says_so() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    manager.begin_step()
    manager.reset_prefix_cache()
    assert ask(manager, PROMPT) == Explanation(7, 0, WhyNot.FORGOTTEN, 0, step=1)


@pytest.mark.parametrize(
    ("theirs", "salt", "adapter"),
    [
        ({"salt": "x"}, "x", None),
        ({"salt": "x", "adapter": "tuned"}, "x", Adapter("tuned")),
        ({"adapter": Adapter("tuned", generation=1)}, None, Adapter("tuned", generation=1)),
    ],
)
def test_what_another_namespace_has_is_named(
    theirs: dict[str, Any], salt: str | None, adapter: Adapter | None
) -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT, **theirs)
    expected = Explanation(7, 0, WhyNot.OTHER_NAMESPACE, 0, salt=salt, adapter=adapter)
    assert ask(manager, PROMPT) == expected


def test_another_namespace_explains_only_what_it_has_more_of() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT[:4], salt="x")
    filled(manager, "b", PROMPT[:4])
    assert ask(manager, PROMPT).why is WhyNot.NEW


def test_the_oldest_of_many_namespaces_are_not_asked() -> None:
    manager = manager_of(200)
    filled(manager, "first", PROMPT, salt="first")
    for number in range(64):
        filled(manager, number, [100], salt=str(number))
    assert ask(manager, PROMPT).why is WhyNot.NEW


def test_what_is_being_computed_says_by_whom_and_until_when() -> None:
    manager = manager_of()
    filled(manager, "before", PROMPT[:2])
    step = manager.begin_step()
    manager.allocate("a", PROMPT)
    manager.append({"a": 3})
    expected = Explanation(7, 2, WhyNot.NOT_READY, 2, seq_id="a", step=step)
    assert ask(manager, PROMPT) == expected


def test_what_somebody_will_compute_has_no_step_yet() -> None:
    manager = manager_of()
    manager.allocate("a", PROMPT)
    assert ask(manager, PROMPT) == Explanation(7, 0, WhyNot.NOT_READY, 0, seq_id="a")


@pytest.mark.parametrize(
    "other",
    [
        lambda manager: manager.allocate("a", PROMPT, salt="x"),
        lambda manager: manager.allocate("a", PROMPT, media=[Media(1, "cat")]),
        lambda manager: manager.allocate("a", PROMPT[:1]),
        lambda manager: manager.allocate("a", [1, 9, 3, 4]),
    ],
)
def test_who_computes_something_else_is_not_waited_for(
    other: Callable[[BlockManager], object],
) -> None:
    manager = manager_of()
    other(manager)
    assert ask(manager, PROMPT).why is WhyNot.NEW


def test_who_began_before_a_reset_is_not_waited_for() -> None:
    manager = manager_of()
    manager.allocate("a", PROMPT)
    manager.reset_prefix_cache()
    assert ask(manager, PROMPT).why is WhyNot.NEW


def test_who_computes_behind_another_beginning_is_not_waited_for() -> None:
    manager = manager_of()
    filled(manager, "a", [8, 8])
    filled(manager, "b", [1, 2])
    manager.allocate("c", [8, 8, 3, 4, 5])
    assert ask(manager, [1, 2, 3, 4, 5]).why is WhyNot.NEW


def test_media_that_begin_in_the_block_are_part_of_what_was_evicted() -> None:
    manager = manager_of(4)
    manager.allocate("a", PROMPT[:5], media=[Media(3, "cat")])
    manager.append({"a": 5})
    manager.commit("a", 5)
    manager.free("a")
    filled(manager, "b", range(20, 25))
    manager.free("b")
    for digest, why in (("dog", WhyNot.NEW), ("cat", WhyNot.EVICTED)):
        assert ask(manager, PROMPT[:5], media=[Media(3, digest)]).why is why
        manager.free("asked")


def test_a_fork_has_the_explanation_of_its_parent() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    manager.fork("a", "b")
    assert manager.explain("b") == manager.explain("a")


def test_who_is_swapped_out_keeps_the_explanation() -> None:
    manager = manager_of(num_host_blocks=9)
    filled(manager, "a", PROMPT)
    before = manager.explain("a")
    manager.swap_out(["a"])
    assert manager.explain("a") == before


def test_a_snapshot_keeps_explanations_and_what_is_remembered() -> None:
    manager = manager_of()
    filled(manager, "a", PROMPT)
    manager.reset_prefix_cache()
    other = BlockManager.restore(manager.snapshot())
    assert other.explain("a") == manager.explain("a")
    assert ask(other, PROMPT) == ask(manager, PROMPT)


def test_departures_beyond_those_remembered_are_forgotten() -> None:
    manager = manager_of(2)
    filled(manager, "a", [1, 2, 3])
    manager.free("a")
    for number in range(20):
        filled(manager, "b", [1000 + number, 0, 0, 0])
        manager.free("b")
    assert ask(manager, [1, 2, 3]).why is WhyNot.NEW


def test_explanations_change_nothing_else() -> None:
    plain, told = (Driver(5, BlockManager(20, 2, explains=explains)) for explains in (False, True))
    for _ in range(250):
        plain.operate()
        told.operate()
        assert plain.manager.state_digest() == told.manager.state_digest()
        told.manager.check()
    for name in told.names:
        told.manager.explain(name)


def test_a_digest_that_raises_leaves_no_trace() -> None:
    fails = False

    def digest(data: bytes) -> bytes:
        if fails:
            raise MemoryError("of the digest")
        return sha256(data).digest()

    manager = manager_of(digest=digest)
    before = manager.state_digest()
    fails = True
    with pytest.raises(MemoryError, match="of the digest"):
        manager.allocate("a", PROMPT)
    assert manager.state_digest() == before


@pytest.mark.parametrize(
    ("explanation", "text"),
    [
        (
            Explanation(7, 6, WhyNot.WHOLE, 6),
            "6 of 7 tokens cached: all full blocks, as one token is left to compute",
        ),
        (
            Explanation(7, 2, WhyNot.NOT_READY, 2, seq_id="a", step=3),
            "2 of 7 tokens cached: from position 2 sequence 'a' computes it in step 3",
        ),
        (
            Explanation(7, 2, WhyNot.EVICTED, 2, step=3, num_evicted_since=40),
            "2 of 7 tokens cached: from position 2 it was evicted in step 3, 40 evicted blocks ago",
        ),
        (
            Explanation(7, 2, WhyNot.DIFFERS, 3),
            "2 of 7 tokens cached: at position 3 what is cached goes on otherwise",
        ),
        (
            Explanation(7, 0, WhyNot.OTHER_NAMESPACE, 0, salt="x"),
            "0 of 7 tokens cached: from position 0 it belongs to salt='x', adapter=None",
        ),
    ],
)
def test_an_explanation_reads_as_a_sentence(explanation: Explanation, text: str) -> None:
    assert str(explanation) == text


def test_every_prompt_has_an_explanation_that_is_true() -> None:
    rng = random.Random(1)  # noqa: S311 -- replayable, not secret
    manager = manager_of(12)
    for number in range(500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
        match = manager.match(tokens)
        manager.allocate(number, tokens)
        explanation = manager.explain(number)
        assert explanation.num_cached_tokens == match.num_tokens <= explanation.position
        assert (explanation.why is WhyNot.WHOLE) == (match.num_tokens + 2 >= len(tokens))
        manager.append({number: len(tokens) - match.num_tokens})
        manager.commit(number, len(tokens))
        manager.free(number)


def test_explain_needs_a_manager_that_remembers() -> None:
    manager = BlockManager(4, 2)
    filled(manager, "a", [1])
    with pytest.raises(InvalidConfig, match="explain needs a manager that was made with explains"):
        manager.explain("a")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"prefix_caching": False}, "explains needs prefix_caching"),
        ({"windows": [4]}, "explains needs no windows"),
    ],
)
def test_what_explanations_do_not_go_with_is_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidConfig, match=rule):
        manager_of(**options)


def test_a_step_that_computes_less_than_the_block_is_not_named() -> None:
    manager = manager_of()
    manager.allocate("a", PROMPT)
    manager.begin_step()
    manager.append({"a": 1})
    assert ask(manager, PROMPT) == Explanation(7, 0, WhyNot.NOT_READY, 0, seq_id="a")
