"""The command line: `kvkernels info`, `kvkernels selftest`, `kvkernels bench`.

Knows options and exit codes: 0 on success, 2 with one sentence for a user's mistake, 1 with one sentence
when a check fails or the system refuses, 130 after Ctrl-C, 141 when nobody reads on. Data goes to standard
output, everything else to standard error. Each command is a module of its own with one `add_parser`.
"""

import io
import os
import sys
from collections.abc import Sequence

from kvkernels._version import __version__
from kvkernels.cli import bench, info, selftest
from kvkernels.cli.parser import Parser
from kvkernels.errors import KVKernelsError

__all__ = ["main"]

_COMMANDS = (info, selftest, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default; return the exit code."""
    if sys.stdout is None:  # as Python finds it where its descriptor is closed
        print("kvkernels: standard output is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks shows as a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("kvkernels: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except (MemoryError, OSError) as error:
        print(f"kvkernels: {str(error) or 'there is not enough memory'}", file=sys.stderr)
        _drop_output()
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(
        prog="kvkernels",
        description="Attention over a paged key-value cache: what this machine can compute, and how fast.",
        epilog="Example:\n  kvkernels selftest",
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
            # argparse would point to the help of `kvkernels` itself.
            commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        code = options.run(options)
    except SystemExit as exit_:  # how argparse ends --help, --version and a mistake
        code = exit_.code
    except KVKernelsError as error:
        print(f"kvkernels: {error}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    return int(code or 0)


def _drop_output() -> None:
    """Send what is still buffered nowhere: Python would try once more to write it as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
