"""The command line: `kvruntime generate` and its siblings.

Knows exit codes: 0 on success, 2 with one sentence for a user's mistake, 1 with one sentence when the
system refuses, as a full disk does. Data goes to standard output, everything else to standard error.
Each command is a module of its own: a thin function that checks its arguments and imports what it
needs, so that help and a usage error do not wait for torch.
"""

import io
import os
import sys
from typing import Annotated

import typer

from kvruntime._version import __version__
from kvruntime.cli.bench import bench
from kvruntime.cli.chat import chat
from kvruntime.cli.demo import demo
from kvruntime.cli.generate import generate
from kvruntime.cli.serve import serve
from kvruntime.errors import KVRuntimeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvruntime",
    help="A small transformer engine on paged memory.",
    epilog="Example: kvruntime demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command(epilog='Example: kvruntime generate --prompt "What is a page table?" --max-tokens 64')(
    generate
)
app.command(epilog="Example: kvruntime demo --json")(demo)
app.command(epilog="Example: kvruntime chat --model smollm2")(chat)
app.command(epilog="Example: kvruntime serve --model smollm2 --port 8000")(serve)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; an error of ours or of the system becomes one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks shows as a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except KVRuntimeError as error:
        print(f"kvruntime: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"kvruntime: {error}", file=sys.stderr)
        # What is still buffered has nowhere to go, and Python would try once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 -- typer calls it with the flag
    if wanted:
        print(__version__, flush=True)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """A small transformer engine on paged memory."""
