"""Ways to give requests memory: the worked examples, and what each holds while a request grows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.baselines import NAMES, Growing, Paged, Reserving, Tenant, make_baseline
from kvblocks.contiguous import FirstFit
from kvblocks.errors import InvalidSize
from kvblocks.planning import plan_contiguous
from kvblocks.sizing import num_moved_tokens


def finished(name: str, num_prompt: int, num_generated: int, **options: int) -> Tenant:
    """A request alone, with all its tokens."""
    baseline = make_baseline(name, 16_384, **{"max_length": 2048, **options})
    tenant = Tenant(num_prompt, num_generated)
    assert baseline.admit(tenant)
    for _ in range(num_generated):
        assert baseline.advance([tenant])
    return tenant


# ── worked examples ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("max_length", "never_used"), [(2048, 1848), (4096, 3896)])
def test_c2_what_is_reserved_beyond_the_end_is_over_allocated(
    max_length: int, never_used: int
) -> None:
    tenant = finished("reserve-max", 150, 50, max_length=max_length)
    assert tenant.length == 200
    assert (tenant.num_reserved, tenant.num_over_allocated, tenant.num_rounding) == (
        0,
        never_used,
        0,
    )


def test_c2_what_will_be_written_is_reserved_until_then() -> None:
    tenant = Tenant(num_prompt=150, num_generated=50)
    assert make_baseline("reserve-max", 2048, max_length=2048).admit(tenant)
    assert (tenant.num_reserved, tenant.num_over_allocated) == (50, 1848)


@pytest.mark.parametrize(("step", "rest"), [(256, 56), (512, 312), (1024, 824)])
def test_c3_the_rest_of_a_fixed_step_is_rounding(step: int, rest: int) -> None:
    tenant = finished("grow", 150, 50, step=step)
    assert (tenant.num_rounding, tenant.num_over_allocated) == (rest, 0)


def test_c3_the_rest_of_a_power_of_two_is_rounding() -> None:
    assert finished("oracle", 150, 50).num_rounding == 56


def test_c3_orca_pow2_rounds_the_answer_and_then_the_run() -> None:
    tenant = finished("pow2", 150, 50)
    assert tenant.num_usable == 150 + 64
    assert (tenant.num_over_allocated, tenant.num_rounding) == (14, 42)


def test_c5_tokens_moved_by_growing_are_counted() -> None:
    memory = Growing(4096, step=256)
    tenant = Tenant(num_prompt=1, num_generated=599)
    assert memory.admit(tenant)
    while tenant.length < 600:
        assert memory.advance([tenant])
    assert memory.num_moved_tokens == 256 + 512


@settings(deadline=None)
@given(num_tokens=st.integers(2, 400), step=st.integers(1, 200))
def test_c5_the_formula_counts_what_the_allocator_moves(num_tokens: int, step: int) -> None:
    memory = Growing(4096, step)
    tenant = Tenant(1, num_tokens - 1)
    assert memory.admit(tenant)
    # What is asked for with the first token in mind is longer than the token itself.
    moved_before = 1 if step == 1 else 0
    while tenant.length < num_tokens:
        assert memory.advance([tenant])
    assert moved_before + memory.num_moved_tokens == num_moved_tokens(num_tokens, step)


# ── one request ──────────────────────────────────────────────────────────────────────────────────

requests = st.tuples(st.integers(1, 300), st.integers(1, 300))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(request=requests)
def test_every_held_slot_is_counted_once(name: str, request: tuple[int, int]) -> None:
    baseline = make_baseline(name, 2048, max_length=600, block_size=7, step=10)
    tenant = Tenant(*request)
    assert baseline.admit(tenant)
    while True:
        parts = (tenant.num_reserved, tenant.num_over_allocated, tenant.num_rounding)
        assert min(parts) >= 0
        assert tenant.length + sum(parts) == tenant.num_held
        if tenant.length == tenant.final_length:
            break
        assert baseline.advance([tenant])


@settings(deadline=None)
@given(request=requests)
def test_a_request_ends_with_what_is_planned_for_it(request: tuple[int, int]) -> None:
    length = sum(request)
    reserved, rounded, grown = plan_contiguous([length], reservations=[2048], steps=[256])
    for name, plan in (("reserve-max", reserved), ("oracle", rounded), ("grow", grown)):
        tenant = finished(name, *request)
        assert tenant.num_held == plan.num_slots
        assert tenant.num_over_allocated == plan.over_allocated_slots
        assert tenant.num_rounding == plan.rounding_slots


@pytest.mark.parametrize("name", NAMES)
def test_what_is_released_can_be_had_again(name: str) -> None:
    baseline = make_baseline(name, 2048, max_length=2048)
    for _ in range(3):
        tenant = Tenant(1900, 100)
        assert baseline.admit(tenant)
        assert not baseline.admit(Tenant(1900, 100))
        baseline.release(tenant)


# ── several ──────────────────────────────────────────────────────────────────────────────────────


def test_a_reservation_is_one_piece_or_nothing() -> None:
    memory = Reserving(FirstFit(100), lambda tenant: tenant.final_length)
    assert memory.admit(Tenant(50, 10))
    assert not memory.admit(Tenant(40, 1))
    assert memory.memory.num_free == 40


def test_growing_needs_old_and_new_run_at_the_same_time() -> None:
    memory = Growing(48, step=16)
    tenant = Tenant(15, 33)
    assert memory.admit(tenant)
    assert memory.advance([tenant])
    assert memory.advance([tenant])
    assert (tenant.length, tenant.num_held) == (17, 32)
    for _ in range(15):
        assert memory.advance([tenant])
    assert not memory.advance([tenant])
    assert (tenant.length, tenant.num_held) == (32, 32)


def test_nobody_advances_where_one_cannot() -> None:
    memory = Paged(num_blocks=2, block_size=4)
    tenants = [Tenant(3, 9), Tenant(3, 9)]
    for tenant in tenants:
        assert memory.admit(tenant)
    assert memory.advance(tenants)
    assert not memory.advance(tenants)
    assert [tenant.length for tenant in tenants] == [4, 4]
    memory.manager.check()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidSize, match=r"must be one of reserve-max, pow2, .*, got 'slab'"):
        make_baseline("slab", 64, max_length=8)


@pytest.mark.parametrize(
    ("name", "needed", "largest"),
    [
        ("reserve-max", 128, 64),  # of 127 slots in pieces of 64, 32, ...
        ("pow2", 128, 64),
        ("oracle", 128, 64),
        ("first-fit", 100, 99),
        ("grow", 104, 100),
        ("paged", 100, 96),
    ],
)
def test_the_memory_must_hold_the_longest_request(name: str, needed: int, largest: int) -> None:
    slots = {"first-fit": 99, "grow": 100, "paged": 99}.get(name, 127)
    with pytest.raises(
        InvalidSize, match=f"{name} needs {needed} slots for a request of max_length, got {largest}"
    ):
        make_baseline(name, slots, max_length=100, block_size=8, step=8)


@pytest.mark.parametrize(
    ("name", "size"),
    [("paged", "num_slots"), ("oracle", "max_length"), ("paged", "block_size"), ("grow", "step")],
)
def test_sizes_are_at_least_one(name: str, size: str) -> None:
    sizes = {"num_slots": 64, "max_length": 8, size: 0}
    with pytest.raises(InvalidSize, match=f"{size} must be in"):
        make_baseline(name, **sizes)


@pytest.mark.parametrize(("request_", "name"), [((0, 5), "num_prompt"), ((5, 0), "num_generated")])
def test_prompt_and_answer_have_a_token_each(request_: tuple[int, int], name: str) -> None:
    with pytest.raises(InvalidSize, match=f"{name} must be in"):
        Tenant(*request_)
