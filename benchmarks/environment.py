"""Where a benchmark runs, and where its traces lie.

Knows the system's name and an environment variable. Does not know what is measured.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["TRACES", "command", "system"]

TRACES = Path(os.environ.get("KVBLOCKS_TRACES", "traces"))


def system() -> str:
    """The processor's family and the operating system, as "x86_64, Linux 6.18"."""
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{platform.machine()}, {platform.system()} {release}"


def command(name: str) -> str:
    """What makes this run again."""
    return " ".join(["nox -s bench --", name, *sys.argv[1:]])
