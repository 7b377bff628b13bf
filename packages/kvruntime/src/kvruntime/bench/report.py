"""The figures of a load for people and for machines.

Knows how numbers are shown, and the JSON whose schema is in docs/bench-serve.md. Does not know how they
come about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvruntime.bench.figures import Distribution, Outcome, Record, Summary
from kvruntime.bench.throughput import Throughput

__all__ = ["show_summary", "show_throughput", "to_json"]

_SCHEMA = 1
# What a metric is called and its unit; all are shown a thousandfold.
_SHOWN = {
    "ttft": ("time to first token", "ms"),
    "tpot": ("time per output token", "ms"),
    "itl": ("inter-token latency", "ms"),
    "e2el": ("end to end", "ms"),
    "normalized_latency": ("normalized latency", "ms/token"),
    "waited": ("sent after it was due", "ms"),
}


def show_summary(summary: Summary, out: Console, *, title: str) -> None:
    """Print what was counted, the rates and the latencies."""
    out.print(_rates(summary, title))
    if any(summary.latencies.values()):
        out.print(_latencies(summary))
    for message, count in summary.errors.items():
        out.print(Text(f"{count}x {message}", style="red"))


def show_throughput(figures: Throughput, out: Console, *, title: str) -> None:
    """Print what one batch took."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    cached = f"{figures.num_cached_tokens:,} of them found in the cache"
    table.add_row("requests", f"{figures.num_requests:,}", "")
    table.add_row("prompt tokens", f"{figures.num_prompt_tokens:,}", cached)
    table.add_row("output tokens", f"{figures.num_output_tokens:,}", "")
    table.add_row("seconds", f"{figures.seconds:.2f}", "loading apart")
    table.add_row("processor seconds", f"{figures.cpu_seconds:.2f}", "of the whole process")
    table.add_section()
    output, total = figures.num_output_tokens, figures.num_prompt_tokens + figures.num_output_tokens
    table.add_row("requests a second", f"{figures.a_second(figures.num_requests):.2f}", "")
    table.add_row("output tokens a second", f"{figures.a_second(output):.1f}", "")
    table.add_row("all tokens a second", f"{figures.a_second(total):.1f}", "")
    out.print(table)


def to_json(
    summary: Summary,
    records: Sequence[Record],
    *,
    server: Mapping[str, Any],
    load: Mapping[str, Any],
) -> dict[str, Any]:
    """One object: what was asked of whom, the figures, and a row a request. Seconds throughout."""
    return {
        "schema": _SCHEMA,
        "server": dict(server),
        "load": dict(load),
        "duration": summary.duration,
        "requests": {
            **{outcome.value: count for outcome, count in summary.counts.items()},
            "not_sent": summary.num_not_sent,
        },
        "errors": dict(summary.errors),
        "tokens": {
            "prompt": summary.num_prompt_tokens,
            "cached": summary.num_cached_tokens,
            "output": summary.num_output_tokens,
        },
        "throughput": {
            "requests": summary.request_throughput,
            "output_tokens": summary.output_throughput,
            "total_tokens": summary.total_throughput,
        },
        "goodput": None
        if summary.goodput is None
        else {
            "limits": dict(summary.limits),
            "requests": summary.num_within_limits,
            "rate": summary.goodput,
        },
        "latencies": {name: _distribution(one) for name, one in summary.latencies.items()},
        "records": [_row(record) for record in records],
    }


def _distribution(one: Distribution | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "count": one.count,
        "mean": one.mean,
        "max": one.maximum,
        **{f"p{rank:g}": value for rank, value in one.percentiles.items()},
    }


def _row(record: Record) -> dict[str, Any]:
    row = asdict(record)
    row["num_chunks"] = len(row.pop("chunk_times"))
    return {**row, "ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}


def _rates(summary: Summary, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    counts = summary.counts
    table.add_row("completed", f"{summary.num_completed:,}", "requests")
    for outcome, note in (
        (Outcome.REJECTED, "status 429: the server was full"),
        (Outcome.FAILED, "any other error"),
        (Outcome.UNFINISHED, "cut off"),
    ):
        if counts[outcome]:
            table.add_row(outcome.value, f"{counts[outcome]:,}", note)
    if summary.num_not_sent:
        table.add_row("not sent", f"{summary.num_not_sent:,}", "")
    table.add_section()
    table.add_row("duration", f"{summary.duration:.2f}", "seconds")
    table.add_row(
        "prompt tokens",
        f"{summary.num_prompt_tokens:,}",
        f"{summary.num_cached_tokens:,} of them found in the server's cache",
    )
    table.add_row("output tokens", f"{summary.num_output_tokens:,}", "by the server's usage")
    table.add_section()
    table.add_row("requests a second", f"{summary.request_throughput:.2f}", "")
    table.add_row("output tokens a second", f"{summary.output_throughput:.1f}", "")
    table.add_row("all tokens a second", f"{summary.total_throughput:.1f}", "")
    if summary.goodput is not None:
        limits = ", ".join(f"{name} {1000 * x:g} ms" for name, x in summary.limits.items())
        table.add_row("goodput", f"{summary.goodput:.2f}", f"requests a second within {limits}")
    return table


def _latencies(summary: Summary) -> Table:
    ranks = next(one.percentiles for one in summary.latencies.values() if one)
    table = Table(title="latencies", title_justify="left")
    table.add_column("")
    table.add_column("unit", style="dim")
    for name in ("mean", *(f"p{rank:g}" for rank in ranks), "max"):
        table.add_column(name, justify="right")
    for name, one in summary.latencies.items():
        if one is not None:
            label, unit = _SHOWN[name]
            values = (one.mean, *one.percentiles.values(), one.maximum)
            table.add_row(label, unit, *(f"{1000 * value:,.1f}" for value in values))
    return table
