"""A run as a table for people and as JSON for machines.

Knows how figures are shown. Does not know how they came about.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.allocator.peers import SUBJECT
from benchmarks.allocator.runner import Result, Run, Summary
from benchmarks.environment import command, system

Statistic = Literal["minimum", "median"]


def table(run: Run, statistic: Statistic) -> str:
    """One row a part of a workload: kvblocks, then each peer with its ratio to kvblocks."""
    names = [name for name in run.versions if name != SUBJECT.name]
    head = ["workload", "", "kvblocks", *names]
    rows = [head, *_rows(run, names, statistic)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _rows(run: Run, names: list[str], statistic: Statistic) -> Iterator[list[str]]:
    for case in run.cases:
        results = run.results[case.key]
        summaries = {name: result.summaries() for name, result in results.items()}
        ours = summaries.get(SUBJECT.name, {})
        for part in dict.fromkeys(part for of_one in summaries.values() for part in of_one):
            own = getattr(ours[part], statistic) if part in ours else None
            row = [f"{case.key} {part}".strip(), case.about]
            row.append("-" if own is None else _number(own))
            for name in names:
                summary = summaries.get(name, {}).get(part)
                row.append(_cell(getattr(summary, statistic) if summary else None, own))
            yield row


def _cell(value: float | None, own: float | None) -> str:
    if value is None:
        return "-"
    ratio = f"{_number(value / own)}x" if own else ""
    return f"{_number(value)} {ratio:>7}"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f}"
    )


def notes(run: Run) -> str:
    """What is missing from the table and why, and the hit rates."""
    lines = [f"{name} is not measured: {reason}" for name, reason in run.missing.items()]
    rates: dict[str, str] = {}
    for case in run.cases:
        results = run.results[case.key]
        trouble = {name: r.trouble for name, r in results.items() if r.trouble is not None}
        if trouble and len(trouble) == len(results):
            lines.append(f"{case.key} is not measured: {next(iter(trouble.values()))}")
            continue
        lines += [
            f"{case.key} {name} failed: {error}"
            for name, error in trouble.items()
            if error.kind == "failed"
        ]
        found = {name: r.facts["hit_rate"] for name, r in results.items() if r.facts}
        if any(found.values()):
            # Lists and arrays hold the same tokens.
            rates[case.key.rpartition("/")[0]] = ", ".join(
                f"{name} {rate:.4f}" for name, rate in found.items()
            )
    return "\n".join([*lines, *(f"{key} hit rate: {told}" for key, told in rates.items())])


def as_json(run: Run, *, quick: bool) -> dict[str, Any]:
    """Everything that was measured, with the machine, the versions and the command."""
    return {
        "machine": _machine(),
        "versions": run.versions,
        "missing": run.missing,
        "command": command("allocator"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit_of_kvblocks": _commit(),
        "quick": quick,
        "workloads": [
            {
                "key": case.key,
                "about": case.about,
                "measure": f"{case.measure} a {case.unit}",
                "results": _results(run.results[case.key]),
            }
            for case in run.cases
        ],
    }


def _results(results: dict[str, Result]) -> dict[str, Any]:
    ours = results[SUBJECT.name].summaries() if SUBJECT.name in results else {}
    told: dict[str, Any] = {}
    for name, result in results.items():
        if result.trouble is not None:
            told[name] = {result.trouble.kind: str(result.trouble)}
            continue
        parts = {
            part or "all": {**_rounded(summary), **_ratios(summary, ours.get(part))}
            for part, summary in result.summaries().items()
        }
        told[name] = {"num_rounds": len(result.rounds), "parts": parts, **result.facts}
    return told


def _rounded(summary: Summary) -> dict[str, float]:
    return {statistic: float(f"{value:.5g}") for statistic, value in asdict(summary).items()}


def _ratios(summary: Summary, own: Summary | None) -> dict[str, float]:
    if own is None:
        return {}
    return {
        "ratio_of_minima": round(summary.minimum / own.minimum, 3),
        "ratio_of_medians": round(summary.median / own.median, 3),
    }


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text(encoding="utf-8").splitlines() if info.is_file() else ())
        if line.startswith("model name")
    ]
    return {
        "system": system(),
        "processor": models[0] if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
    }


def _commit() -> str:
    """The commit that changed kvblocks last, and whether it has been changed since."""
    source = "packages/kvblocks/src"
    commit = _git("log", "-1", "--format=%h", "--", source)
    changed = _git("status", "--porcelain", "--", source)
    return f"{commit}, changed since" if changed else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)  # noqa: S603, S607 -- our own words, whatever git is there
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
