"""The Mooncake conversation trace (FAST'25), replayed: how often a pool of blocks hits is known.

The answers were computed by independent simulators of an engine: full blocks only are keyed, at least
one token is recomputed, hits are pinned while a request runs, unkeyed blocks are reused first,
release is tail-first, one request runs at a time.
"""

import json
import os
from array import array
from pathlib import Path

import pytest

from kvblocks import BlockManager

TRACES = Path(os.environ.get("KVBLOCKS_TRACES", "traces"))
TRACE = TRACES / "mooncake" / "conversation_trace.jsonl"
BLOCK = 512  # tokens for each of the trace's hash ids

pytestmark = pytest.mark.skipif(not TRACE.is_file(), reason=f"{TRACE} is not there")


@pytest.fixture(scope="module")
def prompts() -> list["array[int]"]:
    """Two tokens for each full block of the trace, and one for what is left of a prompt."""
    found = []
    for line in TRACE.read_text("utf-8").splitlines():
        request = json.loads(line)
        num_full, rest = divmod(request["input_length"], BLOCK)
        ids = request["hash_ids"]
        tokens = array("I", (token for token in ids[:num_full] for _ in range(2)))
        if rest:
            tokens.append(ids[num_full])
        found.append(tokens)
    return found


@pytest.mark.parametrize(
    ("num_blocks", "num_hit_blocks"),
    [(1_000, 12_988), (5_000, 34_185), (10_000, 62_001), (50_000, 102_723), (300_000, 105_592)],
)
def test_hits_of_the_mooncake_trace_are_the_known_ones(
    prompts: list["array[int]"], num_blocks: int, num_hit_blocks: int
) -> None:
    assert replayed(prompts, BlockManager(num_blocks, block_size=2)) == num_hit_blocks


def replayed(prompts: list["array[int]"], manager: BlockManager) -> int:
    """The blocks that were found."""
    for request, tokens in enumerate(prompts):
        cached = manager.allocate(request, tokens).num_cached_tokens
        manager.append({request: len(tokens) - cached})
        manager.commit(request, len(tokens))
        manager.free(request)
    manager.check()
    return manager.stats().num_cached_tokens // 2


@pytest.mark.parametrize(
    ("policy", "num_hit_blocks"),
    [
        ("lru", (12_988, 34_185, 62_001, 102_723)),
        ("fifo", (12_984, 33_833, 56_109, 98_734)),
        ("lfu", (13_863, 25_771, 35_977, 96_224)),
        ("slru", (13_863, 25_771, 35_977, 96_224)),
    ],
)
def test_hits_of_each_policy_are_those_of_the_documentation(
    prompts: list["array[int]"], policy: str, num_hit_blocks: tuple[int, ...]
) -> None:
    assert num_hit_blocks == tuple(
        replayed(prompts, BlockManager(num_blocks, block_size=2, policy=policy))
        for num_blocks in (1_000, 5_000, 10_000, 50_000)
    )
