"""How long a call takes on a GPU: graphs, events, a cold cache, and a probe that does nothing but read.

Knows time. Does not know what is timed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Call = Callable[[], Any]
ROUNDS = 11
# Half a millisecond at 2 GHz, in which the host queues a flush, two events and a replay.
SLEEP_CYCLES = 1_000_000
MIN_FLUSH_BYTES = 256 << 20
READ_THREADS, READ_BLOCKS = 256, 8

# Every thread loads four pieces of 16 bytes at a time, past the first-level cache. The sum is stored only
# if it is a number that the caller names, so that the loads are neither left out nor followed by stores.
READ_SOURCE = r"""
extern "C" __global__ void read_words(const uint4 *words, unsigned long long count, unsigned magic,
                                      unsigned *found) {
  unsigned sum = 0;
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < count; i += 4 * step) {
    uint4 part[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      part[n] = make_uint4(0, 0, 0, 0);
      if (i + n * step < count)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(part[n].x), "=r"(part[n].y), "=r"(part[n].z), "=r"(part[n].w)
                     : "l"(words + i + n * step));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) sum += part[n].x + part[n].y + part[n].z + part[n].w;
  }
  if (sum == magic) *found = sum;
}
"""


class Clock(Protocol):
    """What times calls: a GPU, and what tests put in its place."""

    def capture(self, call: Call) -> Any:
        """Make what can be replayed without the host's time in it."""

    def microseconds(self, captured: Any) -> float:
        """Replay once, with nothing of its data in the cache."""


@dataclass(frozen=True)
class _Handle:
    """A stream's handle, with the protocol by which CuPy takes other libraries' streams."""

    value: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


class Reader:
    """Reads memory as fast as the GPU does, and does nothing with it."""

    def __init__(self, torch: Any) -> None:
        import cupy  # noqa: PLC0415 -- only a GPU has a use for it

        self._torch, self._cupy = torch, cupy
        self._kernel = cupy.RawKernel(READ_SOURCE, "read_words")
        self._found = torch.zeros(1, dtype=torch.int32, device="cuda")
        properties = torch.cuda.get_device_properties(0)
        self._blocks = READ_BLOCKS * properties.multi_processor_count
        self._check()

    def read(self, words: Any, magic: int = 0x9E3779B9) -> None:
        """Read a tensor of int32, of whole 16-byte pieces, on torch's current stream."""
        stream = self._cupy.cuda.Stream.from_external(
            _Handle(self._torch.cuda.current_stream().cuda_stream)
        )
        arguments = (
            *(np.uint64(words.data_ptr()), np.uint64(words.numel() // 4)),
            *(np.uint32(magic), np.uint64(self._found.data_ptr())),
        )
        with stream:
            self._kernel((self._blocks,), (READ_THREADS,), arguments)

    def _check(self) -> None:
        """See that the first and the last word are read."""
        for place in (0, -1):
            words = self._torch.zeros(4 * 1_000_003, dtype=self._torch.int32, device="cuda")
            words[place] = 7
            self._found.zero_()
            self.read(words, magic=7)
            if int(self._found) != 7:
                raise RuntimeError("the read probe does not read all of its words")


class GraphClock:
    """Times single replays by events, after a flush and while the GPU still sleeps."""

    def __init__(self, torch: Any, reader: Reader) -> None:
        self._torch, self._reader = torch, reader
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
        num_bytes = max(MIN_FLUSH_BYTES, 4 * cache)
        self._other = torch.zeros(num_bytes // 4, dtype=torch.int32, device="cuda")

    def capture(self, call: Call) -> Any:
        """Capture one call in a graph, after one outside it."""
        call()
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            call()
        return graph

    def microseconds(self, captured: Any) -> float:
        """Replay once: other memory is read first, which leaves clean lines in the cache."""
        cuda = self._torch.cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        # While the GPU sleeps everything is queued, so that no gap of the host's is timed.
        cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 -- torch's own benchmarks wait so
        self._reader.read(self._other)
        begin.record()
        captured.replay()
        end.record()
        cuda.synchronize()
        return float(begin.elapsed_time(end) * 1000)


def measure(
    clock: Clock, calls: Mapping[str, Call], missing: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Median and least time of each call over rounds that alternate them; who raises is missing."""
    captured: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            captured[name] = clock.capture(call)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others go on without it
            missing[name] = why(error)
    times: dict[str, list[float]] = {name: [] for name in captured}
    for n in range(ROUNDS):
        for name in captured if n % 2 else reversed(captured):
            times[name].append(clock.microseconds(captured[name]))
    return {
        "median": {name: sorted(each)[ROUNDS // 2] for name, each in times.items()},
        "least": {name: min(each) for name, each in times.items()},
    }


def why(error: BaseException) -> str:
    """Say in one line what was raised."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
