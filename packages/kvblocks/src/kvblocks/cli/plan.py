"""`kvblocks plan`: what block sizes mean for a model, a pool and the lengths of its sequences.

Knows the options and how to show a plan. All arithmetic is in `kvblocks.sizing`.
"""

import argparse
import json
from typing import Any

from kvblocks.cli.parser import Subparsers, listed, terminal_width, typed
from kvblocks.cli.tables import render_table
from kvblocks.errors import InvalidSize
from kvblocks.sizing import BlockPlan, bytes_per_token, dtype_bytes, plan_blocks
from kvblocks.units import format_bytes, parse_bytes, parse_count


def add_parser(commands: "Subparsers[Any]") -> None:
    """Add `plan`."""
    parser = commands.add_parser(
        "plan",
        help="how much memory, which block size",
        description="Say what each block size means: blocks, bytes, waste, and whether it fits.",
        epilog="Example:\n  kvblocks plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 "
        "--pool 16MiB --lengths 17,31,32,33 --block-size 8,16,32",
    )
    model = parser.add_argument_group("the cache of one token")
    model.add_argument("--layers", type=typed(parse_count), metavar="N")
    model.add_argument("--kv-heads", type=typed(parse_count), metavar="N")
    model.add_argument("--head-dim", type=typed(parse_count), metavar="N")
    model.add_argument("--dtype", help="of keys and values, as float16")
    model.add_argument("--bytes-per-token", type=typed(parse_bytes), metavar="SIZE")
    parser.add_argument("--pool", type=typed(parse_bytes), metavar="SIZE", help="as 16MiB or 80GB")
    parser.add_argument(
        "--lengths", type=listed(parse_count), default=[], metavar="N,N,...", help="tokens"
    )
    parser.add_argument(
        "--block-size",
        type=listed(parse_count),
        default=[8, 16, 32, 64, 128],
        metavar="N,N,...",
        help="tokens a block",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    token_bytes = _bytes_per_token(options)
    plans = [
        plan_blocks(options.lengths, size, bytes_per_token=token_bytes, pool_bytes=options.pool)
        for size in options.block_size
    ]
    if options.json:
        print(json.dumps(_as_json(options, token_bytes, plans), indent=2))
        return
    print(f"bytes per token  {token_bytes:,} ({format_bytes(token_bytes)})\n")
    print(render_table(_HEADERS, [_row(plan) for plan in plans], terminal_width()))


def _bytes_per_token(options: argparse.Namespace) -> int:
    if options.bytes_per_token is not None:
        return int(options.bytes_per_token)
    shape = (options.layers, options.kv_heads, options.head_dim, options.dtype)
    if None in shape:
        raise InvalidSize(
            "the size of a token is needed: --bytes-per-token, or all of --layers, --kv-heads, "
            "--head-dim and --dtype"
        )
    return bytes_per_token(*shape[:3], dtype_bytes(options.dtype))


_HEADERS = ("block size", "blocks", "slots", "memory", "tail waste", "table", "fits")


def _row(plan: BlockPlan) -> list[str]:
    if plan.fits is None:
        fits = "no pool given"
    elif plan.fits:
        fits = f"yes, {plan.free_slots:,} slots free"
    else:
        fits = f"{plan.short_slots:,} slots short"
    return [
        f"{plan.block_size}",
        f"{plan.num_blocks:,}",
        f"{plan.num_slots:,}",
        format_bytes(plan.num_bytes),
        f"{plan.tail_waste_slots:,} ({100 * plan.tail_waste_ratio:.2f} %)",
        f"{plan.table_entries:,}",
        fits,
    ]


def _as_json(
    options: argparse.Namespace, token_bytes: int, plans: list[BlockPlan]
) -> dict[str, Any]:
    return {
        "bytes_per_token": token_bytes,
        "pool_bytes": options.pool,
        "pool_slots": None if options.pool is None else options.pool // token_bytes,
        "useful_tokens": sum(options.lengths),
        "block_sizes": [
            {
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
            for plan in plans
        ],
    }
