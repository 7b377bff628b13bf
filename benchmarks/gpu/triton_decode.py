"""Paged decode attention as a plain Triton kernel, split over the context.

Knows one thing: the kernel. It runs on a CPU as well, by Triton's interpreter (TRITON_INTERPRET=1).
"""

import triton
import triton.language as tl


@triton.jit
def decode_split(  # noqa: D103 -- the module's docstring is its
    q_pointer,
    k_pointer,
    v_pointer,
    table_pointer,
    lengths_pointer,
    out_pointer,
    lse_pointer,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, or what a tensor core takes at least
    D: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_pointer + sequence)
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, D)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    q_offsets = (sequence * HEADS + heads)[:, None] * D + dims[None, :]
    q = tl.load(q_pointer + q_offsets, mask=is_row[:, None], other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(begin, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        is_token = tokens < end
        blocks = tl.load(
            table_pointer + sequence * table_stride + tokens // SIZE, mask=is_token, other=0
        ).to(tl.int64)
        slots = ((blocks * KV_HEADS + kv_head) * SIZE + tokens % SIZE)[:, None] * D + dims[None, :]
        keys = tl.load(k_pointer + slots, mask=is_token[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys)) * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        factor = tl.exp(maximum - new_maximum)
        values = tl.load(v_pointer + slots, mask=is_token[:, None], other=0.0)
        total = total * factor + tl.sum(weights, 1)
        acc = acc * factor[:, None] + tl.dot(weights.to(values.dtype), values)
        maximum = new_maximum
    is_empty = total == 0.0
    places = (sequence * HEADS + heads) * SPLITS + split
    lse = tl.where(is_empty, float("-inf"), maximum + tl.log(total))
    tl.store(lse_pointer + places, lse, mask=is_row)
    result = acc / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(out_pointer + places[:, None] * D + dims[None, :], result, mask=is_row[:, None])
