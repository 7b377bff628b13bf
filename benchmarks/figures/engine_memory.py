"""Tables of what paging saves in the engine, and what it costs."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.tables import Figures, command, result, table


def _results(part: str) -> Any:
    return result("engine-memory")["results"][part]


def engine_memory_bookkeeping() -> str:
    """Milliseconds of a step beside the model."""
    found = _results("bookkeeping")
    with_model = found["32 sequences, SmolLM2"]
    share = f"{100 * with_model['share that is no model']:.1f} %"
    rows = [
        [f"{number} sequences, no model", f"{found[name]['ms a step, median']:.2f}", ""]
        for number in (32, 256)
        for name in [f"{number} sequences, no model"]
    ]
    last = ["32 sequences, SmolLM2", "", f"{share} of {with_model['ms a step']:.0f} ms"]
    return table(["", "ms a step, median", "share of a step"], [*rows, last])


def engine_memory_pressure() -> str:
    """The same requests in much memory and in little."""
    labels = {
        "roomy": "512 blocks",
        "recompute": "24 blocks, recompute",
        "swap": "24 blocks, swap",
    }
    found = _results("pressure")
    counts = ("steps", "preemptions", "tokens of prompts computed", "blocks swapped")
    rows = [
        [label, f"{found[name]['processor seconds']:.1f}"]
        + [f"{found[name][count]:,}" for count in counts]
        for name, label in labels.items()
    ]
    return table(["", "processor seconds", *counts], rows)


def engine_memory_first_token() -> str:
    """A prompt that is cached beside one that is not."""
    found = _results("first token")
    return (
        f"A prompt of 400 tokens takes {found['cold, ms']:.0f} ms, and {found['cached, ms']:.0f} ms "
        f"when 384 of them are cached: {found['ratio']:.1f} times."
    )


def engine_memory_batch_size() -> str:
    """Tokens a processor second by the number of requests that run together."""
    found = _results("batch size")
    return table(
        ["requests side by side", *found],
        [["tokens a processor second", *(f"{rate:.0f}" for rate in found.values())]],
    )


def engine_memory_sharing() -> str:
    """Blocks of samples and beams that share, and of copies."""
    rows = [
        [
            name,
            str(row["blocks at most, by forks"]),
            str(row["blocks at most, by copies"]),
            f"{100 * row['saved']:.0f} %",
        ]
        for name, row in _results("sharing").items()
    ]
    return table(["", "blocks at most, shared", "copied", "saved on average"], rows)


def engine_memory_shared_prefix() -> str:
    """A step of sequences whose prefix attention reads once, or for each of them."""
    found = _results("shared prefix")
    columns = ("read once, ms a step", "read for each, ms a step")
    rows = [
        [name, *(f"{row[column]:.0f}" for column in columns), f"{row['ratio']:.2f}x"]
        for name, row in found.items()
    ]
    return table(["", *columns, ""], rows)


def engine_memory_kv_dtype() -> str:
    """What fewer bits for keys and values change."""
    rows = [
        [
            name,
            f"{row['bytes a token']:,}",
            str(row["tokens up to the first that differs"]),
            f"{100 * row['likeliest tokens that agree']:.3g} %",
            f"{row['largest difference of a logit']:.2f}",
            f"{row['mean difference of a logit']:.2g}",
        ]
        for name, row in _results("kv dtype").items()
    ]
    head = [
        "`kv_dtype`",
        "bytes a token",
        "tokens up to the first that differs, of 384",
        "likeliest tokens that agree",
        "largest difference of a logit",
        "mean",
    ]
    return table(head, rows)


FIGURES: Figures = {
    "engine-memory/batch-size": engine_memory_batch_size,
    "engine-memory/bookkeeping": engine_memory_bookkeeping,
    "engine-memory/command": command("engine-memory"),
    "engine-memory/first-token": engine_memory_first_token,
    "engine-memory/kv-dtype": engine_memory_kv_dtype,
    "engine-memory/pressure": engine_memory_pressure,
    "engine-memory/shared-prefix": engine_memory_shared_prefix,
    "engine-memory/sharing": engine_memory_sharing,
}
