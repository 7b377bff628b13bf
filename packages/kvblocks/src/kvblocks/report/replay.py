"""What `kvblocks replay` went through, as a page: blocks over time, and where sequences come from.

Knows a history and how to show it. Does not replay anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from kvblocks.block_map import KINDS, History, Life, life_order
from kvblocks.report.charts import area_chart, key
from kvblocks.report.page import Section, facts, paragraph, render_page, table

_COLOURS = ("c0", "c3", "c1", "c2", "c4", "c5", "empty")
_NUM_CELLS = 4096
_NUM_LIVES = 100
_NUM_COLUMNS, _FEW_BLOCKS = 64, 512
_CELL, _LIFE, _LIFE_LEFT, _WIDTH = 13, 18, 170, 860
_KINDS = tuple(zip(KINDS, _COLOURS, strict=True))


def replay_page(
    name: str, history: History, pairs: Sequence[tuple[str, str]], calls: Sequence[Sequence[str]]
) -> str:
    """The report of a replay as one HTML file.

    `name` says which log it was, `pairs` are facts about it, and `calls` are the rows of the table of
    calls: the operation, how often it was carried out, and how often it was refused.
    """
    sections = [Section("Overview", facts(pairs))]
    if history.frames:
        sections.append(Section("The pool, call by call", _pool(history)))
        sections.append(Section("Every block", _blocks(history)))
    if history.lives:
        sections.append(Section("Sequences, forks and copies", _lives(history)))
    headers = ["call", "carried out", "refused"]
    sections.append(Section("Calls", table("How often each was made", headers, calls)))
    return render_page("What became of the blocks", name, sections, ["replay.js"])


def _pool(history: History) -> str:
    points = [(float(frame.number), frame.counts) for frame in history.frames]
    return area_chart(
        _KINDS,
        points,
        label="Blocks of each kind of use, after each call.",
        x_label="call",
        y_label="blocks",
    )


def _blocks(history: History) -> str:
    """A cell a block, and a slider over the frames; as drawn, it shows the last one."""
    shown = min(history.num_blocks, _NUM_CELLS)
    columns = _NUM_COLUMNS if shown > _FEW_BLOCKS else _NUM_COLUMNS // 2
    last = len(history.frames) - 1
    uses = {block: use for frame in history.frames for block, use in frame.changes.items()}
    cells = []
    for block in range(shown):
        row, column = divmod(block, columns)
        kind = uses[block].kind if block in uses else len(KINDS) - 1
        cells.append(
            f'<rect class="fill {_COLOURS[kind]}" x="{column * _CELL}" y="{row * _CELL}" '
            f'width="{_CELL - 2}" height="{_CELL - 2}"/>'
        )
    height = -(-shown // columns) * _CELL
    note = (
        f"The first {shown:,} of {history.num_blocks:,} blocks. "
        if shown < history.num_blocks
        else ""
    )
    hint = (
        f"{note}Move the slider, with the arrow keys too; a block under the pointer says who holds it, "
        "and the arrow keys go from block to block."
    )
    return (
        f"{key(_KINDS)}{paragraph(hint)}"
        f'<p class="slide"><button type="button" id="play" hidden>Play</button>'
        f'<input type="range" id="frame" min="0" max="{last}" value="{last}" aria-label="call">'
        f'</p><p id="call" class="call">{escape(_frame_text(history, last))}</p>'
        f'<svg id="blocks" viewBox="0 0 {columns * _CELL} {height}" role="group" tabindex="0" '
        f'aria-label="One cell for each block." data-columns="{columns}">{"".join(cells)}</svg>'
        f'<script type="application/json" id="frames">{_frames_as_json(history, shown)}</script>'
    )


def _frame_text(history: History, index: int) -> str:
    frame = history.frames[index]
    evicted = f" ({frame.num_evicted:,} blocks evicted)" if frame.num_evicted else ""
    return f"after call {frame.number:,}: {frame.text}{evicted}"


def _frames_as_json(history: History, shown: int) -> str:
    frames = [
        {
            "text": _frame_text(history, index),
            "changes": [
                [block, use.kind, ", ".join(map(str, use.holders[:8]))]
                for block, use in frame.changes.items()
                if block < shown
            ],
        }
        for index, frame in enumerate(history.frames)
    ]
    found = {"kinds": KINDS, "colours": _COLOURS, "frames": frames}
    # "</script>" in an id would end the element.
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _lives(history: History) -> str:
    """A line from birth to end for each sequence, forks below what they come from."""
    order = list(life_order(history.lives))
    if len(order) > _NUM_LIVES:
        # Families are what there is to see: those that fork come first.
        forked = {life.parent for life in history.lives} | {
            index for index, life in enumerate(history.lives) if life.parent is not None
        }
        order = sorted(order, key=lambda entry: entry[0] not in forked)[:_NUM_LIVES]
    rows = {index: row for row, (index, _) in enumerate(order)}
    scale = (_WIDTH - _LIFE_LEFT - 10) / max(history.num_calls, 1)
    parts = [_branch(history.lives[index], rows[index], rows, scale) for index, _ in order]
    for index, depth in order:
        parts += _life(history, index, depth, rows[index], scale)
    height = len(order) * _LIFE + 4
    note = (
        f"{len(order)} of {len(history.lives):,} sequences. "
        if len(order) < len(history.lives)
        else ""
    )
    hint = (
        f"{note}From left to right, call by call. A fork hangs below the sequence that it shares blocks "
        "with; a dot is a block that was copied before a write."
    )
    return (
        paragraph(hint)
        + f'<svg viewBox="0 0 {_WIDTH} {height}" role="group" '
        + f'aria-label="Sequences with their forks and copies.">{"".join(parts)}</svg>'
    )


def _branch(life: Life, row: int, rows: dict[int, int], scale: float) -> str:
    """A line down from the sequence that one was forked from."""
    if life.parent is None or life.parent not in rows:
        return ""
    x = _LIFE_LEFT + life.born * scale
    above, below = (each * _LIFE + _LIFE // 2 for each in (rows[life.parent], row))
    return f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{above}" y2="{below}"/>'


def _life(history: History, index: int, depth: int, row: int, scale: float) -> list[str]:
    life = history.lives[index]
    end = history.num_calls if life.died is None else life.died
    y = row * _LIFE + _LIFE // 2
    left, right = _LIFE_LEFT + life.born * scale, _LIFE_LEFT + end * scale
    tip = escape(_life_text(history, life))
    colour = "c0" if life.parent is None else "c3"
    name = str(life.seq_id)
    shown = name if len(name) <= 20 else f"{name[:19]}…"
    line = (
        f'<rect class="fill {colour}" tabindex="0" data-tip="{tip}" x="{left:.1f}" y="{y - 3}" '
        f'width="{max(right - left, 2):.1f}" height="6" rx="3"/>'
    )
    parts = [
        f'<text class="ink" x="{6 + 10 * min(depth, 6)}" y="{y + 4}">{escape(shown)}</text>',
        line,
    ]
    for number, source, destination in life.copies:
        text = escape(f"{name}\ncall {number:,}: block {source} copied to {destination}")
        parts.append(
            f'<circle class="mark c1" tabindex="0" data-tip="{text}" '
            f'cx="{_LIFE_LEFT + number * scale:.1f}" cy="{y}" r="5"/>'
        )
    return parts


def _life_text(history: History, life: Life) -> str:
    lines = [str(life.seq_id), f"from call {life.born:,}"]
    if life.parent is not None:
        lines[1] = f"forked from {history.lives[life.parent].seq_id} by call {life.born:,}"
    elif life.num_cached_tokens:
        lines.append(f"{life.num_cached_tokens:,} tokens were cached")
    lines.append("not freed" if life.died is None else f"freed by call {life.died:,}")
    if life.copies:
        lines.append(f"{len(life.copies):,} blocks copied for it")
    return "\n".join(lines)
