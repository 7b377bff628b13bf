"""The three inner tiles of attention: scores, softmax and values of some lanes and one run of keys.

A lane is a query row of one head, and a run is the keys (or values) of one block and one KV head.
Lanes stand one after another in the arrays of a worker:

    queries  [lanes, padded_dim]   scaled; 0 past head_dim
    scores   [lanes, padded_keys]  scores; after `softmax_tile` weights
    sums     [lanes, padded_dim]   sum of weight * value
    totals   [lanes, WIDTH]        sum of weights, in WIDTH parts
    tops     [lanes]               the greatest score so far
    factors  [lanes]               what the last `softmax_tile` wants `sums` to be multiplied by

It knows runs in memory, and not which tokens they are, what masks them, or what comes next. Lanes
go four, two or one at a time, which changes no bit of a lane: each is computed in one order.

While a run is read, two others are asked for, line by line in the order of their addresses: the
one that is read next and the one after the one after that. Twice, because a processor drops
prefetches when its queue of misses is full; the second time finds what was dropped.
"""
# ruff: noqa: PLR0917  # Numba takes arguments by position

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkernels.cpu import vectors as vec
from kvkernels.cpu.vectors import CACHE_LINE, I32, I64, WIDTH, Builder, Value

# What is summed in registers beside what is loaded: keys for each lane of a score tile, and vectors
# for each lane of a value tile.
KEYS_AT_ONCE = 4 if vec.HAS_AVX512 else 2
VECTORS_AT_ONCE = 4 if vec.HAS_AVX512 else 2
LANES_AT_ONCE = (4, 2, 1)
FLOAT_SIZE = 4
# Items of so many bytes are computed with faster than memory delivers them.
TOUCHED_SIZE = 4

Emit: TypeAlias = Callable[..., None]

# Numba leaves it untyped.
_alloca: Callable[..., Value] = cgutils.alloca_once


class Items(NamedTuple):
    """An array as a tile sees it."""

    start: Value
    item: Any  # its Numba type

    @property
    def size(self) -> int:
        """Bytes of an item."""
        return int(self.item.bitwidth) // 8


class _Tile:
    """The code of one tile while it is emitted: integers, addresses, loops and branches."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder

    def plus(self, start: Value, *terms: Value | tuple[Value, Any]) -> Value:
        """Return the sum of `start` and the terms; a pair of values is its product."""
        for term in terms:
            value = term
            if isinstance(term, tuple):
                x, y = term
                value = self.b.mul(x, y if isinstance(y, ir.Value) else I64(y))
            start = self.b.add(start, value)
        return start

    def address(self, items: Items, *index: Value | tuple[Value, Any]) -> Value:
        """Return the address of the item at the sum of the terms of `index`."""
        return self.plus(items.start, (self.plus(I64(0), *index), items.size))

    def round_down(self, x: Value, power_of_2: int) -> Value:
        """Return the greatest multiple that is at most x."""
        return self.b.and_(x, I64(-power_of_2))

    def least(self, x: Value, y: Value) -> Value:
        """Return the smaller of two integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int) -> Iterator[Value]:
        """Repeat what is emitted inside for start, start + step, ... below stop."""
        with cgutils.for_range_slice(self.b, start, stop, I64(step)) as (index, _):
            yield index

    @contextmanager
    def when(self, x: Value, relation: str, y: Value) -> Iterator[None]:
        """Do what is emitted inside if a comparison of integers holds."""
        with self.b.if_then(self.b.icmp_signed(relation, x, y)):
            yield

    def for_lanes(self, num_lanes: Value, emit: Callable[[Value, int], None]) -> None:
        """Emit a tile for all lanes: fours as long as there are four, then two, then one."""
        start = I64(0)
        for num_together in LANES_AT_ONCE:
            stop = self.round_down(num_lanes, num_together)
            with self.loop(start, stop, num_together) as lane:
                emit(lane, num_together)
            start = stop

    def prefetch(self, runs: tuple[Value, ...], done: Value, num_bytes: int) -> None:
        """Ask for the next few bytes of dense runs, the first `done` of which are on the way."""
        for run in runs:
            for line in range(0, num_bytes, CACHE_LINE):
                vec.prefetch(self.b, self.plus(run, done, I64(line)))

    def touch(self, run: Value, ahead: Value, num_bytes: Value) -> None:
        """Load a line after the other of a dense run, and ask for the run that is read next.

        A load that misses waits, beside many others and in an order that the processor foresees;
        when the run is computed with, it is there.
        """
        step = 8 * CACHE_LINE
        with self.loop(I64(0), self.round_down(num_bytes, step), step) as done:
            self.prefetch((ahead,), done, step)
            for line in range(0, step, CACHE_LINE):
                vec.touch(self.b, self.plus(run, done, I64(line)))


