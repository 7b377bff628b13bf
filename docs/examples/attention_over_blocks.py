"""One layer of attention over paged memory: `kvblocks` keeps the tables, `kvkernels` reads through them.

A prompt is computed in two chunks, then forked; both samples write a token, one of them into a copy. In
the end each attends to its own tokens, and gets what torch gets from keys and values in one piece.
"""

# %% Memory for one layer: eight blocks of four tokens, two heads of keys and values.
import numpy as np
import torch

import kvkernels
from kvblocks import BlockManager

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
manager = BlockManager(num_blocks=8, block_size=4)
k_cache, v_cache = np.full((2, 8, NUM_KV_HEADS, 4, HEAD_DIM), np.nan, np.float32)
rng = np.random.default_rng(0)
written: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {"a": ([], [])}


# %% One step: schedule, copy, write. The rest of a layer would be before and after this.
def step(batch: dict[str, list[int]]) -> None:
    """Give every token of a batch a key and a value, and remember them to compare."""
    plan = manager.append(batch)
    kvkernels.copy_blocks([k_cache, v_cache], plan.copies)
    num_tokens = sum(map(len, batch.values()))
    k, v = rng.standard_normal((2, num_tokens, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
    kvkernels.write_kv(k, v, k_cache, v_cache, np.array(plan.slot_mapping))
    rows = iter(zip(k, v, strict=True))
    for name, ids in batch.items():
        for key, value in (next(rows) for _ in ids):
            written[name][0].append(key)
            written[name][1].append(value)
        manager.commit(name, manager.num_computed_tokens(name))


# %% A prompt of six tokens in chunks of four and two, then two samples.
manager.allocate("a", [11, 12, 13, 14, 15, 16])
step({"a": [11, 12, 13, 14]})
step({"a": [15, 16]})
manager.fork("a", "b")
written["b"] = ([*written["a"][0]], [*written["a"][1]])
step({"a": [17], "b": [18]})
tables = [manager.block_table(name).tolist() for name in "ab"]
print("tables:", tables)

# %% Both attend in one call; what nobody wrote is still NaN, and never read.
table = np.full((2, 4), -1, np.int32)
manager.write_block_tables(table, ["a", "b"])
lengths = np.array([7, 7], np.int32)
q = rng.standard_normal((2, NUM_HEADS, HEAD_DIM), dtype=np.float32)
paged = kvkernels.paged_attention(q, k_cache, v_cache, table, lengths)

# %% torch, on keys and values one after another.
for row, name in enumerate("ab"):
    keys, values = (torch.from_numpy(np.stack(part, axis=1)) for part in written[name])
    dense = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q[row][:, None]), keys, values, enable_gqa=True
    )
    difference = np.abs(dense[:, 0].numpy() - paged[row]).max()
    print(f"{name}: differs by at most {difference:.1e}")
    assert difference < 1e-5
