"""Spoiled checkpoints, each of which must load or be refused by a `CheckpointError`.

    nox -s fuzz -- checkpoints --seed 1 --cases 100000

A failing case prints one line that repeats it. A child process loads them, with bounds on its memory and
on the processor time of each case, so that a reader which aborts or hangs is a failing case too.

Knows how files are spoiled. Does not know how they are read.
"""

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kvruntime.errors import CheckpointError
from kvruntime.weights import load_checkpoint

from .checkpoint_files import (
    ARRAY,
    GGUF,
    STRING,
    U32,
    U64,
    Folder,
    make_folder,
    make_gguf,
    write,
)

MEMORY = 256 << 20  # bytes that a case may have more than the process has when it begins
SECONDS = 10.0  # of processor time a case
LARGE = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 3, 0.5, -0.0, 1e308, "", "llama", "x" * 300, [], {}, [0], ["a"]),
    *(2**31, 2**63, 2**64, 10**400, {"a": {"b": []}}, [[1]], [None], "\ud800", float("nan")),
    *(float("inf"), "default", "linear", "yarn", "__metadata__", "0", [-1], [2**70], "qwen3"),
]
TEXTS = [b"", b"\xff\xfe", b"x" * 300, b"qwen3", b"gpt2", b"default", b"yarn", b"output.weight"]
NAMES = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]


# ── how bytes are spoiled ────────────────────────────────────────────────────────────────────────


