"""Vectors of float32 in LLVM IR: the words that the kernels' tiles are written in.

It knows instructions and how each KV dtype becomes float32, and it knows no attention. Every
operation here rounds in one way only, so what is computed with them has the same bits wherever it
is inlined: no fast-math flag lets LLVM change the order of a sum.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

# llvmlite publishes no types.
Builder: TypeAlias = Any
Value: TypeAlias = Any

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()

_FEATURES = llvm.get_host_cpu_features()
HAS_AVX512 = bool(_FEATURES.get("avx512f"))
# Floats in a vector. Tiles keep sums in registers: 32 of 64 bytes with AVX-512, 16 of 32 without.
WIDTH = 16 if HAS_AVX512 else 8
VECTOR = ir.VectorType(FLOAT, WIDTH)
CACHE_LINE = 64

_SIZES = {FLOAT: 4, HALF: 2, I16: 2, I8: 1}
_SUFFIXES = {FLOAT: "f32", HALF: "f16", I16: "i16", I8: "i8"}


def splat(builder: Builder, scalar: Value) -> Value:
    """Return a vector of one value."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, I32(0))
    return shuffle(builder, one, one, [0] * WIDTH)


def constant(number: float) -> Value:
    """Return a constant vector of one value."""
    return ir.Constant(VECTOR, [number] * WIDTH)


def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x * y + z, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(_declare(builder, f"llvm.fma.v{WIDTH}f32", kind), [x, y, z])


def maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Return the greater of two; x where y is NaN."""
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


def prefetch(builder: Builder, address: Value) -> None:
    """Ask for the cache line at an address; nothing happens where nothing is mapped."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    read, keep_in_all_levels, data = I32(0), I32(3), I32(1)
    function = _declare(builder, "llvm.prefetch.p0", kind)
    builder.call(function, [pointer, read, keep_in_all_levels, data])


def touch(builder: Builder, address: Value) -> None:
    """Load what is at an address, for the sake of its cache line; an atomic load is never dropped."""
    builder.load_atomic(builder.inttoptr(address, I32.as_pointer()), "monotonic", 4)


def load(builder: Builder, address: Value, mask: Value | None = None) -> Value:
    """Load WIDTH floats; where the mask is off, 0 without touching memory."""
    return _load_items(builder, address, FLOAT, mask)


def store(builder: Builder, vector: Value, address: Value) -> None:
    """Store the floats of a vector of any length."""
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = 4


def load_scalar(builder: Builder, address: Value) -> Value:
    """Load one float."""
    return builder.load(builder.inttoptr(address, FLOAT.as_pointer()))


def store_scalar(builder: Builder, value: Value, address: Value) -> None:
    """Store one float."""
    builder.store(value, builder.inttoptr(address, FLOAT.as_pointer()))


def load_kv(builder: Builder, item: types.Type, address: Value, mask: Value | None = None) -> Value:
    """Load WIDTH items of a cache as floats. The item's NumPy type stands for its KV dtype."""
    if item == types.float32:
        return load(builder, address, mask)
    if item == types.int16:
        return builder.fpext(_load_items(builder, address, HALF, mask), VECTOR)
    if item == types.uint16:
        return _from_bfloat16(builder, _load_items(builder, address, I16, mask))
    if item == types.int8:
        return builder.sitofp(_load_items(builder, address, I8, mask), VECTOR)
    assert item == types.uint8, item
    return _from_float8(builder, _load_items(builder, address, I8, mask))


def _load_items(builder: Builder, address: Value, item: Value, mask: Value | None) -> Value:
    kind = ir.VectorType(item, WIDTH)
    pointer = builder.inttoptr(address, kind.as_pointer())
    align = _SIZES[item]
    if mask is None:
        loaded = builder.load(pointer)
        loaded.align = align
        return loaded
    masks = ir.VectorType(ir.IntType(1), WIDTH)
    signature = ir.FunctionType(kind, [kind.as_pointer(), I32, masks, kind])
    name = f"llvm.masked.load.v{WIDTH}{_SUFFIXES[item]}.p0"
    function = _declare(builder, name, signature)
    return builder.call(function, [pointer, I32(align), mask, ir.Constant(kind, None)])


def _declare(builder: Builder, name: str, signature: Value) -> Value:
    """Declare an instruction that LLVM knows by name, once a module."""
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, signature, name)


def _from_bfloat16(builder: Builder, items: Value) -> Value:
    """Its bits are the upper half of a float's."""
    words = ir.VectorType(I32, WIDTH)
    wide = builder.zext(items, words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * WIDTH)), VECTOR)


# What float8 is short of after `load_kv`: its exponent's bias is 7, that of a half is 15.
FLOAT8_FACTOR = 2.0**8


