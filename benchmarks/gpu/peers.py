"""Other implementations of paged decode on a GPU, beside ours in one table.

Each takes the same queries, blocks and lengths; layouts of its own are made beforehand. None is ours to
tune: FlexAttention and FlashInfer are called as their documentation says, and the kernel in Triton is
the plain one, split over the context, that a careful user would write.

Knows their interfaces. Does not know time, nor what is compared with what.
"""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.timing import Call, why

NUM_SPLITS = 16


def peers(
    torch: Any, given: Mapping[str, Any], is_over: Callable[[], bool]
) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers that can run this batch here before time is over, and why the others cannot.

    Each returns [sequences, heads, head_dim], or the same with ones between.
    """
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, make in (
        ("flex attention", flex_attention),
        ("triton", triton_decode),
        ("flashinfer", flashinfer_decode),
    ):
        if is_over():
            missing[name] = "no time was left"
            continue
        try:
            call = make(torch, given)
            call()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others go on without it
            missing[name] = why(error)
        else:
            calls[name] = call
    return calls, missing


def compiled(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for these shapes alone, as if nothing had been compiled before.

    Else the second shape would be compiled for shapes of every size, and after some not at all.
    """
    torch._dynamo.reset()  # noqa: SLF001 -- as torch's documentation says
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def flex_attention(torch: Any, given: Mapping[str, Any]) -> Call:
    """torch's FlexAttention on a pool of blocks, compiled; its pool is [1, heads, slots, head_dim]."""
    from torch.nn.attention import flex_attention as flex  # noqa: PLC0415 -- needs torch

    table, lengths = given["block_table"], given["seq_lens"]
    num_blocks, kv_heads, size, head_dim = given["k_cache"].shape
    keys, values = (
        given[name].transpose(0, 1).reshape(1, kv_heads, num_blocks * size, head_dim).contiguous()
        for name in ("k_cache", "v_cache")
    )
    sequences = len(lengths)
    counts = (lengths + size - 1) // size
    places = torch.arange(table.shape[1], device=table.device).expand_as(table)
    is_owned = places < counts[:, None]
    logical = torch.full((sequences, num_blocks), -1, dtype=torch.int32, device=table.device)
    rows = torch.arange(sequences, device=table.device)[:, None].expand_as(table)
    logical[rows[is_owned], table[is_owned].long()] = places[is_owned].to(torch.int32)

    def is_visible(b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001 -- torch's signature
        place = logical[b, kv // size]
        return (place >= 0) & (place * size + kv % size < lengths[b])

    indices = torch.zeros(sequences, 1, 1, num_blocks, dtype=torch.int32, device=table.device)
    indices[:, 0, 0, : table.shape[1]] = table.clamp(min=0)
    mask = flex.BlockMask.from_kv_blocks(
        counts.to(torch.int32)[:, None, None],
        indices,
        BLOCK_SIZE=(128, size),
        mask_mod=is_visible,
        seq_lengths=(1, num_blocks * size),
    )
    q = given["q"].unsqueeze(2)
    attend: Callable[..., Any] = flex.flex_attention
    attend = compiled(torch, attend) if q.is_cuda else attend
    # A pool that all sequences share is one batch entry, which torch repeats without a copy.
    keys, values = (part.expand(sequences, -1, -1, -1) for part in (keys, values))
    return lambda: attend(q, keys, values, block_mask=mask, enable_gqa=True).squeeze(2)


def triton_decode(torch: Any, given: Mapping[str, Any]) -> Call:
    """A kernel in Triton: a program a sequence, KV head and split, and torch for the merge."""
    import triton  # noqa: PLC0415 -- comes with torch for CUDA

    from benchmarks.gpu.triton_decode import decode_split  # noqa: PLC0415 -- imports triton

    q, keys, values = given["q"], given["k_cache"], given["v_cache"]
    sequences, heads, head_dim = q.shape
    _, kv_heads, size, _ = keys.shape
    partial = (sequences, heads, NUM_SPLITS)
    out = torch.empty(*partial, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(*partial, dtype=torch.float32, device=q.device)
    group = heads // kv_heads

    def call() -> Any:
        decode_split[(sequences, kv_heads, NUM_SPLITS)](
            q,
            keys,
            values,
            given["block_table"],
            given["seq_lens"],
            out,
            lse,
            head_dim**-0.5,
            given["block_table"].stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            GROUP=group,
            ROWS=max(16, triton.next_power_of_2(group)),
            D=head_dim,
            SIZE=size,
            TOKENS=64,
            SPLITS=NUM_SPLITS,
        )
        weights = (lse - lse.logsumexp(-1, keepdim=True)).exp()
        return (out * weights[..., None]).sum(2).to(q.dtype)

    return call


def flashinfer_decode(torch: Any, given: Mapping[str, Any]) -> Call:
    """FlashInfer's batch decode on the same blocks, with its plan made once."""
    import flashinfer  # noqa: PLC0415 -- where its wheel is

    q, keys, values = given["q"], given["k_cache"], given["v_cache"]
    table, lengths = given["block_table"], given["seq_lens"]
    size = keys.shape[2]
    counts = (lengths + size - 1) // size
    ends = torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)]).to(torch.int32)
    is_owned = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    last = lengths - (counts - 1) * size
    num_tables = len(lengths)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=q.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty(num_tables + 1, dtype=torch.int32, device=q.device),
        paged_kv_indices_buffer=torch.empty_like(table).flatten(),
        paged_kv_last_page_len_buffer=torch.empty_like(lengths),
    )
    wrapper.plan(
        ends,
        table[is_owned].contiguous(),
        last.to(torch.int32),
        q.shape[1],
        keys.shape[1],
        q.shape[2],
        size,
        q_data_type=q.dtype,
        kv_data_type=keys.dtype,
    )
    return lambda: wrapper.run(q, (keys, values))