def spoil_bytes(chance: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, insert, remove, or write a number where it does not belong."""
    spoiled = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        at = chance.randrange(len(spoiled) + 1)
        # Headers stand in front, and most bytes do not.
        at = min(at, chance.choice([8, 32, 1024, 1 << 20]))
        kind = chance.randrange(6)
        if kind == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del spoiled[at:]
        elif kind == 2:
            spoiled[at : at + 8] = chance.choice(LARGE).to_bytes(8, "little")
        elif kind == 3:
            spoiled[at : at + 4] = chance.choice(LARGE[:5]).to_bytes(4, "little")
        elif kind == 4:
            spoiled[at:at] = chance.randbytes(chance.choice([1, 8, 64]))
        else:
            del spoiled[at : at + chance.choice([1, 4, 8, 100])]
    return bytes(spoiled)


# ── how structures are spoiled ───────────────────────────────────────────────────────────────────


def spoil_json(chance: random.Random, value: Any) -> Any:
    """Replace, drop, add or repeat something, somewhere in a value of JSON."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice([*value])
        spoiled = dict(value)
        kind = chance.randrange(8)
        if kind == 0:
            del spoiled[key]
        elif kind == 1:
            spoiled[chance.choice(["x", "", key * 2])] = spoiled.pop(key)
        else:
            spoiled[key] = spoil_json(chance, value[key])
        return spoiled
    if isinstance(value, list) and value and chance.random() < 0.8:
        at, listed = chance.randrange(len(value)), list(value)
        kind = chance.randrange(4)
        if kind == 0:
            return listed[:at]
        if kind == 1:
            return listed + listed[at:]
        return [*listed[:at], spoil_json(chance, listed[at]), *listed[at + 1 :]]
    if isinstance(value, int) and chance.random() < 0.5:
        return chance.choice([value + 1, value - 1, value * 2, -value, *LARGE])
    return chance.choice(STRANGE)


def deep_or_huge(chance: random.Random) -> bytes:
    """JSON that costs more than it says."""
    depth = chance.choice([50, 1_000, 50_000, 400_000])
    opening = chance.choice([b"[", b'{"a":'])
    return chance.choice(
        [
            opening * depth,
            b"[" * depth + b"]" * depth,
            b'{"x":' + b"9" * depth + b"}",
            b'{"x":[' + b"[]," * depth + b"0]}",
            b'{"x":"' + b"\\ud83d" * depth + b'"}',
            b"{" + b'"a":1,' * depth + b'"a":1}',
            b'{"x":1e' + b"9" * depth + b"}",
        ]
    )


def spoil_values(chance: random.Random, file: GGUF) -> None:
    """Let the metadata of a GGUF file lie."""
    at = chance.randrange(len(file.values))
    key, value_kind, value = file.values[at]
    kind = chance.randrange(6)
    if kind == 0:
        file.values[at] = (key, U64, chance.choice(LARGE))
    elif kind == 1:
        items = [chance.choice(LARGE[:5])] * chance.choice([0, 1, 3])
        file.values[at] = (key, ARRAY, (U32, items))
    elif kind == 2:
        file.values[at] = (key, STRING, chance.choice(TEXTS))
    elif kind == 3:
        del file.values[at]
    elif kind == 4:
        file.values.append((key, value_kind, value))
    else:
        file.num_values = chance.choice(LARGE)


def spoil_table(chance: random.Random, file: GGUF) -> None:
    """Let the table of tensors of a GGUF file lie."""
    at = chance.randrange(len(file.tensors))
    name, dimensions, tensor_kind, offset = file.tensors[at]
    kind = chance.randrange(5)
    if kind == 0:
        dimensions = [chance.choice([*LARGE, *dimensions]) for _ in range(chance.randrange(6))]
        file.tensors[at] = (name, dimensions, tensor_kind, offset)
    elif kind == 1:
        offsets = [offset + 1, *LARGE, *(other[3] for other in file.tensors)]
        file.tensors[at] = (name, dimensions, tensor_kind, chance.choice(offsets))
    elif kind == 2:
        file.tensors[at] = (name, dimensions, chance.randrange(50), offset)
    elif kind == 3:
        other = chance.choice([file.tensors[0][0], *TEXTS])
        file.tensors.append((other, dimensions, tensor_kind, offset))
    else:
        file.num_tensors = chance.choice(LARGE)


def spoiled_gguf(chance: random.Random) -> bytes:
    """A GGUF file with a lie or two."""
    file = make_gguf()
    if chance.random() < 0.1:
        file.version = chance.choice(LARGE[:5])
    for _ in range(chance.choice([1, 1, 2])):
        chance.choice([spoil_values, spoil_table])(chance, file)
    return file.to_bytes()


def spoil_header(chance: random.Random, folder: Folder) -> None:
    """Let the header of a safetensors file lie."""
    at = chance.randrange(1, len(folder.header))
    name, entry = folder.header[at]
    kind = chance.randrange(7)
    if kind == 0:
        folder.header.append((name, entry))
    elif kind == 1:
        folder.length = chance.choice([*LARGE, chance.randrange(4096)])
    elif kind == 2:
        shape = [chance.choice([*LARGE, 3]) for _ in range(chance.randrange(12))]
        folder.header[at] = (name, {**entry, "shape": shape})
    elif kind == 3:
        offsets = [chance.choice([*LARGE, *entry["data_offsets"], -1]) for _ in range(2)]
        folder.header[at] = (name, {**entry, "data_offsets": offsets})
    elif kind == 4:
        # Two tensors of the same bytes.
        other = folder.header[chance.randrange(1, len(folder.header))][1]
        folder.header[at] = (name, {**entry, "data_offsets": other["data_offsets"]})
    elif kind == 5:
        folder.header[at] = (name, spoil_json(chance, entry))
    else:
        folder.header[at] = (chance.choice(["", "__metadata__", "lm_head.weight", "é" * 99]), entry)


def spoiled_folder(chance: random.Random) -> dict[str, bytes]:
    """The files of a folder, one of them spoiled."""
    folder = make_folder(chance.choice(["llama", "qwen2"]))
    if chance.random() < 0.1:
        folder.index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    kind = chance.randrange(9)
    if kind <= 2:
        spoil_header(chance, folder)
    elif kind == 3:
        folder.config = spoil_json(chance, folder.config)
    elif kind == 4:
        folder.tokenizer = spoil_json(chance, folder.tokenizer)
    elif kind == 5:
        folder.settings = spoil_json(chance, folder.settings)
        if folder.index:
            folder.index = spoil_json(chance, folder.index)
    files = folder.to_files()
    if kind == 6:
        files["model.safetensors"] = spoil_bytes(chance, files["model.safetensors"])
    elif kind == 7:
        name = chance.choice([name for name in NAMES if name in files])
        files[name] = spoil_bytes(chance, files[name])
    elif kind == 8:
        content, name = deep_or_huge(chance), chance.choice([*NAMES, "model.safetensors"])
        is_header = name == "model.safetensors"
        files[name] = len(content).to_bytes(8, "little") * is_header + content
    return files


# ── the cases ────────────────────────────────────────────────────────────────────────────────────


def run_case(seed: int, number: int, folder: Path) -> bool:
    """Load one spoiled checkpoint; whether it was refused. What else it raises is a failure."""
    chance = random.Random(f"{seed} {number}")  # noqa: S311 -- cases are to be repeatable
    source, cache = folder / "source", folder / "cache"
    source.mkdir(exist_ok=True)
    if chance.random() < 0.5:
        is_cut = chance.random() < 0.4
        content = spoil_bytes(chance, make_gguf().to_bytes()) if is_cut else spoiled_gguf(chance)
        write(source, {"a.gguf": content})
        path = source / "a.gguf"
    else:
        write(source, spoiled_folder(chance))
        path = source
    try:
        checkpoint = load_checkpoint(path, cache_dir=cache)
    except CheckpointError as error:
        if "\n" in str(error) or len(str(error)) > 1500:
            raise ValueError(f"a sentence must be short: {error!s:.200}") from error
        return True
    else:
        # Each byte that was promised can be read.
        assert all(float(tensor.sum()) is not None for tensor in checkpoint.tensors.values())
        return False
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _child(seed: int, first: int, count: int) -> int:
    """Run cases within bounds, telling each before it begins."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {SECONDS} seconds of processor time")

    signal.signal(signal.SIGVTALRM, stop)
    with tempfile.TemporaryDirectory() as folder:
        run_case(seed, first, Path(folder))  # what is loaded at first is not of a case
        size = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        for number in range(first, first + count):
            print(number, flush=True)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                if not run_case(seed, number, Path(folder)):
                    print("loaded", flush=True)
            except BaseException as error:  # noqa: BLE001 -- libraries may raise what is no Exception
                print(f"failed {type(error).__name__}: {error!s:.300}", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    print("done", flush=True)
    return 0


def run(
    seed: int, first: int, count: int, tell: Callable[[int], None] = lambda _: None
) -> tuple[list[str], int]:
    """Run cases in child processes; the lines that repeat those that failed, and how many loaded.

    A child that ends by itself fails the case it was at, and the next one goes on behind it.
    """
    failed: list[str] = []
    num_loaded = 0
    number, last = first, first + count
    while number < last:
        arguments = ["--seed", str(seed), "--first", str(number), "--cases", str(last - number)]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz_checkpoints", "--child", *arguments],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            assert child.stdout is not None
            is_done = False
            for line in child.stdout:
                if line.startswith("failed"):
                    failed.append(_line(seed, number, line.strip()))
                elif line == "loaded\n":
                    num_loaded += 1
                elif line == "done\n":
                    is_done = True
                else:
                    number = int(line)
                    tell(number - first)
        if child.returncode or not is_done:
            failed.append(_line(seed, number, f"the process ended with {child.returncode}"))
        number += 1
        if is_done:
            break
    return failed, num_loaded


def _line(seed: int, number: int, reason: str) -> str:
    return f"nox -s fuzz -- checkpoints --seed {seed} --first {number} --cases 1   # {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Spoil checkpoints and load them; 1 if one was not refused as it should be."""
    parser = argparse.ArgumentParser(description="Spoiled checkpoints must be refused.")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--cases", type=int, default=100_000, help="how many (%(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first (%(default)s)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _child(options.seed, options.first, options.cases)
    print(f"seed {options.seed}", flush=True)

    def tell(done: int) -> None:
        if done % 1000 == 0 and sys.stderr.isatty():
            print(f"\r{done:,} cases", end="", file=sys.stderr, flush=True)

    failed, num_loaded = run(options.seed, options.first, options.cases, tell)
    for line in failed:
        print(line)
    num_refused = options.cases - num_loaded - len(failed)
    print(
        f"{options.cases:,} cases: {num_refused:,} refused, {num_loaded:,} loaded, "
        f"{len(failed)} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
