"""Step plans and counts as a caller may write and read them."""

from enum import IntEnum

import pytest

from kvblocks import BlockManager, DecodeBatch


class Drafts(IntEnum):
    """A count that is no plain int."""

    FEW = 2


def test_a_plan_shows_what_it_tells_the_device() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("a", [1, 2, 3])
    assert repr(manager.append({"a": 2})) == (
        "StepPlan(slot_mapping=array('q', [0, 1]), copies=(), new_blocks={})"
    )


@pytest.mark.parametrize(("count", "num_tokens"), [(Drafts.FEW, 2), (True, 1)])
def test_a_count_may_be_any_integer(count: int, num_tokens: int) -> None:
    manager = BlockManager(4, 4)
    manager.allocate("a", [1, 2, 3])
    assert len(manager.append({"a": count}).slot_mapping) == num_tokens
    assert manager.num_computed_tokens("a") == num_tokens


def test_an_empty_batch_writes_nothing() -> None:
    manager = BlockManager(4, 4)
    batch = manager.decode_batch()
    assert isinstance(batch, DecodeBatch)
    for plan in (batch.append(), manager.append({})):
        assert len(plan.slot_mapping) == 0
        assert plan.copies == ()
        assert plan.new_blocks == {}


def test_a_plan_cannot_be_changed() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", range(2))
    plan = manager.append({"A": 2})
    for name in ("copies", "new_blocks", "slot_mapping"):
        with pytest.raises(AttributeError):
            setattr(plan, name, ())
