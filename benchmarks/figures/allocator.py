"""Tables of block managers side by side."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.tables import Figures, command, number, result, table

# A row of a table of block managers: what it says, the workload, and which part of it.
_Row = tuple[str, str, str]
_ALL_ROWS: list[_Row] = [
    ("2,048 tokens allocated and freed, no cache", "W1", "all"),
    ("decode, 256 running, `DecodeBatch`", "W2", "all"),
    ("the same, one `append` a step", "W2/together", "all"),
    ("the same, one `append` a sequence", "W2/singly", "all"),
    ("`DecodeBatch`, 13 of 256 leave and join a step", "W2j", "all"),
    ("decode with caching, `DecodeBatch`", "W2c", "all"),
    ("the same, one `append` a step", "W2c/together", "all"),
    ("4,096 shared and 128 own tokens, list", "W3/list", "all"),
    ("the same, array", "W3/array", "all"),
    ("2,048 new tokens, 100k blocks full, list", "W4/100k/list", "all"),
    ("the same, array", "W4/100k/array", "all"),
    ("4,096 shared and 128 own tokens, events on, array", "W3e/array", "all"),
    ("2,048 new tokens, 10k blocks full, events on, array", "W4e/array", "all"),
    ("chats, 100k blocks, array", "W5/100k/array", "all"),
    ("Mooncake conversation trace, array", "W5m/array", "all"),
    ("fork, 1,000 tokens", "W6", "fork"),
    ("first append after a fork", "W6", "append"),
    ("free a fork", "W6", "free"),
    ("free 100,000 tokens", "W7", "all"),
    ("free 100,000 cached tokens", "W7c", "all"),
]
_SUMMARY_ROWS: list[_Row] = [
    ("decode, 256 running, a token each", "W2", "all"),
    ("a prompt with a cached prefix of 4,096 tokens", "W3/array", "all"),
    ("a prompt of 2,048 new tokens through a full cache", "W4/100k/array", "all"),
    ("the Mooncake conversation trace", "W5m/array", "all"),
]


def allocator_hashing() -> str:
    """How many times as long a new prompt takes when each block is hashed."""
    times = {row["key"]: row["results"]["kvblocks"] for row in result("allocator")["workloads"]}
    with_events, without = (
        times[key]["parts"]["all"]["minimum"] for key in ("W4e/array", "W4/10k/array")
    )
    return number(with_events / without)


def _peer(found: dict[str, Any], workload: str, part: str, peer: str) -> str:
    """How many times as long a peer takes; another version of it where this one cannot do it."""
    results = next(row for row in found["workloads"] if row["key"] == workload)["results"]
    for name in (peer, f"{peer}-v0"):
        parts = results.get(name, {}).get("parts", {})
        if part in parts:
            return f"{number(parts[part]['ratio_of_minima'])}x"
    return "-"


def allocator_all() -> str:
    """Microseconds of kvblocks, and the ratios of its peers."""
    found = result("allocator")
    rows = []
    for label, workload, part in _ALL_ROWS:
        results = next(row for row in found["workloads"] if row["key"] == workload)["results"]
        own = number(results["kvblocks"]["parts"][part]["minimum"])
        peers = ("vllm", "sglang", "sglang-rust", "transformers")
        rows.append([label, own, *(_peer(found, workload, part, peer) for peer in peers)])
    head = ["workload", "kvblocks, µs", "vLLM", "SGLang", "SGLang, Rust core", "transformers"]
    return table(head, rows)


def allocator_ratios() -> dict[str, dict[str, float]]:
    """The ratios of the peers in the four jobs that a server has all day, by job and peer."""
    found = result("allocator")
    peers = {
        "vllm": f"vLLM {found['versions']['vllm'][:4]}",
        "sglang-rust": f"SGLang {found['versions']['sglang-rust']}, Rust core",
        "transformers": f"transformers {found['versions']['transformers'][:4]}",
    }
    workloads = {row["key"]: row["results"] for row in found["workloads"]}
    return {
        label: {
            name: workloads[workload][peer]["parts"][part]["ratio_of_minima"]
            for peer, name in peers.items()
        }
        for label, workload, part in _SUMMARY_ROWS
    }


def allocator_summary() -> str:
    """The same as a table."""
    ratios = allocator_ratios()
    rows = [
        [label, *(f"{number(ratio)}x" for ratio in of_peer.values())]
        for label, of_peer in ratios.items()
    ]
    return table(["", *next(iter(ratios.values()))], rows)


FIGURES: Figures = {
    "allocator/all": allocator_all,
    "allocator/hashing": allocator_hashing,
    "allocator/summary": allocator_summary,
    "allocator/command": command("allocator"),
}
