"""Tables of what memory holds."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.tables import Figures, command, result, table

_BASELINES = ("reserve-max", "pow2", "oracle", "first-fit", "grow", "paged")
# Kwon et al., SOSP 2023, figure 2: token states in per cent of the memory, of OPT-13B on its own lengths.
_PAPER_TOKENS = {"reserve-max": "20.4", "pow2": "26.8", "oracle": "38.2", "paged": "96.3"}


def _answers(name: str) -> list[dict[str, Any]]:
    """What a command of kvblocks answered."""
    answer: list[dict[str, Any]] = result("memory")["commands"][name]["answer"]
    return answer


def _waste(load: str) -> dict[str, dict[str, Any]]:
    return {row["baseline"]: row for row in _answers(f"waste of {load}")}


def memory_waste() -> str:
    """What holds tokens, beside the paper's figure."""
    rows = _waste("sharegpt-like")
    cells = (
        [
            f"`{name}`",
            f"{100 * rows[name]['tokens']:.1f}",
            _PAPER_TOKENS.get(name, ""),
            f"{rows[name]['mean_batch']:.1f}",
        ]
        for name in _BASELINES
    )
    return table(["", "tokens", "in the paper", "requests at once"], cells)


def memory_waste_states() -> str:
    """Where the rest of the memory is."""
    rows = _waste("sharegpt-like")
    states = ("tokens", "reserved", "over_allocated", "rounding", "external", "idle")
    cells = (
        [f"`{name}`", *(f"{100 * rows[name][state]:.1f}" for state in states)]
        for name in _BASELINES
    )
    return table(["", *(state.replace("_", "-") for state in states)], cells)


def memory_waste_azure() -> str:
    """The same on the lengths of two public traces."""
    code, conv = _waste("code"), _waste("conv")
    cells = (
        [
            f"`{name}`",
            *(f"{value:.1f}" for rows in (code, conv) for value in _share_and_batch(rows[name])),
        ]
        for name in _BASELINES
    )
    return table(["", "code: tokens", "at once", "conv: tokens", "at once"], cells)


def _share_and_batch(row: dict[str, Any]) -> tuple[float, float]:
    return 100 * row["tokens"], row["mean_batch"]


def _sizes() -> list[int]:
    """The block sizes that were tried."""
    names = result("memory")["commands"]
    return [int(name.split()[-1]) for name in names if name.startswith("waste with blocks of")]


def tokens_by_block_size() -> dict[int, float]:
    """The share of the memory that holds tokens, in per cent."""
    answers = {size: _answers(f"waste with blocks of {size}") for size in _sizes()}
    return {size: 100 * row["tokens"] for size, [row] in answers.items()}


def memory_block_size() -> str:
    """What each block size leaves empty, and how many requests run."""
    rows = []
    for size in _sizes():
        [row] = _answers(f"waste with blocks of {size}")
        entries = -(-1000 // size)
        shares = (100 * row["tokens"], 100 * row["reserved"], row["mean_batch"])
        rows.append([str(size), *(f"{share:.1f}" for share in shares), f"{entries:,}"])
    head = ["block size", "tokens, %", "tails, %", "requests at once"]
    return table([*head, "table entries of 1,000 tokens"], rows)


def memory_sharing() -> str:
    """Blocks saved by sharing, in per cent, beside the paper's figure 15."""
    paper = {
        ("ShareGPT-like", "parallel sampling"): "16.2 to 30.5",
        ("ShareGPT-like", "beam search"): "44.3 to 66.3",
        ("Alpaca-like", "parallel sampling"): "6.1 to 9.8",
        ("Alpaca-like", "beam search"): "37.6 to 55.2",
    }
    found = {
        (row["load"], row["method"], row["width"]): row["saved"]
        for row in result("memory")["sharing"]
    }
    rows = [
        [load, method, *(f"{100 * found[load, method, n]:.1f}" for n in (2, 4, 6)), theirs]
        for (load, method), theirs in paper.items()
    ]
    return table(["lengths", "", "2", "4", "6", "in the paper, 2 to 6"], rows, left=2)


def _hits(name: str, policy: str, field: str) -> list[float]:
    rows = (row for row in _answers(name) if row["policy"] == policy)
    return [row["hit_blocks"] if field == "blocks" else _share(row) for row in rows]


def _share(row: dict[str, Any]) -> float:
    found: float = 100 * row["hit_tokens"] / row["total_tokens"]
    return found


def _capacities(name: str) -> list[str]:
    return [f"{size:,}" for size in sorted({row["capacity"] for row in _answers(name)})]


def memory_hits() -> str:
    """Blocks that the policies find in the whole trace."""
    name = "hits of all"
    rows = [
        [label, *(f"{blocks:,}" for blocks in _hits(name, policy, "blocks"))]
        for label, policy in (("`lru`", "lru"), ("`fifo`", "fifo"), ("`lfu`, `slru`", "lfu"))
    ]
    return table(["blocks in the pool", *_capacities(name)], rows)


def memory_hits_half() -> str:
    """Tokens that the policies find in the second half of the trace, in per cent."""
    rows = []
    for semantics in ("engine", "index"):
        policies = {"lru": "lru", "span": "span", "fifo": "fifo", "lfu and slru": "lfu"}
        policies |= {"belady": "belady"} if semantics == "index" else {}
        for label, policy in policies.items():
            shares = _hits(f"hits of half, {semantics}", policy, "share")
            rows.append([f"{label}, {semantics}", *(f"{share:.2f}" for share in shares)])
    return table(["blocks of 512 tokens", *_capacities("hits of half, index")], rows)


def memory_room() -> str:
    """How much of the room between LRU and the optimum `span` takes, in the second pool."""
    lru, span, best = (
        _hits("hits of half, index", policy, "share")[1] for policy in ("lru", "span", "belady")
    )
    room = best - lru
    return f"{room:.2f} points), `span` takes {100 * (span - lru) / room:.0f} %"


def memory_gap() -> str:
    """What the optimum finds beyond LRU, in the second pool."""
    lru, best = (_hits("hits of half, index", policy, "share")[1] for policy in ("lru", "belady"))
    return f"{best - lru:.2f} points of {best:.2f} % unfound"


FIGURES: Figures = {
    "memory/block-size": memory_block_size,
    "memory/command": command("memory"),
    "memory/gap": memory_gap,
    "memory/hits": memory_hits,
    "memory/hits-half": memory_hits_half,
    "memory/room": memory_room,
    "memory/sharing": memory_sharing,
    "memory/waste": memory_waste,
    "memory/waste-azure": memory_waste_azure,
    "memory/waste-states": memory_waste_states,
}
