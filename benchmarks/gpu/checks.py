"""Every call of kvkernels compared with torch, on the device that it is told.

Knows what is right. Does not know time. On a CPU everything runs but graphs and streams.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.batches import Batch, make_batch, reference

Found = dict[str, Any]
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}
BASE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
DECODE: tuple[list[int], None] = ([1, 17, 130, 2000], None)
MIXED = ([1000, 300, 65], [1, 300, 17])
ATTENTION: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "e4m3": {"cache": "float8_e4m3fn", "options": {"k_scale": 0.5, "v_scale": 0.25}},
    "e4m3 token scales": {"cache": "float8_e4m3fn", "has_token_scales": True},
    "int8": {"cache": "int8", "options": {"k_scale": 0.03, "v_scale": 0.02}},
    "int8 token scales": {"cache": "int8", "has_token_scales": True},
    "head dim 64": {"head_dim": 64},
    "head dim 256": {"head_dim": 256},
    "64 heads": {"heads": 64},
    "multi-head": {"kv_heads": 32},
    "block of 64": {"block_size": 64},
    "block of 24": {"block_size": 24},
    "NHD": {"layout": "NHD"},
    "window": {"options": {"window_left": 100}},
    "softcap": {"options": {"softcap": 20.0}},
    "alibi": {"has_alibi": True},
    "sinks": {"has_sinks": True},
    "all keys": {"options": {"causal": False}},
}
# What compute-sanitizer runs: it is slow, and what it finds does not depend on lengths.
SHORT = ("bfloat16", "int8 token scales", "float32")
SHORT_LENGTHS = ([1, 40], None), ([70, 20], [70, 1])


def run(torch: Any, kvkernels: Any, device: str, *, is_short: bool = False) -> Iterator[Found]:
    """Make the checks one after another; one that raises is a wrong one."""
    lengths = SHORT_LENGTHS if is_short else (DECODE, MIXED)
    checks: list[tuple[str, Callable[[], float]]] = []
    for name in SHORT if is_short else ATTENTION:
        for seq_lens, rows in lengths:
            shape = BASE | ATTENTION[name]
            what = f"{name}, {'decode' if rows is None else 'mixed'}"
            draw = partial(make_batch, torch, device, seq_lens, rows, **shape)
            checks.append((what, partial(_attend, torch, kvkernels, draw, shape["dtype"])))
    others = [write, write_with_scales, copy, swap, merge, exact_workspace]
    if device == "cuda":
        others += [graph] if is_short else [graph, side_stream]
    checks += [
        (other.__name__.replace("_", " "), partial(other, torch, kvkernels, device))
        for other in others
    ]
    for name, check in checks:
        try:
            error = check()
        except Exception as raised:  # noqa: BLE001 -- whatever it is, the other checks go on
            yield {"name": name, "ok": False, "error": f"{type(raised).__name__}: {raised}"[:300]}
        else:
            # A share of what is allowed.
            yield {"name": name, "ok": error < 1, "error": error}


def _attend(torch: Any, kvkernels: Any, draw: Callable[[], Batch], dtype: str) -> float:
    return attention_error(torch, kvkernels, draw(), dtype)


def attention_error(torch: Any, kvkernels: Any, batch: Batch, dtype: str, **extra: Any) -> float:
    """The error of a call's results and LSE beside float64, as a share of what is allowed."""
    q = batch.arguments["q"]
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    kvkernels.paged_attention(
        **batch.arguments, **batch.options, **extra, out=out, lse=lse, return_lse=True
    )
    _, want, want_lse = reference(torch, batch)
    limit = TOLERANCE[dtype]
    return max(
        relative(out, want) / limit, float((lse - want_lse).abs().nan_to_num(1e9).max()) / 3 / limit
    )


def relative(found: Any, want: Any) -> float:
    """The norm of a difference beside that of what is wanted; infinite where something is NaN."""
    error = float((found.double() - want.double()).norm() / want.double().norm())
    return error if error == error else float("inf")  # noqa: PLR0124 -- NaN is not itself


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _pool(torch: Any, device: str, dtype: str, count: int = 2) -> list[Any]:
    kind = getattr(torch, dtype)
    return [torch.randn(6, 3, 16, 64, device=device).to(kind) for _ in range(count)]


