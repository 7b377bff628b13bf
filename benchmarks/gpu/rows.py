"""The rows of the table: decode beside a read, a copy, SDPA and the peers, and prefill beside SDPA.

Knows what is compared with what. Does not know how time is measured. A peer that raises, or whose result
is another, is named in its row's `missing` and ends nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.gpu.batches import Batch, gathered, make_batch, reference
from benchmarks.gpu.checks import TOLERANCE, relative
from benchmarks.gpu.peers import peers
from benchmarks.gpu.timing import Call, Clock, measure, why

Row = dict[str, Any]
IsOver = Callable[[], bool]
WORKSPACE_BYTES = 1 << 27
# Of two results of 16 bits that were computed in another order.
MOST_DIFFERENCE = 2e-2
SHAPES = (
    (32, 16, "bfloat16", "bfloat16"),
    (32, 64, "bfloat16", "bfloat16"),
    (64, 16, "bfloat16", "bfloat16"),
    (32, 16, "bfloat16", "float8_e4m3fn"),
)
SIZES = ((1, 512), (1, 4096), (8, 4096), (32, 4096), (128, 4096), (8, 65536))
PREFILLS = ((1, 4096), (4, 4096), (1, 16384))
# Peers compile for each shape, which takes longer than all that is timed.
SEQUENCES_WITH_PEERS = {8, 32}
CHECKED_ROWS = 64


class CanRead(Protocol):
    """What reads memory and does nothing with it."""

    def read(self, words: Any) -> None:
        """Read a tensor of int32."""


@dataclass(frozen=True)
class Bench:
    """Makes rows on a device, with a clock and a read probe, until time is over."""

    torch: Any
    kvkernels: Any
    device: str
    clock: Clock
    reader: CanRead
    is_over: IsOver

    def rows(
        self, shapes: Any = SHAPES, sizes: Any = SIZES, prefills: Any = PREFILLS
    ) -> Iterator[Row]:
        """Make one row after another until time is over; one that raises says so."""
        jobs: list[tuple[Row, Callable[[Row], Row]]] = []
        for heads, size, dtype, cache in shapes:
            shape = {"heads": heads, "kv_heads": 8, "dtype": dtype, "cache": cache}
            for sequences, length in sizes:
                batch = {"block_size": size, "sequences": sequences, "length": length}
                jobs.append((shape | batch, self.decode))
        for sequences, length in prefills:
            shape = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16", "cache": "bfloat16"}
            batch = {"block_size": 16, "sequences": sequences, "length": length}
            jobs.append((shape | batch | {"prefill": True}, self.prefill))
        for named, make in jobs:
            if self.is_over():
                return
            try:
                self.torch.cuda.empty_cache()
                row = make(named)
                # Ours may be right and yet not be one that a graph takes.
                yield named | row | {"ok": row["ok"] and "kvkernels" in row["microseconds"]}
            except Exception as error:  # noqa: BLE001 -- the rows before it are worth keeping
                yield named | {"ok": False, "raised": why(error)}

    def decode(self, named: Row) -> Row:
        """Time one batch of decode; SDPA and the peers are timed where keys have 16 bits."""
        torch, count = self.torch, named["sequences"]
        batch = make_batch(torch, self.device, [named["length"]] * count, None, **_shape(named))
        given = batch.arguments
        ours, out = self._ours(batch)
        words = torch.zeros(batch.kv_bytes // 4, dtype=torch.int32, device=self.device)
        half = words.shape[0] // 2
        calls: dict[str, Call] = {
            "kvkernels": ours,
            "read": lambda: self.reader.read(words),
            # Half of the bytes are read and half written.
            "copy": lambda: words[:half].copy_(words[half : 2 * half]),
        }
        verdict = self._judge(batch, ours, out, sorted({0, count - 1}), tail=None)
        if given["k_cache"].element_size() == 2:
            theirs, missing, backend = self._sdpa_decode(batch)
            if count in SEQUENCES_WITH_PEERS:
                found, others = peers(torch, given, self.is_over)
                theirs, missing = theirs | found, missing | others
            calls |= agreeing(theirs, out, missing)
        else:
            missing, backend = {}, None
        times = measure(self.clock, calls, missing)
        return verdict | {
            "kv_bytes": batch.kv_bytes,
            "sdpa": backend,
            "microseconds": times["median"],
            "least_microseconds": times["least"],
            "missing": missing,
        }

    def prefill(self, named: Row) -> Row:
        """Time whole prompts beside SDPA on contiguous keys."""
        torch, (count, length) = self.torch, (named["sequences"], named["length"])
        lengths = [length] * count
        batch = make_batch(torch, self.device, lengths, lengths, **_shape(named))
        ours, out = self._ours(batch)
        keys, values = _stacked(torch, batch)
        q = batch.arguments["q"].unflatten(0, (count, length)).transpose(1, 2).contiguous()

        def sdpa() -> Any:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)

        verdict = self._judge(batch, ours, out, [count - 1], tail=CHECKED_ROWS)
        missing: dict[str, str] = {}
        pinned, backend = by_flash(sdpa)
        calls = {"kvkernels": ours} | agreeing({"sdpa": pinned}, out, missing)
        times = measure(self.clock, calls, missing)
        return verdict | {
            "sdpa": backend,
            "microseconds": times["median"],
            "least_microseconds": times["least"],
            "missing": missing,
        }

    def _ours(self, batch: Batch) -> tuple[Call, Any]:
        torch, given = self.torch, batch.arguments
        out = torch.empty_like(given["q"])
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        extra = batch.options | {"out": out, "workspace": workspace}
        return lambda: self.kvkernels.paged_attention(**given, **extra), out

    def _judge(
        self, batch: Batch, ours: Call, out: Any, sequences: list[int], tail: int | None
    ) -> Row:
        """Whether our results are those of float64, for some of the sequences."""
        ours()
        rows, want, _ = reference(self.torch, batch, sequences=sequences, tail=tail)
        error = relative(out[rows], want)
        return {"error": error, "ok": error < TOLERANCE[str(out.dtype).rpartition(".")[2]]}

    def _sdpa_decode(self, batch: Batch) -> tuple[dict[str, Call], dict[str, str], str]:
        torch, given = self.torch, batch.arguments
        attention = torch.nn.functional.scaled_dot_product_attention
        keys, values = _stacked(torch, batch)
        rows, blocks = given["q"].unsqueeze(2), given["block_table"].long()

        def gather_first() -> Any:
            parts = [
                given[name][blocks].transpose(1, 2).flatten(2, 3)[:, :, : keys.shape[2]]
                for name in ("k_cache", "v_cache")
            ]
            return attention(rows, *parts, enable_gqa=True)

        sdpa, backend = by_flash(lambda: attention(rows, keys, values, enable_gqa=True))
        after, _ = by_flash(gather_first)
        return {"sdpa": sdpa, "gather + sdpa": after}, {}, backend


def _shape(named: Row) -> dict[str, Any]:
    return {key: named[key] for key in ("heads", "kv_heads", "dtype", "cache", "block_size")}


def _stacked(torch: Any, batch: Batch) -> tuple[Any, Any]:
    """The keys and values of sequences of one length [sequences, Hkv, tokens, D]."""
    dtype = batch.arguments["q"].dtype
    pairs = [gathered(batch, s, dtype) for s in range(len(batch.arguments["seq_lens"]))]
    return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])


def by_flash(attend: Call) -> tuple[Call, str]:
    """SDPA by its flash kernel and "flash", or where that refuses by whichever torch picks and why."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 -- needs torch

    def pinned() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    try:
        pinned()
    except RuntimeError as error:
        return attend, f"torch's choice, as flash refused: {why(error)}"
    return pinned, "flash"


def agreeing(calls: dict[str, Call], out: Any, missing: dict[str, str]) -> dict[str, Call]:
    """The calls whose results are ours; the others go to `missing` with what they did instead."""
    found = {}
    for name, call in calls.items():
        try:
            error = relative(call().reshape(out.shape), out)
        except Exception as raised:  # noqa: BLE001 -- whatever it is, the others go on without it
            missing[name] = why(raised)
            continue
        if error < MOST_DIFFERENCE:
            found[name] = call
        else:
            missing[name] = f"its result differs from ours by {error:.1e}"
    return found