class _Registers:
    """Vectors that live in registers across iterations: LLVM promotes them from the stack."""

    def __init__(self, tile: _Tile, count: int) -> None:
        self._b = tile.b
        self._slots = [_alloca(self._b, vec.VECTOR) for _ in range(count)]

    def __getitem__(self, n: int) -> Value:
        return self._b.load(self._slots[n])

    def __setitem__(self, n: int, value: Value) -> None:
        self._b.store(value, self._slots[n])

    def fold(self, join: Callable[..., Value]) -> Value:
        """Fold each vector to one float, side by side."""
        return vec.fold(self._b, [self[n] for n in range(len(self._slots))], join)


def _tile(emit: Emit) -> Any:
    """Make an intrinsic of a function that emits code.

    Its arrays are `Items`, its floats are float32, and the rest is int64.
    """

    @functools.wraps(emit)
    def typing(_context: Any, *kinds: Any) -> Any:
        passed = types.Array | types.Float
        arguments = [kind if isinstance(kind, passed) else types.int64 for kind in kinds]

        def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
            emitted = []
            for kind, value in zip(signature.args, values, strict=True):
                if isinstance(kind, types.Array):
                    data = context.make_array(kind)(context, builder, value).data
                    emitted.append(Items(builder.ptrtoint(data, I64), kind.dtype))
                else:
                    emitted.append(value)
            emit(_Tile(builder), *emitted)
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return intrinsic(typing)


@_tile
def score_tile(
    tile: _Tile,
    queries: Items,
    padded_dim: Value,
    keys: Items,
    run: Value,
    key_step: Value,
    num_keys: Value,
    head_dim: Value,
    num_lanes: Value,
    first_lane: Value,
    scores: Items,
    first_score: Value,
    padded_keys: Value,
    is_dense: Value,
    soon: Value,
    later: Value,
) -> None:
    """Write the scores of a run's keys for each lane, to scores[lane, first_score:].

    The lane's query is queries[first_lane + lane].

    Key i starts `i * key_step` items after the address `run`; of the array `keys` only the type of
    its items counts. Scores past num_keys, up to a multiple of KEYS_AT_ONCE, hold anything. If runs
    are dense, those at the addresses `soon` and `later` are asked for.
    """
    b = tile.b
    whole = tile.round_down(head_dim, WIDTH)
    last_key = b.sub(num_keys, I64(1))
    if keys.size >= TOUCHED_SIZE:
        dense_keys = b.mul(num_keys, is_dense)
        tile.touch(run, soon, tile.plus(I64(0), (b.mul(dense_keys, head_dim), keys.size)))

    def emit(lane: Value, num_together: int) -> None:
        products = _Registers(tile, num_together * KEYS_AT_ONCE)
        lanes = [b.add(lane, I64(g)) for g in range(num_together)]
        asks = b.select(b.icmp_signed("==", lane, I64(0)), is_dense, I64(0))

        def add_products(d: Value, starts: list[Value], mask: Value | None) -> None:
            parts = [
                vec.load_kv(b, keys.item, tile.plus(start, (d, keys.size)), mask)
                for start in starts
            ]
            for g, n in enumerate(lanes):
                own = tile.plus(first_lane, n)
                query = vec.load(b, tile.address(queries, (own, padded_dim), d))
                for i, part in enumerate(parts):
                    at = g * KEYS_AT_ONCE + i
                    products[at] = vec.fma(b, query, part, products[at])

        with tile.loop(I64(0), num_keys, KEYS_AT_ONCE) as key:
            for at in range(num_together * KEYS_AT_ONCE):
                products[at] = vec.constant(0.0)
            # Past the end the last key is read again: nothing that is not a key is touched.
            together = [tile.least(b.add(key, I64(i)), last_key) for i in range(KEYS_AT_ONCE)]
            starts = [tile.plus(run, (b.mul(k, key_step), keys.size)) for k in together]
            with tile.loop(I64(0), whole, WIDTH) as d:
                with tile.when(asks, "!=", I64(0)):
                    done = tile.plus(I64(0), (key, head_dim), (d, KEYS_AT_ONCE))
                    num_bytes = KEYS_AT_ONCE * WIDTH * keys.size
                    tile.prefetch((soon, later), b.mul(done, I64(keys.size)), num_bytes)
                add_products(d, starts, None)
            with tile.when(whole, "<", head_dim):
                add_products(whole, starts, vec.first_lanes(b, b.sub(head_dim, whole)))
            folded = products.fold(vec.add)
            for g, n in enumerate(lanes):
                own = [g * KEYS_AT_ONCE + i for i in range(KEYS_AT_ONCE)]
                place = tile.address(scores, (n, padded_keys), first_score, key)
                vec.store(b, vec.shuffle(b, folded, folded, own), place)

    tile.for_lanes(num_lanes, emit)


