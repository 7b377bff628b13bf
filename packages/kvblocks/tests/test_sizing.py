"""The worked examples of sizing, as functions: exact, and errors for what is no size."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import BlockManager
from kvblocks.errors import InvalidSize, KVBlocksError, NothingLeft
from kvblocks.planning import BlockPlan, WindowPart, plan_blocks, recommend
from kvblocks.sizing import (
    Location,
    bytes_per_token,
    dtype_bytes,
    locate,
    num_blocks,
    num_held_blocks,
    packed_shapes,
    pool_bytes,
    sequence_bytes,
    table_bytes,
    tail_waste_slots,
    weight_bytes,
)
from kvblocks.units import format_bytes, format_decimal_bytes, parse_bytes, parse_count, parse_share

KIB, MIB, GIB = 2**10, 2**20, 2**30
S7 = (17, 31, 32, 33)


def test_s1_32_layers_of_8_heads_of_128_take_128_kib_a_token() -> None:
    assert bytes_per_token(32, 8, 128, 2) == 131_072 == 128 * KIB


def test_s2_4096_of_them_take_512_mib() -> None:
    assert sequence_bytes(4096, 131_072) == 512 * MIB


def test_s3_eight_billion_parameters_of_2_bytes_are_16_gb_and_14_90_gib() -> None:
    num_bytes = weight_bytes(8 * 10**9, 2)
    assert format_decimal_bytes(num_bytes) == "16 GB"
    assert format_bytes(num_bytes) == "14.90 GiB"


def test_s4_the_pool_is_what_the_other_terms_leave() -> None:
    assert (
        pool_bytes(
            80 * GIB,
            weight_bytes=16 * 10**9,
            workspace_bytes=2 * GIB,
            reserve_bytes=GIB,
            utilization=0.9,
        )
        == math.floor(0.9 * 80 * GIB) - 16 * 10**9 - 3 * GIB
    )


def test_s4_a_share_is_the_decimal_that_was_written() -> None:
    def usable(utilization: Fraction | float) -> int:
        return pool_bytes(
            100, weight_bytes=0, workspace_bytes=0, reserve_bytes=0, utilization=utilization
        )

    assert usable(0.29) == usable(Fraction(29, 100)) == 29  # in floats, floor(0.29 * 100) is 28


def test_s4_where_nothing_is_left_the_error_names_every_term() -> None:
    with pytest.raises(NothingLeft) as caught:
        pool_bytes(
            16 * GIB,
            weight_bytes=15 * GIB,
            workspace_bytes=2 * GIB,
            reserve_bytes=GIB,
            utilization=0.9,
        )
    assert str(caught.value) == (
        "nothing is left for keys and values: 0.9 of 16 GiB is 14.40 GiB, and weights of 15 GiB, "
        "workspace of 2 GiB and reserve of 1 GiB take 18 GiB"
    )


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_s5_tail_waste_is_below_a_block(num_tokens: int, block_size: int) -> None:
    waste = tail_waste_slots(num_tokens, block_size)
    assert waste == math.ceil(Fraction(num_tokens, block_size)) * block_size - num_tokens
    assert 0 <= waste <= block_size - 1


def test_s6_the_table_of_4096_tokens_is_1024_bytes() -> None:
    assert num_blocks(4096, 16) == 256
    assert table_bytes(256) == 1024
    plan = plan_blocks([4096], 16, bytes_per_token=131_072)
    assert plan.table_ratio == Fraction(1, 524_288)
    assert f"{float(100 * plan.table_ratio):.7f}" == "0.0001907"


@pytest.mark.parametrize(
    "right",
    [
        BlockPlan(8, 16, 128, 16 * MIB, 15, 16, True, 0, 0, 0),
        BlockPlan(16, 9, 144, 18 * MIB, 31, 9, False, 0, 16, 2 * MIB),
        BlockPlan(32, 5, 160, 20 * MIB, 47, 5, False, 0, 32, 4 * MIB),
    ],
)
def test_s7_four_sequences_in_16_mib(right: BlockPlan) -> None:
    plan = plan_blocks(S7, right.block_size, bytes_per_token=131_072, pool_bytes=16 * MIB)
    assert plan == right


def test_s7_tail_waste_is_11_72_and_21_53_and_29_38_percent() -> None:
    plans = [plan_blocks(S7, size, bytes_per_token=1) for size in (8, 16, 32)]
    assert [round(100 * plan.tail_waste_ratio, 2) for plan in plans] == [11.72, 21.53, 29.38]


def test_s8_tables_of_blocks_of_8_have_1_78_times_the_entries_of_16() -> None:
    entries = [plan_blocks(S7, size, bytes_per_token=1).table_entries for size in (8, 16)]
    assert entries == [16, 9]
    assert round(entries[0] / entries[1], 2) == 1.78


def test_s9_three_sequences_in_8_mib() -> None:
    plans = [
        plan_blocks([7, 11, 10], size, bytes_per_token=256 * KIB, pool_bytes=8 * MIB)
        for size in (4, 8)
    ]
    assert [plan.num_blocks for plan in plans] == [8, 5]
    assert [plan.num_slots for plan in plans] == [32, 40]
    assert [plan.num_bytes for plan in plans] == [8 * MIB, 10 * MIB]
    assert [plan.tail_waste_slots for plan in plans] == [4, 12]
    assert [plan.fits for plan in plans] == [True, False]
    assert plans[0].tail_waste_ratio == 0.125


def test_s10_token_35_is_at_offset_3_of_block_2() -> None:
    assert locate(35, 16) == Location(logical_block=2, offset=3)


@pytest.mark.parametrize(("dtype", "x"), [("float32", 4), ("bfloat16", 8), ("float8_e5m2", 16)])
def test_s11_x_elements_fill_16_bytes(dtype: str, x: int) -> None:
    shapes = packed_shapes(5, 8, 128, 16, dtype_bytes(dtype))
    assert shapes.x == x
    assert shapes.key == (5, 8, 128 // x, 16, x)
    assert shapes.value == (5, 8, 128, 16)


def test_s11_a_head_of_128_in_2_bytes_has_16_chunks() -> None:
    assert packed_shapes(5, 8, 128, 16, 2).num_chunks == 16


# ── the plan agrees with the manager ─────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([1, 7, 16, 64]))
def test_a_plan_is_what_the_manager_allocates(lengths: list[int], block_size: int) -> None:
    manager = BlockManager(2400, block_size, prefix_caching=False)
    for number, length in enumerate(lengths):
        manager.allocate(number, length)
        manager.append({number: length})
    usage, stats = manager.usage(), manager.stats()
    plan = plan_blocks(lengths, block_size, bytes_per_token=1, pool_bytes=2400 * block_size)
    assert (plan.num_blocks, plan.num_slots) == (usage.num_blocks, usage.num_slots)
    assert plan.tail_waste_slots == usage.num_wasted_slots
    assert plan.free_slots == stats.num_free_blocks * block_size


def test_a_pool_has_whole_blocks_only() -> None:
    plan = plan_blocks([8, 8], 8, bytes_per_token=1, pool_bytes=15)
    assert (plan.fits, plan.short_slots, plan.short_bytes) == (False, 8, 8)


def test_without_a_pool_nothing_is_said_of_fitting() -> None:
    plan = plan_blocks([8], 8, bytes_per_token=1)
    assert (plan.fits, plan.free_slots, plan.short_slots, plan.short_bytes) == (None,) * 4


def test_no_sequences_take_nothing() -> None:
    plan = plan_blocks([], 8, bytes_per_token=1, pool_bytes=80)
    assert (plan.num_blocks, plan.tail_waste_ratio, plan.table_ratio) == (0, 0.0, Fraction(0))
    assert plan.free_slots == 80


# ── windows ──────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 200))
def test_a_window_holds_the_blocks_that_its_last_tokens_lie_in(
    num_tokens: int, block_size: int, window: int
) -> None:
    held = {token // block_size for token in range(max(0, num_tokens - window), num_tokens)}
    assert num_held_blocks(num_tokens, block_size, window) == len(held)


def test_layers_with_a_window_take_only_what_they_keep() -> None:
    plan = plan_blocks(
        [1000], 16, bytes_per_token=30, windows=[WindowPart(20, 100)], pool_bytes=16 * 30 * 40
    )
    assert plan.num_blocks == 63
    assert plan.num_bytes == 16 * (10 * 63 + 20 * 7)
    assert plan.table_entries == 2 * 63
    assert plan.free_slots == 16 * ((16 * 30 * 40 - plan.num_bytes) // (16 * 30))


def test_where_all_layers_have_a_window_its_blocks_are_the_blocks() -> None:
    plan = plan_blocks([1000, 50], 16, bytes_per_token=20, windows=[WindowPart(20, 100)])
    assert (plan.num_blocks, plan.num_bytes) == (7 + 4, 16 * 20 * 11)
    assert plan.tail_waste_slots == 16 * 11 - 150
    assert plan.table_entries == 63 + 4


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=4), st.integers(1, 40))
def test_a_window_that_nothing_outgrows_changes_nothing(lengths: list[int], size: int) -> None:
    plain = plan_blocks(lengths, size, bytes_per_token=6, pool_bytes=1000)
    windowed = plan_blocks(
        lengths, size, bytes_per_token=6, pool_bytes=1000, windows=[WindowPart(6, 300)]
    )
    assert windowed == plain


# ── the recommendation ───────────────────────────────────────────────────────────────────────────


def recommended(lengths: list[int], sizes: list[int], pool: int | None) -> tuple[int, str]:
    return recommend([plan_blocks(lengths, b, bytes_per_token=1, pool_bytes=pool) for b in sizes])


@pytest.mark.parametrize(
    ("lengths", "sizes", "pool", "size", "reason"),
    [
        ([17, 31, 32, 33], [8, 16, 32], 128, 8, "the only one of these that fits"),
        ([17, 31, 32, 33], [8, 16, 32], 100, 8, "none fits, and this one is short by least"),
        ([17, 31, 32, 33], [16], 200, 16, "the only one asked for"),
        ([1090], [8, 16, 64, 128], 9999, 16, "the largest that fits and leaves at most 4 %"),
        ([1090], [8, 16, 64, 128], None, 16, "the largest that leaves at most 4 %"),
        ([17], [8, 16, 32], 9999, 8, "all that fit leave more than 4 %"),
        ([17], [8, 16, 32], None, 8, "all leave more than 4 %"),
    ],
)
def test_the_recommendation_says_why(
    lengths: list[int], sizes: list[int], pool: int | None, size: int, reason: str
) -> None:
    found = recommended(lengths, sizes, pool)
    assert found[0] == size
    assert found[1].startswith(reason)


# ── sizes as people write them ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("16MiB", 16 * MIB),
        (" 16 mib ", 16 * MIB),
        ("80GB", 80 * 10**9),
        ("1.5GiB", 3 * GIB // 2),
        (".5KiB", 512),
        ("0.1KiB", 102),
        ("8e9", 8 * 10**9),
        ("1TB", 10**12),
        ("2PiB", 2 * 2**50),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_size_takes_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "-16MiB", "+1", "16M", "16MibB", "16 Mi B", "nan", "inf", "1e99", "1e-99",
     "1_000", "1,5GB", "0x10", "16MB/s", "٣MiB", "9223372036854775808", "1e400", "9" * 5000, "1..2"],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str) -> None:
    if text == "1e-99":
        assert parse_bytes(text) == 0
        return
    with pytest.raises(InvalidSize):
        parse_bytes(text)


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_a_number_of_bytes_is_read_as_it_is(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes}B") == num_bytes


@pytest.mark.parametrize("text", ["", "1.5", "1e-1", "-3", "nan", "1e30", "four", "9" * 5000])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_count(text)


@pytest.mark.parametrize("text", ["0", "1.1", "-0.5", "nan", "inf", "90%", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize, match=r"^a share must be above 0 and at most 1, as 0.9, got"):
        parse_share(text)


@pytest.mark.parametrize(
    ("num_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1.02 kB"),
        (1536, "1.50 KiB", "1.54 kB"),
        (5 * 2**40, "5 TiB", "5.50 TB"),
        (2**50, "1 PiB", "1.13 PB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_they_fill(
    num_bytes: int, binary: str, decimal: str
) -> None:
    assert format_bytes(num_bytes) == binary
    assert format_decimal_bytes(num_bytes) == decimal


# ── errors ───────────────────────────────────────────────────────────────────────────────────────

GIVEN = {"weight_bytes": 0, "workspace_bytes": 0, "reserve_bytes": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bytes_per_token(0, 8, 128, 2), "num_layers must be in [1, 2**63 - 1], got 0"),
        (lambda: sequence_bytes(-1, 2), "num_tokens must be in [0, 2**63 - 1], got -1"),
        (lambda: num_blocks(1, 0), "block_size must be in [1, 2**63 - 1], got 0"),
        (lambda: locate(-1, 16), "token_index must be in [0, 2**63 - 1], got -1"),
        (lambda: table_bytes(2**63), "num_entries must be in [0, 2**63 - 1], got 2**63"),
        (lambda: num_held_blocks(1, 1, 0), "window must be in [1, 2**63 - 1], got 0"),
        (lambda: dtype_bytes("float4"), "a dtype must be one of float64, float32, float16, bfloat"),
        (
            lambda: pool_bytes(1, utilization=math.nan, **GIVEN),
            "utilization must be above 0 and at most 1, got nan",
        ),
        (
            lambda: pool_bytes(1, utilization=1.5, **GIVEN),
            "utilization must be above 0 and at most 1, got 1.5",
        ),
        (lambda: packed_shapes(1, 8, 100, 16, 2), "head_dim must be a multiple of x = 8, got 100"),
        (lambda: packed_shapes(1, 8, 96, 16, 3), "bytes_per_element must be 1, 2, 4 or 8, got 3"),
        (
            lambda: plan_blocks([1], 1, bytes_per_token=1, windows=[WindowPart(2, 8)]),
            "windows must be part of bytes_per_token, got 2 of 1",
        ),
        (
            lambda: plan_blocks([1], 1, bytes_per_token=1, pool_bytes=0),
            "pool_bytes must be in [1, ",
        ),
        (lambda: recommend([]), "a recommendation needs at least one block size"),
    ],
)
def test_a_number_outside_its_range_is_named_with_its_rule(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(InvalidSize) as caught:
        call()
    assert str(caught.value).replace(str(2**63), "2**63").startswith(message)
    assert isinstance(caught.value, KVBlocksError)
    assert isinstance(caught.value, ValueError)
