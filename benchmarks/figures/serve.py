"""Tables of servers side by side."""

from __future__ import annotations

from statistics import median

from benchmarks.figures.engine import ENGINES
from benchmarks.figures.tables import Figures, command, number, result, table


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
    each = (f"{ENGINES[server]} {reached[server]}" for server in highest)
    return f"within {bound:g} ms a token at the median: {', '.join(each)}"


FIGURES: Figures = {
    "serve/command": command("serve"),
    "serve/highest": serve_highest,
    "serve/rates": serve_rates,
}