def write(torch: Any, kvkernels: Any, device: str) -> float:
    """New tokens, keys rotated, rounded into their slots; all other slots stay."""
    pools = _pool(torch, device, "float32")
    kept = [pool.clone() for pool in pools]
    k, v = torch.randn(2, 4, 3, 64, device=device)
    slots = torch.tensor([70, -1, 3, 95], device=device)
    angles = torch.rand(4, 32, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    kvkernels.write_kv(k, v, *pools, slots, cos=cos, sin=sin)
    first, second = k[..., :32], k[..., 32:]
    c, s = cos[:, None], sin[:, None]
    k = torch.cat([first * c - second * s, second * c + first * s], -1)
    live = slots >= 0
    for old, new in zip(kept, (k, v), strict=True):
        blocks, offsets = slots[live] // 16, slots[live] % 16
        old[blocks, :, offsets] = new[live]
    return max(relative(pool, want) / 1e-6 for pool, want in zip(pools, kept, strict=True))


def write_with_scales(torch: Any, kvkernels: Any, device: str) -> float:
    """New tokens in 8 bits: by one scale to the last bit, and by scales of their own near enough."""
    k, v = torch.randn(2, 2, 3, 64, device=device)
    slots = torch.tensor([70, 3], device=device)
    blocks, offsets = slots // 16, slots % 16
    pools = _pool(torch, device, "float8_e4m3fn")
    kvkernels.write_kv(k, v, *pools, slots, k_scale=0.5, v_scale=0.5)
    for pool, new in zip(pools, (k, v), strict=True):
        bits = (new * 2).to(torch.float8_e4m3fn).view(torch.uint8)
        _require(torch.equal(pool.view(torch.uint8)[blocks, :, offsets], bits), "e4m3 differs")
    pools = [torch.zeros(6, 3, 16, 64, dtype=torch.int8, device=device) for _ in "kv"]
    scales = [torch.full((6, 3, 16), 7.0, device=device) for _ in "kv"]
    kvkernels.write_kv(k, v, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    worst = 0.0
    for pool, scale, new in zip(pools, scales, (k, v), strict=True):
        step = scale[blocks, :, offsets][..., None]
        back = pool[blocks, :, offsets] * step
        worst = max(worst, float(((back - new).abs() / step).max()) / 0.51)
        _require(int((scale != 7).sum()) == 6, "scales beside the new tokens were written")
    return worst


def copy(torch: Any, kvkernels: Any, device: str) -> float:
    """The first tokens of blocks, in all caches."""
    pools = _pool(torch, device, "bfloat16", 4)
    kept = [pool.clone() for pool in pools]
    kvkernels.copy_blocks(pools, [(1, 4, 16), (2, 5, 3)])
    for pool, old in zip(pools, kept, strict=True):
        old[4], old[5, :, :3] = old[1], old[2, :, :3].clone()
        _require(torch.equal(pool, old), "copied blocks differ")
    return 0.0


def swap(torch: Any, kvkernels: Any, device: str) -> float:
    """Blocks to the host's memory, pinned for a GPU, and back to other places."""
    pools = _pool(torch, device, "bfloat16", 4)
    kept = [pool.clone() for pool in pools]
    pin = device == "cuda"
    host = [torch.zeros(3, 3, 16, 64, dtype=torch.bfloat16, pin_memory=pin) for _ in pools]
    kvkernels.swap_blocks(pools, host, [(5, 0, 16), (2, 1, 16)])
    kvkernels.swap_blocks(host, pools, [(0, 3, 16), (1, 4, 7)])
    for pool, old in zip(pools, kept, strict=True):
        old[3], old[4, :, :7] = old[5].clone(), old[2, :, :7].clone()
        _require(torch.equal(pool, old), "swapped blocks differ")
    return 0.0


def merge(torch: Any, kvkernels: Any, device: str) -> float:
    """Results over disjoint keys, one of them without any, and sinks."""
    outs = torch.randn(3, 5, 4, 72, device=device)
    lses = torch.randn(3, 5, 4, device=device) * 5
    lses[1, 2] = -torch.inf
    sinks = torch.randn(4, device=device)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    kvkernels.merge_states(list(outs), list(lses), sinks=sinks, out=out, lse=lse)
    total = lses.double().logsumexp(0)
    below = torch.logaddexp(total, sinks.double())
    want = ((lses.double() - below).exp()[..., None] * outs.double()).sum(0)
    return max(relative(out, want) / 2e-6, float((lse - total).abs().max()) / 1e-5)


def exact_workspace(torch: Any, kvkernels: Any, device: str) -> float:
    """A call in a workspace of just the bytes that `workspace_size` tells, and no byte beyond."""
    batch = make_batch(torch, device, [300, 65], [30, 17], **BASE)
    size = kvkernels.workspace_size(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        max_num_rows=47,
        max_seq_len=304,
        q_dtype="bfloat16",
        device=device,
    )
    memory = torch.full((size + 64,), 255, dtype=torch.uint8, device=device)
    error = attention_error(torch, kvkernels, batch, "bfloat16", workspace=memory[:size])
    _require(bool((memory[size:] == 255).all()), "the workspace was written past its end")
    return error


def graph(torch: Any, kvkernels: Any, device: str) -> float:
    """A call captured in a graph and replayed for other lengths has the bits of a call."""
    batch = make_batch(torch, device, [900, 100], None, **BASE)
    workspace = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    out = torch.empty_like(batch.arguments["q"])
    extra = {"workspace": workspace, "deterministic": True, "out": out}
    kvkernels.paged_attention(**batch.arguments, **extra)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kvkernels.paged_attention(**batch.arguments, **extra)
    for lengths in ([900, 100], [1, 64], [512, 3]):
        batch.arguments["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        workspace.fill_(255)
        captured.replay()
        want = kvkernels.paged_attention(**batch.arguments, deterministic=True)
        _require(torch.equal(out, want), f"a replay for the lengths {lengths} differs")
    return 0.0


def side_stream(torch: Any, kvkernels: Any, device: str) -> float:
    """Calls on a stream that lags behind keep what they allocate from the current stream."""
    batch = make_batch(torch, device, [900, 100, 2000], None, **BASE)
    want = kvkernels.paged_attention(**batch.arguments, deterministic=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # noqa: SLF001 -- torch's own tests wait so
    found = [
        kvkernels.paged_attention(**batch.arguments, deterministic=True, stream=side)
        for _ in range(3)
    ]
    # Whatever was freed too early is taken and overwritten here.
    scribbled = [torch.full((1 << 22,), 255, dtype=torch.uint8, device=device) for _ in range(40)]
    torch.cuda.synchronize()
    del scribbled
    _require(all(torch.equal(one, want) for one in found), "a result on a side stream differs")
    return 0.0
