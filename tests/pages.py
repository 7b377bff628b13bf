r"""The pages of this repository, and the blocks of code on them.

How pages mark what they show:

- ```` ```python ````: runs. The blocks of a page run in order and share their names. A block with
  `>>>` is a doctest; of any other, a ```` ```text ```` block right after it is what it prints.
- ```` ```console ````: each line after `$` runs, with `\` at the end of a line to go on; the lines
  below are what it prints, `...` standing for anything. Without such lines it only has to succeed.
  `pip` and `nox` do not run: their sessions are looked up in the noxfile.
- ```` ```json ````: parses, line by line.
- Anything else is text. `<!-- not run: why -->` above a block of code makes it text.

Knows how pages are written. Does not know how their blocks are run.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"(?P<note><!-- not run: [^\n]+ -->\n)?"
    r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: Path
    line: int  # of its first line, from 1
    language: str
    text: str
    is_run: bool
    printed: str | None  # by a block of Python

    @property
    def place(self) -> str:
        """Where to look when it fails."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a console and what it prints."""

    place: str
    words: list[str]
    printed: str


def pages() -> list[Path]:
    """Every page that a reader may meet."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    packages = (ROOT / "packages").glob("*/README.md")
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(packages), *sorted(docs)]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order."""
    text = page.read_text("utf-8")
    found = list(_BLOCK.finditer(text))
    result = []
    for number, block in enumerate(found):
        follower = found[number + 1] if number + 1 < len(found) else None
        is_next = follower is not None and not text[block.end() : follower.start()].strip()
        printed = (
            follower["text"] if follower and is_next and follower["language"] == "text" else None
        )
        line = text.count("\n", 0, block.start("text")) + 1
        is_run = block["note"] is None
        result.append(Block(page, line, block["language"], block["text"], is_run, printed))
    return result


def commands(block: Block) -> list[Command]:
    """The commands of a block of console."""
    result = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        head = re.match(r"(?:.*\\\n)*.*\n", part)
        assert head is not None
        line = head.group().replace("\\\n", " ")
        words = shlex.split(line, comments=True)
        result.append(Command(block.place, words, part[head.end() :].rstrip("\n")))
    return result