@_tile
def softmax_tile(
    tile: _Tile,
    scores: Items,
    padded_keys: Value,
    num_keys: Value,
    num_lanes: Value,
    first_lane: Value,
    tops: Items,
    totals: Items,
    factors: Items,
) -> None:
    """Turn the first `num_keys` scores of each lane, a multiple of WIDTH, into weights.

    The weight of a score is exp(score - top), for the greatest score that the lane has met.
    """
    b = tile.b

    def emit(lane: Value, num_together: int) -> None:
        rows = [
            tile.address(scores, (b.add(lane, I64(g)), padded_keys)) for g in range(num_together)
        ]
        lanes = [tile.plus(first_lane, lane, I64(g)) for g in range(num_together)]
        highest, sums = _Registers(tile, num_together), _Registers(tile, num_together)
        for g in range(num_together):
            highest[g] = vec.constant(-math.inf)
        with tile.loop(I64(0), num_keys, WIDTH) as key:
            for g, row in enumerate(rows):
                found = vec.load(b, tile.plus(row, (key, FLOAT_SIZE)))
                highest[g] = vec.maximum(b, highest[g], found)
        folded = highest.fold(vec.maximum)
        for g, n in enumerate(lanes):
            before = vec.splat(b, vec.load_scalar(b, tile.address(tops, n)))
            top = vec.maximum(b, before, vec.splat(b, b.extract_element(folded, I32(g))))
            factor = vec.exp(b, b.fsub(before, top))
            highest[g] = top
            sums[g] = b.fmul(vec.load(b, tile.address(totals, (n, WIDTH))), factor)
            vec.store_scalar(b, b.extract_element(top, I32(0)), tile.address(tops, n))
            vec.store_scalar(b, b.extract_element(factor, I32(0)), tile.address(factors, n))
        with tile.loop(I64(0), num_keys, WIDTH) as key:
            for g, row in enumerate(rows):
                place = tile.plus(row, (key, FLOAT_SIZE))
                weights = vec.exp(b, b.fsub(vec.load(b, place), highest[g]))
                vec.store(b, weights, place)
                sums[g] = b.fadd(sums[g], weights)
        for g, n in enumerate(lanes):
            vec.store(b, sums[g], tile.address(totals, (n, WIDTH)))

    tile.for_lanes(num_lanes, emit)


