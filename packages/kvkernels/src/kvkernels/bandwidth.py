"""How near decode attention comes to the speed at which this machine reads its memory.

It knows one pool of random blocks and three ways to read it: in one line, in the order of attention, and by
attention. Numbers are ratios within one run; what they are shown in is not known here.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkernels.arrays import Array
from kvkernels.attention import paged_attention
from kvkernels.cpu import probe, threads
from kvkernels.dtypes import BY_NAME, from_float32

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One step of decoding: so many sequences of one length."""

    dtype: str = "float32"
    block_size: int = 16
    batch: int = 8
    context: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


class Pool:
    """Caches of twice the blocks that a call reads, in two random orders that share no block."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(0)
        dtype = BY_NAME[shape.dtype]
        per_sequence = -(-shape.context // shape.block_size)
        num_blocks = 2 * shape.batch * per_sequence
        sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.shape = shape
        # Normal numbers in every dtype: others slow arithmetic.
        one = from_float32(np.ones(1, np.float32), dtype)[0]
        self.keys, self.values = (np.full(sizes, one, dtype.bits) for _ in "kv")
        order = rng.permutation(num_blocks).astype(np.int32)
        self.tables = [
            order[n * shape.batch * per_sequence :][: shape.batch * per_sequence].reshape(
                shape.batch, per_sequence
            )
            for n in range(2)
        ]
        self.lengths = np.full(shape.batch, shape.context, np.int32)
        sizes_q = (shape.batch, shape.num_heads, shape.head_dim)
        self.q: Array = rng.standard_normal(sizes_q, dtype=np.float32)
        self.out = np.empty_like(self.q)
        self.run_bytes = shape.block_size * shape.head_dim * self.keys.itemsize
        # Whole blocks are read: the probe reads what attention does for lengths that fill them.
        self.num_bytes = 2 * shape.batch * per_sequence * shape.num_kv_heads * self.run_bytes

    def attend(self, n: int) -> None:
        """Compute what is measured."""
        arrays = (self.q, self.keys, self.values, self.tables[n % 2], self.lengths)
        paged_attention(*arrays, kv_dtype=self.shape.dtype, out=self.out)

    def read_in_order(self, n: int) -> None:
        """Read the same blocks in the same order."""
        block_bytes = self.run_bytes * self.shape.num_kv_heads
        addresses = (self.keys.ctypes.data, self.values.ctypes.data, self.tables[n % 2])
        arguments = (*addresses, block_bytes, self.run_bytes, np.zeros(1, np.int64))
        threads.run(probe.in_order, arguments, threads.get_num_threads())

    def read_in_line(self, n: int) -> None:
        """Read as much of one cache as a call reads, from the start on."""
        cache = (self.keys, self.values)[n % 2]
        arguments = (cache.ctypes.data, self.num_bytes, 16, np.zeros(1, np.int64))
        threads.run(probe.linear, arguments, threads.get_num_threads())


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured of one pool: the median seconds of each call, and what they say.

    Attributes:
        shape: What was computed.
        num_threads: On how many threads.
        num_bytes: Of keys and values that a call reads.
        seconds: Of "attend", "in_order", "linear", and of whatever else was called.
        least_seconds: The least of each: what a busy machine disturbs least.
    """

    shape: Shape
    num_threads: int
    num_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    least_seconds: dict[str, float] = field(default_factory=dict)

    def gb_per_s(self, name: str = "attend") -> float:
        """Gigabytes a second of one of the calls."""
        return self.num_bytes / self.seconds[name] / 1e9

    def fraction_of(self, name: str) -> float:
        """How fast attention reads, as a share of another call."""
        return self.seconds[name] / self.seconds["attend"]

    def least_fraction_of(self, name: str) -> float:
        """The same of the least times."""
        return self.least_seconds[name] / self.least_seconds["attend"]

    @property
    def tail_waste(self) -> float:
        """The share of a sequence's slots that stay empty: half a block on average."""
        return (self.shape.block_size - 1) / 2 / self.shape.context

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {
            "dtype": self.shape.dtype,
            "block_size": self.shape.block_size,
            "batch": self.shape.batch,
            "context": self.shape.context,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "num_threads": self.num_threads,
            "attention_gb_per_s": self.gb_per_s(),
            "in_order_gb_per_s": self.gb_per_s("in_order"),
            "linear_gb_per_s": self.gb_per_s("linear"),
            "fraction_of_in_order": self.fraction_of("in_order"),
            "fraction_of_linear": self.fraction_of("linear"),
            "fraction_of_in_order_least": self.least_fraction_of("in_order"),
            "fraction_of_linear_least": self.least_fraction_of("linear"),
            "tail_waste": self.tail_waste,
            "microseconds": self.seconds["attend"] * 1e6,
            "microseconds_in_order": self.seconds["in_order"] * 1e6,
            "microseconds_least": self.least_seconds["attend"] * 1e6,
            "microseconds_in_order_least": self.least_seconds["in_order"] * 1e6,
            **{
                f"times_{name}": self.fraction_of(name)
                for name in self.seconds
                if name not in {"attend", "in_order", "linear"}
            },
        }


def measure(pool: Pool, rounds: int, others: dict[str, Call] | None = None) -> Reading:
    """Time a pool's calls and others; rounds alternate, and the first is thrown away.

    One thread's time is its processor time, which other processes do not lengthen.
    """
    calls: dict[str, Call] = {
        "linear": pool.read_in_line,
        "in_order": pool.read_in_order,
        "attend": pool.attend,
        **(others or {}),
    }
    num_threads = threads.get_num_threads()
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call(n)
            if n:
                seconds[name].append(clock() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    least = {name: min(found) for name, found in seconds.items()}
    return Reading(pool.shape, num_threads, pool.num_bytes, medians, least)
