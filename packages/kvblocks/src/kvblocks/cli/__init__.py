"""The command line: `kvblocks plan` and its siblings.

Knows options and exit codes: 0 on success, 2 with one sentence for a user's mistake, 1 with one
sentence when the system refuses, as a full disk or a closed output does, 130 after Ctrl-C, 141 when
nobody reads on. Data goes to standard output, everything else to standard error. Each command is a
module of its own with one `add_parser`.
"""

import io
import os
import sys
from collections.abc import Sequence

from kvblocks._version import __version__
from kvblocks.cli import plan, replay, simulate
from kvblocks.cli.parser import Parser
from kvblocks.errors import KVBlocksError

__all__ = ["main"]

_COMMANDS = (plan, simulate, replay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default; return the exit code."""
    if sys.stdout is None:  # as Python finds it where its descriptor is closed
        print("kvblocks: standard output is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks shows as a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("kvblocks: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        print(f"kvblocks: {error}", file=sys.stderr)
        _drop_output()
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(
        prog="kvblocks",
        description="Plan the memory of a paged key-value cache, and replay traces against it.",
        epilog="Example:\n  kvblocks plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 "
        "--pool 16MiB --lengths 17,31,32,33",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for command in _COMMANDS:
        command.add_parser(commands)
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            # argparse would point to the help of `kvblocks` itself.
            commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        options.run(options)
    except SystemExit as exit_:  # how argparse ends --help, --version and a mistake
        code = exit_.code
    except KVBlocksError as error:
        print(f"kvblocks: {error}", file=sys.stderr)
        code = 2
    else:
        code = 0
    sys.stdout.flush()
    return int(code or 0)


def _drop_output() -> None:
    """Send what is still buffered nowhere: Python would try once more to write it as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
