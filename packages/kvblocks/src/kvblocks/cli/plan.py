"""`kvblocks plan`: how much memory, which block size.

Knows the options and the JSON object. What is given together is read in `plan_inputs`, how it looks is
in `plan_text`, and all arithmetic is in `kvblocks.sizing` and `kvblocks.planning`.
"""

import argparse
import json
from typing import Any

from kvblocks.cli.parser import Subparsers, listed, terminal_width, typed
from kvblocks.cli.plan_inputs import (
    MODEL_OPTIONS,
    Model,
    parse_length,
    read_lengths,
    read_memory,
    read_model,
)
from kvblocks.cli.plan_text import (
    show_contiguous,
    show_fragmentation,
    show_layouts,
    show_plan,
)
from kvblocks.contiguous import Segment, fragmentation
from kvblocks.errors import InvalidUsage
from kvblocks.planning import BlockPlan, ContiguousPlan, plan_blocks, plan_contiguous, recommend
from kvblocks.readings import read_readings
from kvblocks.sizing import locate, packed_shapes
from kvblocks.units import parse_bytes, parse_count, parse_share


def add_parser(commands: "Subparsers[Any]") -> None:
    """Add `plan`."""
    parser = commands.add_parser(
        "plan",
        help="how much memory, which block size",
        description=(
            "Say what each block size means for a cache: blocks, bytes, waste, tables, and whether "
            "sequences of given lengths fit.\nSizes take a unit: B, kB, MB, GB, TB, PB are powers of "
            "1000, KiB, MiB, GiB, TiB, PiB of 1024."
        ),
        epilog=(
            "Examples:\n"
            "  kvblocks plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 \\\n"
            "      --pool 16MiB --lengths 17,31,32,33 --block-size 8,16,32\n"
            "  kvblocks plan --config config.json --gpu-memory 80GiB --weights 16GB \\\n"
            "      --workspace 2GiB --reserve 1GiB --utilization 0.9 --lengths-from lengths.txt\n"
            "  kvkernels bench --block-sizes 8,16,32,64,128 --json > bench.json\n"
            "  kvblocks plan --config config.json --lengths-from lengths.txt --bench bench.json\n"
            "  kvblocks plan --fragmentation 128MiB,used,128MiB,64MiB --request 256MiB"
        ),
    )
    _add_model(parser)
    _add_memory(parser)
    _add_sequences(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the cache of a token", "its shape, or its size, or a model's config.json"
    )
    group.add_argument("--layers", type=typed(parse_count), metavar="N")
    group.add_argument("--kv-heads", type=typed(parse_count), metavar="N")
    group.add_argument("--head-dim", type=typed(parse_count), metavar="N")
    group.add_argument(
        "--dtype", help="of keys and values, as float16; goes before what --config says"
    )
    group.add_argument("--bytes-per-token", type=typed(parse_bytes), metavar="SIZE")
    group.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, - for stdin")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the pool", "its size, or a memory and what else lives there; none is also an answer"
    )
    size = typed(parse_bytes)
    group.add_argument("--pool", type=size, metavar="SIZE")
    group.add_argument("--gpu-memory", type=size, metavar="SIZE")
    group.add_argument("--weights", type=size, metavar="SIZE")
    group.add_argument(
        "--parameters", type=typed(parse_count), metavar="N", help="instead of --weights, as 8e9"
    )
    group.add_argument("--weights-dtype", metavar="DTYPE", help="of --parameters")
    group.add_argument(
        "--workspace", type=size, metavar="SIZE", help="activations, graphs, buffers"
    )
    group.add_argument("--reserve", type=size, metavar="SIZE", help="left to driver and system")
    group.add_argument(
        "--utilization",
        type=typed(parse_share),
        metavar="SHARE",
        help="of the memory that may be used at all, as 0.9",
    )


def _add_sequences(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sequences and blocks")
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        type=listed(parse_length),
        metavar="N,N,...",
        help="tokens of the sequences that are there at the same time",
    )
    lengths.add_argument(
        "--lengths-from", metavar="FILE", help="the same from a file, one a line; - for stdin"
    )
    group.add_argument(
        "--block-size",
        type=listed(parse_length),
        default=[8, 16, 32, 64, 128],
        metavar="N,N,...",
        help="tokens a block (default: 8,16,32,64,128)",
    )
    group.add_argument(
        "--bench",
        metavar="FILE",
        help="how fast blocks of each size are read: what `kvkernels bench --json` printed",
    )
    group.add_argument(
        "--contiguous",
        type=listed(parse_length),
        metavar="N,N,...",
        help="compare with sequences in one piece each, so many tokens reserved for every one",
    )
    group.add_argument(
        "--locate", type=typed(parse_count), metavar="TOKEN", help="where this token lies"
    )
    group.add_argument(
        "--layout", action="store_true", help="shapes of keys and values in 16-byte vectors"
    )
    group.add_argument(
        "--fragmentation",
        type=listed(_parse_segment),
        metavar="SIZE,used,...",
        help="free segments in the order of their addresses, with `used` or `used:SIZE` between",
    )
    group.add_argument(
        "--request",
        type=typed(parse_bytes),
        metavar="SIZE",
        help="what is asked for in one piece of --fragmentation",
    )


