"""Batches drawn at random, and what their attention is by torch in float64.

Knows blocks and tables. Does not know the kernels, nor what is timed. Everything runs on a CPU too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

INT8_SPREAD = 40.0


@dataclass
class Batch:
    """The arguments of one attention call, its options, and the bytes of its keys and values."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    kv_bytes: int

    @property
    def offsets(self) -> list[int]:
        """Where the rows of each sequence begin, and where the last ones end."""
        given = self.arguments
        found = given.get("cu_seqlens_q")
        return list(range(len(given["seq_lens"]) + 1)) if found is None else found.tolist()


def make_batch(
    torch: Any, device: str, lengths: Sequence[int], rows: Sequence[int] | None, **shape: Any
) -> Batch:
    """Draw a batch with blocks in random order; slots that no token owns hold NaN, -128 in int8.

    `shape` holds heads, kv_heads and dtype, and may hold head_dim, block_size, cache (a dtype), layout,
    has_alibi, has_sinks, has_token_scales and options, which go to the call as they are.
    """
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape.get("head_dim", 128)
    size, kind = shape.get("block_size", 16), getattr(torch, shape["dtype"])
    cache = getattr(torch, shape.get("cache", shape["dtype"]))
    counts = [-(-n // size) for n in lengths]
    blocks = sum(counts) + 1
    order = torch.randperm(blocks, device=device).to(torch.int32)
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32, device=device)
    for s, count in enumerate(counts):
        table[s, :count] = order[sum(counts[:s]) :][:count]
    caches = []
    for _ in "kv":
        pool = torch.empty(blocks, kv_heads, size, dim, dtype=torch.float16, device=device)
        hole = torch.nan
        pool.normal_()
        if cache == torch.int8:
            pool, hole = (pool * INT8_SPREAD).round().clamp(-127, 127), -128.0
        for s, n in enumerate(lengths):
            pool[table[s, counts[s] - 1], :, (n - 1) % size + 1 :] = hole
        pool = pool.to(cache)
        is_nhd = shape.get("layout") == "NHD"
        caches.append(pool.transpose(1, 2).contiguous().transpose(1, 2) if is_nhd else pool)
    arguments = {
        "q": torch.randn(sum(rows or [1] * len(lengths)), heads, dim, device=device).to(kind),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    if rows is not None:
        offsets = torch.tensor([0, *rows]).cumsum(0)
        arguments["cu_seqlens_q"] = offsets.to(torch.int32).to(device)
    options = dict(shape.get("options", {})) | _drawn_options(torch, caches[0], heads, shape)
    kv_bytes = 2 * sum(lengths) * kv_heads * dim * caches[0].element_size()
    return Batch(arguments, options, kv_bytes)


def _drawn_options(torch: Any, cache: Any, heads: int, shape: dict[str, Any]) -> dict[str, Any]:
    options, device = {}, cache.device
    if shape.get("has_alibi"):
        steps = torch.arange(1, heads + 1, dtype=torch.float32, device=device)
        options["alibi_slopes"] = 2.0 ** (-8 * steps / heads)
    if shape.get("has_sinks"):
        options["sinks"] = torch.randn(heads, device=device)
    if shape.get("has_token_scales"):
        for name in ("k_scale", "v_scale"):
            options[name] = torch.rand(cache.shape[:3], device=device) * 0.02 + 0.01
    return options


def gathered(batch: Batch, s: int, dtype: Any) -> tuple[Any, Any]:
    """The keys and values of a sequence [Hkv, tokens, D], taken out of their blocks and scaled."""
    given = batch.arguments
    size = given["k_cache"].shape[2]
    length = int(given["seq_lens"][s])
    blocks = given["block_table"][s, : -(-length // size)].long()
    parts = []
    for name, by in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        # Indexing is done on bytes, which every dtype has.
        cache = given[name]
        bits = cache.view(_bits_of(cache))[blocks].view(cache.dtype).to(dtype)
        scale = batch.options.get(by, 1.0)
        scale = scale if isinstance(scale, float) else scale[blocks][..., None].to(dtype)
        parts.append((bits * scale).transpose(0, 1).flatten(1, 2)[:, :length])
    return parts[0], parts[1]


def _bits_of(tensor: Any) -> Any:
    import torch  # noqa: PLC0415 -- whoever made a tensor has it

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]


def reference(
    torch: Any,
    batch: Batch,
    *,
    sequences: Iterable[int] | None = None,
    tail: int | None = None,
) -> tuple[Any, Any, Any]:
    """Compute the attention in float64, a sequence at a time: (indices of rows, out, lse).

    `sequences` picks some, and `tail` the last rows of each.
    """
    given, options = batch.arguments, batch.options
    q, offsets, found = given["q"], batch.offsets, []
    chosen = range(len(given["seq_lens"])) if sequences is None else sequences
    for s in chosen:
        begin, end = offsets[s], offsets[s + 1]
        begin = begin if tail is None else max(begin, end - tail)
        length = int(given["seq_lens"][s])
        keys, values = gathered(batch, s, torch.float64)
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = q[begin:end].double().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        position = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        distance = torch.arange(length, device=q.device)[None] - position
        if "alibi_slopes" in options:
            scores = scores + options["alibi_slopes"].double()[:, None, None] * distance
        hidden = distance > 0 if options.get("causal", True) else torch.zeros_like(distance).bool()
        if options.get("window_left", -1) >= 0:
            hidden = hidden | (distance < -options["window_left"])
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        below = lse
        if "sinks" in options:
            below = torch.logaddexp(lse, options["sinks"].double()[:, None])
        out = (scores - below[..., None]).exp() @ values
        found.append((torch.arange(begin, end, device=q.device), out.transpose(0, 1), lse.T))
    rows, outs, lses = (torch.cat(parts) for parts in zip(*found, strict=True))
    return rows, outs, lses
