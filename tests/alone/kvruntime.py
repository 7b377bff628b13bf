"""kvruntime from its wheel: run by `nox -s alone`, with nothing but what the wheel asks for."""

import subprocess
import sys
from pathlib import Path

import kvruntime

assert "site-packages" in kvruntime.__file__, kvruntime.__file__
assert Path(kvruntime.__file__).with_name("py.typed").is_file()
command = [str(Path(sys.executable).with_name("kvruntime")), "--version"]
version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
assert version == kvruntime.__version__
print("kvruntime", version, "stands alone")