def run(options: argparse.Namespace) -> None:
    """Print what was asked for: a plan, and where a token lies, shapes, free segments."""
    width = terminal_width()
    model = read_model(options)
    parts: list[tuple[dict[str, Any], str]] = []
    if model is not None:
        parts.append(_plan(options, model, width))
    if options.locate is not None:
        parts.append(_locations(options.locate, options.block_size))
    if options.layout:
        parts.append(_layouts(options, model))
    if options.fragmentation is not None:
        parts.append(_fragmentation(options.fragmentation, options.request, width))
    elif options.request is not None:
        raise InvalidUsage("--request needs --fragmentation: the segments that it is asked of")
    if not parts:
        raise InvalidUsage(f"the cache of a token is needed: {MODEL_OPTIONS}")
    if options.json:
        print(
            json.dumps({name: value for part, _ in parts for name, value in part.items()}, indent=2)
        )
    else:
        print("\n\n".join(text for _, text in parts))


def _plan(
    options: argparse.Namespace, model: Model, width: int | None
) -> tuple[dict[str, Any], str]:
    memory = read_memory(options)
    lengths = read_lengths(options)
    plans = [
        plan_blocks(
            lengths,
            size,
            bytes_per_token=model.bytes_per_token,
            pool_bytes=memory.pool_bytes,
            windows=model.windows,
        )
        for size in options.block_size
    ]
    answer: dict[str, Any] = {
        "bytes_per_token": model.bytes_per_token,
        "pool_bytes": memory.pool_bytes,
        "pool_slots": memory.pool_bytes and memory.pool_bytes // model.bytes_per_token,
        "useful_tokens": sum(lengths),
        "block_sizes": [_as_json(plan) for plan in plans],
    }
    readings = None if options.bench is None else read_readings(options.bench, model.dtype)
    if readings is not None:
        if not lengths:
            raise InvalidUsage("--bench needs --lengths: the sequences that a choice is for")
        best = recommend(plans, readings.shares)
        answer["readings"] = {
            "dtype": readings.dtype,
            "num_threads": readings.num_threads,
            "batch": readings.batch,
            "context": readings.context,
            "block_sizes": [reading._asdict() for reading in readings.sizes],
        }
        answer["recommended"] = best._asdict()
    text = show_plan(model, memory, lengths, plans, width, readings=readings)
    if options.contiguous is not None:
        if not lengths:
            raise InvalidUsage("--contiguous needs --lengths: the sequences that it is asked of")
        found = plan_contiguous(lengths, options.contiguous)
        answer["contiguous"] = [_contiguous_as_json(plan, model) for plan in found]
        text = f"{text}\n\n{show_contiguous(found, model.bytes_per_token, width)}"
    return answer, text


def _as_json(plan: BlockPlan) -> dict[str, Any]:
    return {
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "num_slots": plan.num_slots,
        "bytes": plan.num_bytes,
        "tail_waste_slots": plan.tail_waste_slots,
        "tail_waste_ratio": plan.tail_waste_ratio,
        "table_entries": plan.table_entries,
        "table_bytes": plan.table_bytes,
        "fits": plan.fits,
        "free_slots": plan.free_slots,
        "short_slots": plan.short_slots,
        "short_bytes": plan.short_bytes,
    }


def _contiguous_as_json(plan: ContiguousPlan, model: Model) -> dict[str, Any]:
    return {
        "way": plan.way,
        "size": plan.size,
        "num_slots": plan.num_slots,
        "bytes": plan.num_slots * model.bytes_per_token,
        "over_allocated_slots": plan.over_allocated_slots,
        "rounding_slots": plan.rounding_slots,
        "moved_tokens": plan.moved_tokens,
        "moved_bytes": plan.moved_tokens * model.bytes_per_token,
    }


def _locations(token: int, block_sizes: list[int]) -> tuple[dict[str, Any], str]:
    found = [(size, locate(token, size)) for size in block_sizes]
    return (
        {"locate": [{"token": token, "block_size": size, **at._asdict()} for size, at in found]},
        "\n".join(
            f"token {token:,} in blocks of {size:,}: logical block {at.logical_block:,}, "
            f"offset {at.offset:,}"
            for size, at in found
        ),
    )


def _layouts(options: argparse.Namespace, model: Model | None) -> tuple[dict[str, Any], str]:
    if model is None or not model.layers:
        raise InvalidUsage(
            "--layout needs the shape of a token: --config, or --kv-heads and the rest"
        )
    memory = read_memory(options)
    shapes = []
    for layer, num_layers in model.layers.items():
        if layer.is_latent or layer.key_dim != layer.value_dim:
            raise InvalidUsage("--layout needs keys and values of one dimension, not latents")
        for size in options.block_size:
            block_bytes = size * model.bytes_per_token
            num_blocks = 1 if memory.pool_bytes is None else memory.pool_bytes // block_bytes
            found = packed_shapes(
                num_blocks, layer.num_kv_heads, layer.key_dim, size, model.bytes_per_element
            )
            shapes.append({"num_layers": num_layers, "block_size": size, **found._asdict()})
    return {"layout": shapes}, show_layouts(shapes, has_pool=memory.pool_bytes is not None)


def _fragmentation(
    segments: list[Segment], request: int | None, width: int | None
) -> tuple[dict[str, Any], str]:
    found = fragmentation(segments)
    answer: dict[str, Any] = {
        "free_bytes": found.num_free,
        "free_runs": list(found.free_runs),
        "largest_run": found.largest_run,
    }
    if request is not None:
        answer |= {
            "request": request,
            "fits_contiguous": found.fits(request),
            "fits_paged": request <= found.num_free,
            "is_external_fragmentation": found.is_fragmented_for(request),
        }
    return {"fragmentation": answer}, show_fragmentation(found, request, width)


def _parse_segment(text: str) -> Segment:
    name, _, size = text.strip().partition(":")
    if name in {"free", "used"} and size:
        return Segment(parse_bytes(size), is_free=name == "free")
    # How large a used segment is makes no difference to what is free.
    return Segment(0, is_free=False) if name == "used" else Segment(parse_bytes(text), is_free=True)
