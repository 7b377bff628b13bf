"""What a person sees in a terminal: progress, texts, and the table of what memory held.

Knows how numbers are shown. Does not know how they come about.
"""

import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvruntime.llm import LLM
from kvruntime.request import RequestOutput
from kvruntime.stats import EngineStats
from kvruntime.weights import Progress

__all__ = [
    "Answer",
    "console",
    "progress_bars",
    "show_answers",
    "show_stats",
    "show_steps",
    "to_json",
    "visible",
]

# What was asked, in the user's words, and what came back.
Answer = tuple[str, RequestOutput]


@contextmanager
def progress_bars() -> Iterator[Progress | None]:
    """Bars on standard error while slow work runs; None where it is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(description: str, done: int, total: int) -> None:
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total)
            bars.update(tasks[description], completed=done, total=total)

        yield progress


def to_json(answers: Sequence[Answer], llm: LLM) -> dict[str, Any]:
    """One object for machines: every sample of every prompt, and the statistics."""
    return {
        "outputs": [
            {
                "prompt": prompt,
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids,
                "num_prompt_tokens": len(answer.prompt_token_ids),
                "num_cached_tokens": answer.num_cached_tokens,
                "finish_reason": output.finish_reason,
            }
            for prompt, answer in answers
            for output in answer.outputs
        ],
        "stats": {**asdict(llm.stats), "seconds": round(llm.seconds, 3)},
    }


def show_answers(answers: Sequence[Answer]) -> None:
    """Print each prompt and its samples."""
    out = console()
    for prompt, answer in answers:
        out.print(Rule(style="dim"))
        note = f"{len(answer.prompt_token_ids)} tokens, {answer.num_cached_tokens} from the cache"
        out.print(Text(visible(prompt), style="bold"), Text(f"  [{note}]", style="dim"), sep="")
        for output in answer.outputs:
            if len(answer.outputs) > 1:
                out.print(Text(f"sample {output.index}", style="cyan"))
            out.print(Padding(Text(visible(output.text.strip())), (0, 0, 0, 2), expand=False))


def show_steps(llm: LLM) -> None:
    """Print to standard error each step in which something happened, and the events of it.

    Requests are numbered in the order of their prompts; "3.1" is sample 1 of request 3.
    """
    out = console(stderr=True)
    evicted = 0
    for record in llm.step_log:
        if record.events or record.num_evicted_blocks > evicted:
            out.print(Text(str(record), style="dim"))
            for event in record.events:
                out.print(Text(f"  {event.subject} {event.what}"))
        evicted = record.num_evicted_blocks


def show_stats(llm: LLM) -> None:
    """Print the table of tokens and blocks."""
    stats, engine = llm.stats, llm.engine
    block_size = engine.config.block_size
    paged_slots = stats.peak_blocks * block_size
    mib = engine.block_bytes / block_size / 2**20

    table = Table(title="what the paged cache did", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("prompt tokens computed", f"{stats.num_prefill_tokens:,}")
    table.add_row(
        "prompt tokens from the cache", f"{stats.num_cached_tokens:,}", "shared by reference"
    )
    rate = stats.num_generated_tokens / llm.seconds if llm.seconds else 0.0
    table.add_row("tokens generated", f"{stats.num_generated_tokens:,}", f"{rate:.1f} a second")
    table.add_row("forks", f"{stats.num_forks:,}", "samples that share their prompt")
    table.add_row("copies on write", f"{stats.num_copies:,}", "shared tails, at the first write")
    table.add_section()
    table.add_row(
        "peak blocks",
        f"{stats.peak_blocks:,}",
        f"{paged_slots:,} slots of {block_size} a block, {paged_slots * mib:.1f} MiB",
    )
    table.add_row("tail waste", f"{stats.tail_waste_slots:,}", "unused slots at that moment")
    table.add_row(
        "contiguous slots instead",
        f"{stats.contiguous_slots:,}",
        f"at {engine.max_model_len:,} a sample: {stats.contiguous_slots * mib:.1f} MiB"
        + (f", {stats.contiguous_slots / paged_slots:.0f} times that" if paged_slots else ""),
    )
    table.add_row("blocks leaked", f"{stats.num_leaked_blocks:,}")
    pressed = _pressure(stats)
    if any(count for _, count, _ in pressed):
        table.add_section()
        for label, count, note in pressed:
            table.add_row(label, f"{count:,}", note)
    out = console()
    out.print()
    out.print(table)


def _pressure(stats: EngineStats) -> list[tuple[str, int, str]]:
    """What was done because blocks ran short."""
    return [
        ("deferred", stats.num_deferrals, "prompts that waited for room"),
        ("evicted", stats.num_evicted_blocks, "cached blocks that nobody used"),
        ("preempted by recompute", stats.num_preemptions_recompute, "samples, computed again"),
        ("preempted by swapping", stats.num_preemptions_swap, "samples, to the host and back"),
    ]


def visible(text: str) -> str:
    """A text without control characters: what a model writes must not steer a terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )


def console(*, stderr: bool = False) -> Console:
    """A standard stream; a pipe gets whole lines, not lines cut at a guessed width."""
    stream = Console(highlight=False, stderr=stderr)
    if not stream.is_terminal and "COLUMNS" not in os.environ:
        stream.width = 120
    stream.width = max(stream.width, 40)  # below, a terminal wraps lines better than cells
    return stream
