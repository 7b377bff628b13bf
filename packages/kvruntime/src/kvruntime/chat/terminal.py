"""A conversation as a person types it, or as a pipe brings it.

Knows lines, commands and Ctrl-C. Does not know who answers.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvruntime.chat.session import Chat, Turn
from kvruntime.errors import KVRuntimeError
from kvruntime.report import visible

__all__ = ["PersonsLines", "Terminal"]

_MOST_ROWS = 20
_HELP = """\
/stats        what each turn computed, and what it found in the cache
/system TEXT  what the model is told before everything else; without TEXT, show it
/reset        begin a new conversation
/quit         leave, as Ctrl-D does
Ctrl-C stops an answer; what has come of it stays in the conversation."""


class Terminal:
    """Reads questions and commands, prints answers.

    Args:
        chat: the conversation.
        out: where to print.
        is_interactive: whether a person sits there: questions are asked for and costs are told.
        pool: says how the pool of blocks stands, where it can be known.
        stop_at_once: whether Ctrl-C may interrupt an answer anywhere, as one of a server.
    """

    def __init__(
        self,
        chat: Chat,
        out: Console,
        *,
        is_interactive: bool,
        pool: Callable[[], str] = lambda: "",
        stop_at_once: bool = False,
    ) -> None:
        self._chat = chat
        self._out = out
        self._is_interactive = is_interactive
        self._pool = pool
        self._stop_at_once = stop_at_once

    def run(self, lines: Iterator[str]) -> None:
        """Serve lines until they end or one says so.

        Raises what refuses a question, if nobody is there to ask another one.
        """
        while True:
            try:
                line = next(lines, "/quit").strip()
                if line in {"/quit", "/exit"}:
                    return
                self._serve(line)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                self._out.print(Text("\nCtrl-D or /quit leaves", style="dim"))
            except KVRuntimeError as error:
                if not self._is_interactive:
                    raise
                self._out.print(Text(str(error), style="red"))

    def _serve(self, line: str) -> None:
        if line.startswith("/"):
            self._command(line)
        elif line and self._is_interactive:
            # An interrupt ends the answer; the program goes on.
            with _stop_switch(at_once=self._stop_at_once) as is_stopped:
                self._answer(line, is_stopped)
        elif line:
            self._answer(line, lambda: False)

    def _answer(self, question: str, is_stopped: Callable[[], bool]) -> None:
        write, num_turns = self._out.file.write, len(self._chat.turns)
        with suppress(_Stopped), closing(self._chat.ask(question)) as pieces:
            for piece in pieces:
                write(visible(piece))
                self._out.file.flush()
                if is_stopped():
                    break
        write("\n")
        self._out.file.flush()
        if self._is_interactive and len(self._chat.turns) > num_turns:
            self._out.print(Text(_cost(self._chat.turns[-1]), style="dim"))

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/stats":
            self._show_stats()
        elif name == "/reset":
            self._chat.reset()
            self._out.print(Text("a new conversation", style="dim"))
        elif name == "/system":
            self._chat.system = rest.strip() or self._chat.system
            self._out.print(Text(visible(self._chat.system or "no system prompt"), style="dim"))
        elif name == "/help":
            self._out.print(Text(_HELP))
        else:
            self._out.print(
                Text(f"there is no command {visible(name)}; /help says which there are")
            )

    def _show_stats(self) -> None:
        turns = self._chat.turns
        table = Table(title="tokens of each turn", title_justify="left")
        for name in ("turn", "prompt", "from the cache", "computed", "generated", "seconds"):
            table.add_column(name, justify="right")
        for number, turn in list(enumerate(turns, 1))[-_MOST_ROWS:]:
            table.add_row(str(number), *_cells(turn))
        table.add_section()
        table.add_row("all", *_cells(_sum(turns)))
        self._out.print(table)
        if pool := self._pool():
            self._out.print(Text(pool, style="dim"))


class _Stopped(KeyboardInterrupt):
    """Ctrl-C while an answer comes."""


@contextmanager
def _stop_switch(*, at_once: bool) -> Iterator[Callable[[], bool]]:
    """While it is entered, a first Ctrl-C only asks to stop, and a second one interrupts.

    So an engine ends the step that it is in. `at_once` interrupts at the first.
    """
    asked = [False]

    def stop(_number: int, _frame: FrameType | None) -> None:
        if at_once or asked[0]:
            raise _Stopped
        asked[0] = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: asked[0]
    finally:
        signal.signal(signal.SIGINT, before)


def _cells(turn: Turn) -> Iterator[str]:
    yield f"{turn.num_prompt_tokens:,}"
    yield f"{turn.num_cached_tokens:,}"
    yield f"{turn.num_computed_tokens:,}"
    yield f"{turn.num_output_tokens:,}"
    yield f"{turn.seconds:.1f}"


def _sum(turns: Iterable[Turn]) -> Turn:
    total = Turn()
    for turn in turns:
        total.num_prompt_tokens += turn.num_prompt_tokens
        total.num_cached_tokens += turn.num_cached_tokens
        total.num_output_tokens += turn.num_output_tokens
        total.seconds += turn.seconds
    return total


def _cost(turn: Turn) -> str:
    """One line below an answer."""
    parts = [
        f"{turn.num_prompt_tokens:,} tokens of the conversation",
        f"{turn.num_cached_tokens:,} of them in the cache",
        f"{turn.num_output_tokens:,} generated in {turn.seconds:.1f} s",
    ]
    if turn.finish_reason is None:
        parts.append("stopped")
    elif turn.finish_reason != "stop":
        parts.append(f"ended: {turn.finish_reason}")
    return f"[{', '.join(parts)}]"


class PersonsLines(Iterator[str]):
    """The lines that a person types, until Ctrl-D."""

    def __init__(self) -> None:
        import readline  # noqa: F401, PLC0415 -- the import gives `input` its keys and its history

    def __next__(self) -> str:
        try:
            return input("> ")
        except EOFError:
            print()  # noqa: T201 -- the prompt's line ends here
            raise StopIteration from None
