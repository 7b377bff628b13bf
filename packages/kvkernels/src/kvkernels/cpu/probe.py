"""How fast memory is read when nothing is computed: in one line, and in the order of attention.

It knows addresses and bytes. Slowing it flatters attention: a change that makes a probe slower is a bug.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkernels.cpu.compiled import compiled
from kvkernels.cpu.signatures import COUNTER, INT, INT32_2D
from kvkernels.cpu.work import take

_LINE = 64
_AT_ONCE = 8  # lines in a pass, each with a sum of its own
_FLOATS = ir.VectorType(ir.FloatType(), _LINE // 4)
# Numba leaves it untyped.
_alloca: Callable[..., Any] = cgutils.alloca_once
_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)


@intrinsic
def _read(_context: Any, _address: Any, _num_bytes: Any, _ahead: Any) -> Any:
    """Add up float32 at an address and prefetch as many bytes at another; returns the sum."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, num_bytes, ahead = arguments
        sums = [_alloca(builder, _FLOATS) for _ in range(_AT_ONCE)]
        for place in sums:
            builder.store(ir.Constant(_FLOATS, [0.0] * (_LINE // 4)), place)
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        prefetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        step = _I64(_LINE * _AT_ONCE)
        with cgutils.for_range_slice(builder, _I64(0), num_bytes, step) as (done, _):
            for n, place in enumerate(sums):
                offset = builder.add(done, _I64(n * _LINE))
                line = builder.inttoptr(builder.add(ahead, offset), _I8.as_pointer())
                builder.call(prefetch, [line, _I32(0), _I32(3), _I32(1)])
                pointer = builder.inttoptr(builder.add(address, offset), _FLOATS.as_pointer())
                loaded = builder.load(pointer)
                loaded.align = 4
                builder.store(builder.fadd(builder.load(place), loaded), place)
        total = builder.load(sums[0])
        for place in sums[1:]:
            total = builder.fadd(total, builder.load(place))
        return builder.extract_element(total, _I32(0))

    return types.float32(types.int64, types.int64, types.int64), generate


read: Any = _read


@compiled(INT, INT, INT, COUNTER)
def linear(address: int, num_bytes: int, num_parts: int, next_part: Any) -> Any:
    """Read a stretch of memory, part by part, with whoever shares `next_part`."""
    total = np.float32(0)
    size = num_bytes // num_parts
    while True:
        part = take(next_part)
        if part >= num_parts:
            return total
        start = address + part * size
        total += read(start, size, start + 4096)


@compiled(INT, INT, INT32_2D, INT, INT, COUNTER)
def in_order(
    keys: int, values: int, block_table: Any, block_bytes: int, run_bytes: int, next_sequence: Any
) -> Any:
    """Read what attention reads, in its order: the blocks of a sequence, head by head, key and value."""
    total = np.float32(0)
    num_blocks = block_table.shape[1]
    while True:
        s = take(next_sequence)
        if s >= block_table.shape[0]:
            return total
        for i in range(num_blocks):
            start = np.int64(block_table[s, i]) * block_bytes
            ahead = np.int64(block_table[s, min(i + 1, num_blocks - 1)]) * block_bytes
            for run in range(start, start + block_bytes, run_bytes):
                following = run + run_bytes if run + run_bytes < start + block_bytes else ahead
                total += read(keys + run, run_bytes, values + run)
                total += read(values + run, run_bytes, keys + following)