def _from_float8(builder: Builder, items: Value) -> Value:
    """Return e4m3 over 2**8: its exponent and mantissa are a half's upper bits but for the bias."""
    words = ir.VectorType(I16, WIDTH)

    def all_of(number: int) -> Value:
        return ir.Constant(words, [number] * WIDTH)

    wide = builder.zext(items, words)
    magnitude = builder.and_(wide, all_of(0x7F))
    sign = builder.shl(builder.and_(wide, all_of(0x80)), all_of(8))
    half = builder.or_(builder.shl(magnitude, all_of(7)), sign)
    is_nan = builder.icmp_unsigned("==", magnitude, all_of(0x7F))
    half = builder.select(is_nan, all_of(0x7E00), half)
    return builder.fpext(builder.bitcast(half, ir.VectorType(HALF, WIDTH)), VECTOR)


def first_lanes(builder: Builder, count: Value) -> Value:
    """Return a mask of the first `count` lanes of a vector."""
    words = ir.VectorType(I32, WIDTH)
    one = builder.insert_element(
        ir.Constant(words, ir.Undefined), builder.trunc(count, I32), I32(0)
    )
    counts = shuffle(builder, one, one, [0] * WIDTH)
    return builder.icmp_unsigned("<", ir.Constant(words, list(range(WIDTH))), counts)


def fold(builder: Builder, vectors: list[Value], join: Callable[..., Value]) -> Value:
    """Fold each of 1, 2, 4, ... WIDTH vectors to one float; these stand side by side in the result.

    A vector's floats are joined in one tree, its halves first, whatever vectors stand beside it: the
    result has the same bits alone and among others. As soon as halves fit, two vectors go on as one:

        a0 a1 a2 a3   b0 b1 b2 b3   ->   join(a0 a1 b0 b1, a2 a3 b2 b3)   ->   ...
    """
    width = WIDTH  # of what is left of one vector
    while width > 1:
        halves = [i for i in range(vectors[0].type.count) if i % width < width // 2]
        if len(vectors) == 1:
            pairs, low = [(vectors[0], vectors[0])], halves
        else:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            low = halves + [vectors[0].type.count + i for i in halves]
        high = [i + width // 2 for i in low]
        vectors = [
            join(builder, shuffle(builder, x, y, low), shuffle(builder, x, y, high))
            for x, y in pairs
        ]
        width //= 2
    return vectors[0]


def add(builder: Builder, x: Value, y: Value) -> Value:
    """Return x + y."""
    return builder.fadd(x, y)


def exp(builder: Builder, x: Value) -> Value:
    """Return e**x for x <= 0 within 1e-7, 0 below -87, and NaN for NaN.

    x = n ln 2 + r with an integer n and |r| <= ln(2) / 2: a Taylor polynomial gives e**r.
    """
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits.
    shifted = fma(builder, x, constant(1 / math.log(2)), constant(1.5 * 2**23))
    n = builder.fsub(shifted, constant(1.5 * 2**23))
    # ln 2 in two parts, of which the first has few bits: n times it is exact.
    first_part = 0.693359375
    r = fma(builder, n, constant(-first_part), x)
    r = fma(builder, n, constant(first_part - math.log(2)), r)
    power_series = constant(1 / math.factorial(7))
    for k in range(6, -1, -1):
        power_series = fma(builder, power_series, r, constant(1 / math.factorial(k)))
    # 2**n: n in the exponent's bits, onto those of 1.0.
    words = ir.VectorType(I32, WIDTH)
    exponent = builder.shl(builder.bitcast(shifted, words), ir.Constant(words, [23] * WIDTH))
    power = builder.add(exponent, ir.Constant(words, [0x3F800000] * WIDTH))
    result = builder.fmul(power_series, builder.bitcast(power, VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(0.0), result)


def tanh(builder: Builder, x: Value) -> Value:
    """Return tanh x within 2e-7 of itself, and NaN for NaN.

    Far from 0 it is (1 - e**-2|x|) / (1 + e**-2|x|). Near 0 that would lose digits, and Lambert's
    continued fraction x / (1 + x**2 / (3 + x**2 / (5 + ...))) ends early.
    """
    one = constant(1.0)
    size = builder.call(
        _declare(builder, f"llvm.fabs.v{WIDTH}f32", ir.FunctionType(VECTOR, [VECTOR])), [x]
    )
    power = exp(builder, builder.fmul(size, constant(-2.0)))
    far = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
    far = builder.select(builder.fcmp_ordered("<", x, constant(0.0)), builder.fneg(far), far)
    square = builder.fmul(x, x)
    near = constant(11.0)
    for odd in (9, 7, 5, 3, 1):
        near = builder.fadd(builder.fdiv(square, near), constant(float(odd)))
    near = builder.fdiv(x, near)
    return builder.select(builder.fcmp_ordered("<", size, one), near, far)


def shuffle(builder: Builder, x: Value, y: Value, order: list[int]) -> Value:
    """Return the floats at `order` of x and y, one after the other."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))
