"""How many requests fit, and what they would find: planning without a model, in Python.

The commands `kvblocks plan` and `kvblocks simulate` print the same; here are the functions behind them.
"""

# %% What a token costs, and what is left of a GPU of 80 GiB.
import random

from kvblocks import sizing
from kvblocks.baselines import make_baseline
from kvblocks.simulate import Simulation
from kvblocks.traces import Request, Trace
from kvblocks.waste import measure_waste, sharegpt_like

per_token = sizing.bytes_per_token(32, 8, 128, 2)
pool = sizing.pool_bytes(
    80 * 2**30,
    weight_bytes=sizing.weight_bytes(8_000_000_000, 2),
    workspace_bytes=2 * 2**30,
    reserve_bytes=2**30,
    utilization=0.9,
)
num_slots = pool // per_token
print(f"{per_token:,} bytes a token, {num_slots:,} tokens in the pool")
assert per_token == 131_072

# %% Requests at once, in a small memory so that this takes a second: reserved whole, and in blocks.
at_once = {}
for name in ("reserve-max", "paged"):
    memory = make_baseline(name, 16_384, max_length=2048)
    found = measure_waste(memory, sharegpt_like(seed=0), max_steps=1500)
    at_once[name] = found.mean_batch
    print(
        f"{name}: {100 * found.tokens:.0f} % of the memory holds tokens, {found.mean_batch:.0f} at once"
    )
assert at_once["paged"] > 3 * at_once["reserve-max"]

# %% What chats of one system prompt would find, for pools of several sizes.
rng = random.Random(0)  # noqa: S311 -- the same chats every time
turns = [(chat, turn) for chat in range(40) for turn in range(4)]
rng.shuffle(turns)
turns.sort(key=lambda each: each[1])
requests = [
    Request(None, 64 * (turn + 2), 100, ["system", *((chat, i) for i in range(turn + 1))])
    for chat, turn in turns
]
simulation = Simulation(Trace("mooncake", 64, tuple(requests)), measure_last=0.5)
for capacity in (20, 60, 120, 200):
    lru = simulation.index("lru", capacity)
    best = simulation.index("belady", capacity)
    print(f"{capacity} blocks: lru finds {lru.hit_blocks}, the optimum {best.hit_blocks}")
    assert lru.hit_blocks <= best.hit_blocks
