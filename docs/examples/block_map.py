"""The picture of the README: two sequences, their block tables, and the pool both point into.

`python docs/examples/block_map.py FILE.svg` draws what a real manager says after a fork and two writes.
"""

# %% The state: a prompt of six tokens, a fork, and one more token for each of the two.
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from kvblocks import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 8, 4
TOKENS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [1, 2, 3, 4, 5, 6, 8]}


def tables() -> dict[str, list[int]]:
    """The block tables of both sequences."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    manager.allocate("a", TOKENS["a"][:6])
    manager.append({"a": 6})
    manager.commit("a", 6)
    manager.fork("a", "b")
    manager.append({"a": [7], "b": [8]})
    return {name: manager.block_table(name).tolist() for name in TOKENS}


# %% The picture: tokens above and below, the pool between them, a line for each entry of a table.
SLOT, GAP, LEFT = 22, 14, 92
WIDTH = LEFT + NUM_BLOCKS * (BLOCK_SIZE * SLOT + GAP) + 10
ROWS = {"a": 18, "pool": 118, "b": 218}
INK, QUIET, EMPTY = "#18212b", "#55616e", "#eef1f4"
COLORS = {"a": "#cfe3f8", "b": "#fbdcc3", "both": "#e3cdf3"}


def left_of(block: int) -> int:
    """Where a block begins, in pixels."""
    return LEFT + block * (BLOCK_SIZE * SLOT + GAP)


def draw_block(x: int, y: int, tokens: list[int], color: str) -> list[str]:
    """One block with its tokens."""
    parts = []
    for offset in range(BLOCK_SIZE):
        has_token = offset < len(tokens)
        fill = color if has_token else EMPTY
        at = x + offset * SLOT
        parts.append(
            f'<rect x="{at}" y="{y}" width="{SLOT}" height="30" fill="{fill}" stroke="#fff"/>'
        )
        if has_token:
            parts.append(f'<text x="{at + SLOT // 2}" y="{y + 20}">{tokens[offset]}</text>')
    parts.append(
        f'<rect x="{x}" y="{y}" width="{BLOCK_SIZE * SLOT}" height="30" fill="none" stroke="{QUIET}"/>'
    )
    return parts


def draw() -> str:
    """The whole picture as SVG."""
    content: dict[int, list[int]] = {}
    owners: dict[int, set[str]] = {}
    lines, blocks = [], []
    for name, table in tables().items():
        y = ROWS[name]
        for index, block in enumerate(table):
            tokens = TOKENS[name][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            content[block] = tokens
            owners.setdefault(block, set()).add(name)
            start, end = (y + 30, ROWS["pool"]) if name == "a" else (y, ROWS["pool"] + 52)
            middle = BLOCK_SIZE * SLOT // 2
            x, to = left_of(index) + middle, left_of(block) + middle
            bend = (start + end) // 2
            lines.append(f'<path d="M{x} {start} C{x} {bend} {to} {bend} {to} {end}"/>')
            blocks += draw_block(left_of(index), y, tokens, COLORS[name])
        label = f"{name}: {table}"
        blocks.append(f'<text class="label" x="8" y="{y + 20}">{escape(label)}</text>')
    for block in range(NUM_BLOCKS):
        names = owners.get(block, set())
        color = COLORS["both"] if len(names) > 1 else COLORS[min(names, default="a")]
        blocks += draw_block(left_of(block), ROWS["pool"], content.get(block, []), color)
        count = f"block {block}" + (f", held {len(names)}x" if names else ", free")
        x = left_of(block) + BLOCK_SIZE * SLOT // 2
        blocks.append(f'<text class="quiet" x="{x}" y="{ROWS["pool"] + 46}">{count}</text>')
    blocks.append(f'<text class="label" x="8" y="{ROWS["pool"] + 20}">the pool</text>')
    style = (
        "text{font:13px system-ui,'Segoe UI',Roboto,Arial,sans-serif;text-anchor:middle;"
        f"fill:{INK}}}.label{{text-anchor:start;font-weight:600}}"
        f".quiet{{font-size:11px;fill:{QUIET}}}path{{fill:none;stroke:{QUIET};stroke-width:1.5}}"
    )
    alt = "Sequences a and b share block 0; a writes to block 2, b to block 1; the others are free."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 266" role="img">',
            f"<title>{alt}</title><style>{style}</style>",
            f'<rect width="{WIDTH}" height="266" rx="8" fill="#fff"/>',
            *lines,
            *blocks,
            "</svg>\n",
        ]
    )


# %% To the file that was named, or to the screen.
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(draw(), "utf-8")
else:
    print(draw())
