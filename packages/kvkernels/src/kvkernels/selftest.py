"""Every supported feature, computed on this machine and compared with float64.

It knows features and how they are checked, and not how the answer is shown. Checks are small: they are
about this machine's processor, compiler and libraries, and not in the place of the package's tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkernels.arrays import Array
from kvkernels.attention import cascade_attention, paged_attention
from kvkernels.cache import copy_blocks, gather_kv, swap_blocks, write_kv
from kvkernels.dtypes import BY_NAME, CACHE_DTYPES, LARGEST, QUERY_DTYPES, from_float32, to_float32
from kvkernels.plans import AttentionPlan
from kvkernels.reference import paged_attention_reference
from kvkernels.states import merge_states

# Of the norm of a row's difference from float64, relative to its norm; by the dtype of q.
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}
LENGTHS = (1, 40, 0, 17, 130)
ROWS = (1, 7, 1, 17, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A feature that was checked: the worst error of its checks, and what it may be."""

    feature: str
    num_checks: int
    error: float
    tolerance: float

    @property
    def is_good(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature, and its checks: each yields an error. A tolerance of 0 asks for equal bits."""

    name: str
    tolerance: float
    checks: Callable[[np.random.Generator], Iterator[float]]

    def run(self, seed: int) -> Outcome:
        """Run all checks."""
        errors = list(self.checks(np.random.default_rng(seed)))
        # Not max(): a NaN must stay.
        return Outcome(self.name, len(errors), float(np.max(errors)), self.tolerance)


def make_batch(
    rng: np.random.Generator,
    kv_dtype: str = "float32",
    q_dtype: str = "float32",
    *,
    lengths: tuple[int, ...] = LENGTHS,
    rows: tuple[int, ...] | None = ROWS,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    layout: str = "HND",
) -> dict[str, Any]:
    """Make the arguments of one call; where the cache's dtype has a NaN, unowned slots hold it."""
    dtype = BY_NAME[kv_dtype]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = rng.permutation(num_blocks).astype(np.int32)
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    owned = np.zeros((num_blocks, block_size), bool)
    for s, length in enumerate(lengths):
        start = sum(counts[:s])
        table[s, : counts[s]] = order[start : start + counts[s]]
        positions = np.arange(length)
        owned[table[s, positions // block_size], positions % block_size] = True
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    scale = 1 / 32 if kv_dtype in LARGEST else 1.0
    unowned = ~owned[:, None, :, None] & np.ones(shape, bool)
    caches = []
    for _ in "kv":
        floats = rng.standard_normal(shape, dtype=np.float32)
        floats[unowned] = 0.0 if kv_dtype == "int8" else np.nan
        caches.append(from_float32(floats / np.float32(scale), dtype))
    if layout == "NHD":
        caches = [c.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for c in caches]
    elif layout == "x-packed":
        x = 16 // caches[0].itemsize
        packed = caches[0].reshape(num_blocks, num_kv_heads, block_size, -1, x)
        caches[0] = packed.transpose(0, 1, 3, 2, 4).copy()
    num_rows = len(lengths) if rows is None else sum(rows)
    q = rng.standard_normal((num_rows, num_kv_heads * group, head_dim), dtype=np.float32)
    batch = {
        "q": from_float32(q, BY_NAME[q_dtype]),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": table,
        "seq_lens": np.array(lengths, np.int32),
        "k_scale": scale,
        "v_scale": scale,
        "kv_dtype": kv_dtype,
    }
    if rows is not None:
        batch["cu_seqlens_q"] = np.cumsum([0, *rows], dtype=np.int32)
    return batch


def error_of(batch: dict[str, Any], q_dtype: str = "float32", **options: Any) -> float:
    """Attend, and return the worst row's error relative to float64 on the dequantised cache."""
    out, lse = paged_attention(**batch | options, return_lse=True)
    options.pop("num_splits", None)
    expected, expected_lse = paged_attention_reference(**batch | options)
    has_keys = np.isfinite(expected_lse)
    if (np.isfinite(lse) != has_keys).any() or to_float32(out, BY_NAME[q_dtype])[~has_keys].any():
        return np.inf
    lse_error = np.abs(lse[has_keys] - expected_lse[has_keys]).max(initial=0) / 10
    found = to_float32(out, BY_NAME[q_dtype])
    return float(max(_relative(found[has_keys], expected[has_keys]), lse_error))


def _relative(found: Array, expected: Array) -> float:
    norms = np.maximum(np.linalg.norm(expected, axis=-1), 0.05)
    return float((np.linalg.norm(found - expected, axis=-1) / norms).max(initial=0))


def bits_differ(one: Array, other: Array) -> float:
    """Return 0 for equal bits, else 1."""
    return float(one.tobytes() != other.tobytes())


def _of_cache(kv_dtype: str) -> Callable[[np.random.Generator], Iterator[float]]:
    def checks(rng: np.random.Generator) -> Iterator[float]:
        for rows in (None, ROWS):
            for head_dim, block_size in ((64, 16), (128, 16), (40, 5)):
                yield error_of(
                    make_batch(rng, kv_dtype, rows=rows, head_dim=head_dim, block_size=block_size)
                )

    return checks


def _of_queries(q_dtype: str) -> Callable[[np.random.Generator], Iterator[float]]:
    def checks(rng: np.random.Generator) -> Iterator[float]:
        for cache in CACHE_DTYPES:
            yield error_of(make_batch(rng, cache.name, q_dtype), q_dtype)

    return checks


def _layouts(rng: np.random.Generator) -> Iterator[float]:
    for layout in ("HND", "NHD", "x-packed"):
        for dtype in ("float32", "bfloat16", "int8"):
            yield error_of(make_batch(rng, dtype, layout=layout))


def _groups(rng: np.random.Generator) -> Iterator[float]:
    for group in (1, 2, 3, 4, 5, 7, 8, 16, 32, 71):
        yield error_of(make_batch(rng, group=group, num_kv_heads=1))


def _head_dims(rng: np.random.Generator) -> Iterator[float]:
    for head_dim in (8, 16, 33, 80, 96, 128, 256):
        yield error_of(make_batch(rng, head_dim=head_dim))


def _block_sizes(rng: np.random.Generator) -> Iterator[float]:
    for size in (1, 5, 8, 16, 24, 32, 128):
        edges = (1, max(1, size - 1), size, size + 1, 3 * size + 1)
        yield error_of(make_batch(rng, block_size=size, lengths=edges, rows=None))


def _options(**options: Any) -> Callable[[np.random.Generator], Iterator[float]]:
    def checks(rng: np.random.Generator) -> Iterator[float]:
        for rows in (None, ROWS):
            yield error_of(make_batch(rng, rows=rows, group=3), **options)

    return checks


def _token_scales(rng: np.random.Generator) -> Iterator[float]:
    for dtype in ("int8", "float8_e4m3"):
        batch = make_batch(rng, dtype)
        for name in ("k_scale", "v_scale"):
            scales = rng.uniform(0.01, 0.05, batch["k_cache"].shape[:3])
            batch[name] = scales.astype(np.float32)
        yield error_of(batch)


def _long(rng: np.random.Generator) -> Iterator[float]:
    batch = make_batch(rng, lengths=(2500, 1100), rows=(3, 1))
    for num_splits in (0, 1, 3, 8):
        yield error_of(batch, num_splits=num_splits)


def _invariance(rng: np.random.Generator) -> Iterator[float]:
    batch = make_batch(rng)
    out = paged_attention(**batch)
    offsets = batch["cu_seqlens_q"]
    for s in range(len(LENGTHS)):
        alone = batch | {
            "q": batch["q"][offsets[s] : offsets[s + 1]],
            "block_table": batch["block_table"][s : s + 1],
            "seq_lens": batch["seq_lens"][s : s + 1],
            "cu_seqlens_q": np.array([0, offsets[s + 1] - offsets[s]], np.int32),
        }
        yield bits_differ(paged_attention(**alone), out[offsets[s] : offsets[s + 1]])


def _writes(rng: np.random.Generator) -> Iterator[float]:
    k, v = rng.standard_normal((2, 9, 2, 16), dtype=np.float32)
    angles = rng.uniform(0, 6, (9, 8)).astype(np.float32)
    turned = (k[..., :8] + 1j * k[..., 8:]) * np.exp(1j * angles.astype(np.float64))[:, None]
    slots = np.array([9, -1, 30, 0, 1, 2, 3, 12, 11])
    table, lengths = np.arange(4, dtype=np.int32)[None], np.array([32], np.int32)
    for dtype in CACHE_DTYPES:
        keys, values = np.zeros((2, 4, 2, 8, 16), dtype.bits)
        scale = 1 / 32 if dtype.name in LARGEST else 1.0
        options: dict[str, Any] = {"k_scale": scale, "v_scale": scale, "kv_dtype": dtype.name}
        rotation: dict[str, Any] = {"cos": np.cos(angles), "sin": np.sin(angles)}
        write_kv(k, v, keys, values, slots, **options, **rotation)
        found = gather_kv(keys, values, table, lengths, **options)
        rows = [to_float32(x, dtype) if x.dtype == dtype.bits else x for x in found]
        written = slots >= 0
        for row, expected in zip(
            rows, (np.concatenate([turned.real, turned.imag], -1), v), strict=True
        ):
            step = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}.get(dtype.name, 7e-2)
            worst = np.abs(row[slots[written]] - expected[written]).max()
            yield float(worst / step / np.abs(expected).max())


def _moves(rng: np.random.Generator) -> Iterator[float]:
    pool = rng.standard_normal((6, 2, 4, 8), dtype=np.float32)
    expected, host = pool.copy(), np.zeros((2, 2, 4, 8), np.float32)
    expected[5, :, :3] = pool[1, :, :3]
    copy_blocks([pool], [(1, 5, 3)])
    yield bits_differ(pool, expected)
    swap_blocks([pool], [host], [(5, 0, 4)])
    yield bits_differ(host[0], pool[5])


def _merges(rng: np.random.Generator) -> Iterator[float]:
    batch = make_batch(rng, lengths=(96, 96), rows=None)
    whole, _ = paged_attention_reference(**batch)
    parts = []
    for start, end in ((0, 1), (1, 4), (4, 6)):
        part = batch | {
            "block_table": np.ascontiguousarray(batch["block_table"][:, start:end]),
            "seq_lens": np.full(2, 16 * (end - start), np.int32),
        }
        parts.append(paged_attention(**part, return_lse=True))
    out, _ = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    yield _relative(out, whole)


def _shared(rng: np.random.Generator) -> Iterator[float]:
    batch = make_batch(rng, lengths=(1100, 1060), rows=(3, 20))
    batch["block_table"][1, :64] = batch["block_table"][0, :64]
    expected = paged_attention(**batch)
    yield bits_differ(cascade_attention(**batch, num_shared_tokens=1024), expected)
    num_blocks, num_kv_heads, block_size, head_dim = batch["k_cache"].shape
    plan = AttentionPlan(
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_rows=23,
        max_seq_len=1100,
    )
    plan.update(batch["block_table"], batch["seq_lens"], batch["cu_seqlens_q"])
    yield bits_differ(plan.attend(batch["q"], batch["k_cache"], batch["v_cache"]), expected)


def features() -> list[Feature]:
    """Return all that is checked, in the order in which it is shown."""
    exact, heads = TOLERANCES["float32"], np.array([0.1, -2, 0, 1.5, 3, -1], np.float32)
    slopes = np.abs(heads) / 4
    everything = {"softcap": 1.5, "alibi_slopes": slopes, "sinks": heads, "window_left": 20}
    return [
        *(Feature(f"cache {d.name}", exact, _of_cache(d.name)) for d in CACHE_DTYPES),
        *(
            Feature(f"queries {d.name}, every cache", TOLERANCES[d.name], _of_queries(d.name))
            for d in QUERY_DTYPES
        ),
        Feature("layouts HND, NHD, x-packed", exact, _layouts),
        Feature("1 to 71 heads of a group", exact, _groups),
        Feature("head dims 8 to 256", exact, _head_dims),
        Feature("block sizes 1 to 128, their edges", exact, _block_sizes),
        Feature("no causality", exact, _options(causal=False)),
        Feature("window", exact, _options(window_left=9)),
        Feature("soft-capping", exact, _options(softcap=1.5)),
        Feature("ALiBi", exact, _options(alibi_slopes=slopes)),
        Feature("sinks", exact, _options(sinks=heads)),
        Feature("all of these at once", exact, _options(**everything)),
        Feature("scales of tokens and heads", exact, _token_scales),
        Feature("long contexts, 1 to 8 splits", exact, _long),
        Feature("same bits alone and in a batch", 0, _invariance),
        Feature("same bits by cascade and by plan", 0, _shared),
        Feature("merge_states", exact, _merges),
        Feature("write_kv with rotation, gather_kv", 1, _writes),
        Feature("copy_blocks, swap_blocks", 0, _moves),
    ]
