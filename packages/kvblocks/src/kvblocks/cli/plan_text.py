"""How `kvblocks plan` shows its answers to people.

Knows words, units and tables. Computes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvblocks.cli.plan_inputs import Memory, Model
from kvblocks.cli.tables import render_pairs, render_table, render_text
from kvblocks.contiguous import Fragmentation
from kvblocks.model_config import LayerCache
from kvblocks.planning import (
    UNKNOWN,
    UNKNOWN_GROWTH,
    BlockPlan,
    ContiguousPlan,
    recommend,
)
from kvblocks.readings import Readings
from kvblocks.units import format_bytes, format_decimal_bytes


def show_plan(
    model: Model,
    memory: Memory,
    lengths: Sequence[int],
    plans: Sequence[BlockPlan],
    width: int | None,
    *,
    readings: Readings | None = None,
) -> str:
    """The whole answer; without lengths, what each block is and how many the pool has."""
    parts = [render_pairs(_givens(model, memory, lengths))]
    if memory.memory_bytes is not None:
        parts.append(render_pairs(_budget(memory)))
    if lengths:
        parts.append(render_table(_PLAN, [_plan_row(plan) for plan in plans], width))
        at_most = "A sequence leaves at most block size - 1 slots empty."
        parts.append(render_text(at_most, width))
        parts.append(render_table(_TABLES, [_tables_row(plan) for plan in plans], width))
        if readings is not None:
            rows = [_reading_row(plan, readings) for plan in plans]
            parts.append(render_table(_READINGS, rows, width))
            parts.append(render_text(_about(readings), width))
        parts.append(render_text(_recommendation(plans, readings), width))
    else:
        rows = [_block_row(plan.block_size, model, memory) for plan in plans]
        parts.append(render_table(_BLOCKS, rows, width))
        parts.append(render_text("Give --lengths to see what sequences take, and a choice.", width))
    parts += [render_text(f"Note: {note}.", width) for note in model.notes]
    return "\n\n".join(parts)


def show_contiguous(
    plans: Sequence[ContiguousPlan], bytes_per_token: int, width: int | None
) -> str:
    """What the same sequences take without paging, a way a row."""
    rows = [
        [
            _WAYS[plan.way].format(plan.size),
            f"{plan.num_slots:,}",
            format_bytes(plan.num_slots * bytes_per_token),
            f"{plan.over_allocated_slots:,}",
            f"{plan.rounding_slots:,}",
            format_bytes(plan.moved_tokens * bytes_per_token),
        ]
        for plan in plans
    ]
    about = (
        "Each sequence in one piece, once all tokens are there. Over-allocated slots were reserved "
        "and are never used, rounding is the rest of a chunk; moved is what growing copied on the way. "
        "What is lost between pieces comes on top: kvblocks simulate --waste."
    )
    return f"{render_table(_CONTIGUOUS, rows, width)}\n\n{render_text(about, width)}"


def show_layouts(shapes: Sequence[Mapping[str, Any]], *, has_pool: bool) -> str:
    """A line a block size and kind of layer."""

    def brackets(shape: Sequence[int]) -> str:
        first = f"{shape[0]}" if has_pool else "num_blocks"
        return f"[{', '.join([first, *map(str, shape[1:])])}]"

    return "\n".join(
        f"{shape['num_layers']} layers, blocks of {shape['block_size']}: x = {shape['x']}, "
        f"{shape['num_chunks']} chunks a head, K {brackets(shape['key'])}, "
        f"V {brackets(shape['value'])}"
        for shape in shapes
    )


def show_fragmentation(found: Fragmentation, request: int | None, width: int | None) -> str:
    """What is free in which pieces, and what becomes of a request for one piece."""
    runs = ", ".join(map(format_bytes, found.free_runs)) or "none"
    pairs = [
        ("free", format_bytes(found.num_free)),
        ("free runs", runs),
        ("largest run", format_bytes(found.largest_run)),
    ]
    text = render_pairs(pairs)
    if request is None:
        return text
    asked = f"{format_bytes(request)} in one piece"
    if found.fits(request):
        verdict = f"{asked} fits."
    elif found.is_fragmented_for(request):
        verdict = (
            f"{asked} is refused although {format_bytes(found.num_free)} are free: external "
            "fragmentation. In a pool of equal blocks the same demand fits, since any free block "
            "serves, and external fragmentation is exactly 0."
        )
    else:
        verdict = f"{asked} is refused: no more than {format_bytes(found.num_free)} are free."
    return f"{text}\n\n{render_text(verdict, width)}"


def _givens(model: Model, memory: Memory, lengths: Sequence[int]) -> list[tuple[str, str]]:
    pairs = []
    if model.layers:
        kinds = [_layer(layer, count) for layer, count in model.layers.items()]
        first = f"{model.name}, {model.num_layers} layers" if model.name else kinds[0]
        pairs.append(("model", f"{first}, {model.dtype}"))
        if model.name:
            pairs += [("", kind) for kind in kinds]
    pairs.append(("bytes per token", _exact(model.bytes_per_token)))
    if memory.pool_bytes is not None:
        slots = memory.pool_bytes // model.bytes_per_token
        pairs.append(("pool", f"{_exact(memory.pool_bytes)}: {slots:,} tokens"))
    if lengths:
        num_tokens = sum(lengths)
        kept = format_bytes(num_tokens * model.bytes_per_token)
        pairs.append(("sequences", f"{len(lengths):,} with {num_tokens:,} tokens in all: {kept}"))
    return pairs


def _layer(layer: LayerCache, count: int) -> str:
    if layer.is_latent:
        what = f"one latent of {layer.key_dim}"
    elif layer.key_dim == layer.value_dim:
        what = f"{layer.num_kv_heads} KV heads of {layer.key_dim}"
    else:
        what = (
            f"{layer.num_kv_heads} KV heads, keys of {layer.key_dim}, values of {layer.value_dim}"
        )
    kept = "" if layer.window is None else f", the last {layer.window:,} tokens"
    return f"{count} layers: {what}{kept}"


def _budget(memory: Memory) -> list[tuple[str, str]]:
    """What the pool is left of, term by term, those that were not given too."""

    def term(num_bytes: int | None) -> str:
        return "not given, counts as 0" if num_bytes is None else _exact(num_bytes)

    share = memory.utilization
    weights = f"{_exact(memory.weight_bytes)} = {format_decimal_bytes(memory.weight_bytes)}"
    if memory.weights_as:
        weights = f"{weights}: {memory.weights_as}"
    return [
        ("memory", term(memory.memory_bytes)),
        ("x utilization", "not given, counts as 1" if share is None else f"{float(share):g}"),
        ("- weights", weights),
        ("- workspace", term(memory.workspace_bytes)),
        ("- reserve", term(memory.reserve_bytes)),
        ("= pool", term(memory.pool_bytes)),
    ]


_PLAN = ("block size", "blocks", "slots", "memory", "tail waste", "%", "fits")
_READINGS = ("block size", "tail waste, %", "of the read, %", "GB/s")
_TABLES = ("block size", "table entries", "table bytes", "of memory", "%")
_CONTIGUOUS = ("in one piece", "slots", "memory", "over-allocated", "rounding", "moved")
_WAYS = {"reserve": "{:,} reserved", "pow2": "power of two", "grow": "grown by {:,}"}
_BLOCKS = ("block size", "a block", "blocks in the pool", "left over")


def _plan_row(plan: BlockPlan) -> list[str]:
    if plan.fits is None:
        fits = "no pool given"
    elif plan.fits:
        fits = f"yes, {plan.free_slots:,} slots free"
    else:
        short = format_bytes(plan.short_bytes or 0)
        fits = f"no, {plan.short_slots:,} slots ({short}) short"
    return [
        f"{plan.block_size:,}",
        f"{plan.num_blocks:,}",
        f"{plan.num_slots:,}",
        format_bytes(plan.num_bytes),
        f"{plan.tail_waste_slots:,}",
        f"{100 * plan.tail_waste_ratio:.2f}",
        fits,
    ]


def _tables_row(plan: BlockPlan) -> list[str]:
    ratio = plan.table_ratio
    return [
        f"{plan.block_size:,}",
        f"{plan.table_entries:,}",
        f"{plan.table_bytes:,}",
        f"{'' if ratio.numerator == 1 else '~'}1/{round(1 / ratio):,}",
        f"{float(100 * ratio):.4g}",
    ]


def _block_row(block_size: int, model: Model, memory: Memory) -> list[str]:
    block_bytes = block_size * model.bytes_per_token
    row = [f"{block_size:,}", format_bytes(block_bytes)]
    if memory.pool_bytes is None:
        return [*row, "no pool given", ""]
    count, rest = divmod(memory.pool_bytes, block_bytes)
    return [*row, f"{count:,}", format_bytes(rest)]


def _reading_row(plan: BlockPlan, readings: Readings) -> list[str]:
    found = [one for one in readings.sizes if one.block_size == plan.block_size]
    waste = f"{100 * plan.tail_waste_ratio:.2f}"
    if not found:
        return [f"{plan.block_size:,}", waste, "not measured", ""]
    return [
        f"{plan.block_size:,}",
        waste,
        f"{100 * found[0].share:.0f}",
        f"{found[0].gb_per_s:.1f}",
    ]


def _about(readings: Readings) -> str:
    threads = "1 thread" if readings.num_threads == 1 else f"{readings.num_threads} threads"
    return (
        f"Measured with {readings.batch:,} sequences of {readings.context:,} tokens in "
        f"{readings.dtype} on {threads}, as a share of a read in one line."
    )


def _recommendation(plans: Sequence[BlockPlan], readings: Readings | None) -> str:
    speeds = None if readings is None else readings.shares
    size, reason = recommend(plans, speeds)
    is_known = speeds is not None and size in speeds
    unknown = UNKNOWN_GROWTH if is_known else UNKNOWN
    best = next(plan for plan in plans if plan.block_size == size)
    larger = min(
        (plan for plan in plans if plan.block_size > size),
        key=lambda plan: plan.block_size,
        default=None,
    )
    tables = ""
    if larger is not None:
        ratio = best.table_entries / larger.table_entries
        tables = f" Its tables have {ratio:.2f}x the entries of those of {larger.block_size:,}."
    return f"Recommended: blocks of {size:,}, {reason}.{tables} Not known here: {unknown}."


def _exact(num_bytes: int) -> str:
    shown = format_bytes(num_bytes)
    return shown if shown.endswith(" B") else f"{num_bytes:,} bytes ({shown})"