@_tile
def value_tile(
    tile: _Tile,
    weights: Items,
    first_weight: Value,
    padded_keys: Value,
    values: Items,
    run: Value,
    value_step: Value,
    num_keys: Value,
    head_dim: Value,
    num_lanes: Value,
    first_lane: Value,
    factors: Items,
    sums: Items,
    padded_dim: Value,
    is_dense: Value,
    soon: Value,
    later: Value,
) -> None:
    """Multiply each lane's sums by its factor, and add a run's values times their weights.

    Value i starts `i * value_step` items after the address `run`, and its weight is
    weights[lane, first_weight + i]. If runs are dense, those at `soon` and `later` are asked for.
    """
    b = tile.b
    if values.size >= TOUCHED_SIZE:
        dense_keys = b.mul(num_keys, is_dense)
        tile.touch(run, soon, tile.plus(I64(0), (b.mul(dense_keys, head_dim), values.size)))

    def emit(lane: Value, num_together: int) -> None:
        rows = [
            tile.address(weights, (b.add(lane, I64(g)), padded_keys), first_weight)
            for g in range(num_together)
        ]
        lanes = [tile.plus(first_lane, lane, I64(g)) for g in range(num_together)]
        asks = b.select(b.icmp_signed("==", lane, I64(0)), is_dense, I64(0))

        def strip(d: Value, num_vectors: int, mask: Value | None = None) -> None:
            """Do num_vectors vectors of each value: a lane's sums stay in registers."""
            width = num_vectors * WIDTH
            held = _Registers(tile, num_together * num_vectors)
            places = [
                tile.address(sums, (n, padded_dim), d, I64(v * WIDTH))
                for n in lanes
                for v in range(num_vectors)
            ]
            for g, n in enumerate(lanes):
                factor = vec.splat(b, vec.load_scalar(b, tile.address(factors, n)))
                for at in range(g * num_vectors, (g + 1) * num_vectors):
                    held[at] = b.fmul(vec.load(b, places[at]), factor)
            with tile.loop(I64(0), num_keys, 1) as key:
                with tile.when(asks, "!=", I64(0)):
                    done = tile.plus(I64(0), (d, num_keys), (key, width))
                    num_bytes = width * values.size
                    tile.prefetch((soon, later), b.mul(done, I64(values.size)), num_bytes)
                index = tile.plus(d, (key, value_step))
                start = tile.plus(run, (index, values.size))
                parts = [
                    vec.load_kv(b, values.item, b.add(start, I64(v * WIDTH * values.size)), mask)
                    for v in range(num_vectors)
                ]
                for g, row in enumerate(rows):
                    weight = vec.splat(b, vec.load_scalar(b, tile.plus(row, (key, FLOAT_SIZE))))
                    for v, part in enumerate(parts):
                        at = g * num_vectors + v
                        held[at] = vec.fma(b, weight, part, held[at])
            for at, place in enumerate(places):
                vec.store(b, held[at], place)

        wide = VECTORS_AT_ONCE * WIDTH
        whole_wide, whole = tile.round_down(head_dim, wide), tile.round_down(head_dim, WIDTH)
        with tile.loop(I64(0), whole_wide, wide) as d:
            strip(d, VECTORS_AT_ONCE)
        with tile.loop(whole_wide, whole, WIDTH) as d:
            strip(d, 1)
        with tile.when(whole, "<", head_dim):
            strip(whole, 1, vec.first_lanes(b, b.sub(head_dim, whole)))

    tile.for_lanes(num_lanes, emit)


@_tile
def cap_tile(tile: _Tile, scores: Items, num_scores: Value, softcap: Value) -> None:
    """Turn each score into softcap * tanh(score / softcap); so many are a multiple of WIDTH."""
    b = tile.b
    cap = vec.splat(b, softcap)
    with tile.loop(I64(0), num_scores, WIDTH) as n:
        place = tile.address(scores, n)
        vec.store(b, b.fmul(cap, vec.tanh(b, b.fdiv(vec.load(b, place), cap))), place)


def _address_of(_context: Any, array: Any, _index: Any) -> Any:
    """Return the address of array[index]; an index is never counted from the end."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), I64)

    return types.int64(array, types.int64), generate


# Numba gives the function that is called another signature.
address_of: Any = intrinsic(_address_of)
