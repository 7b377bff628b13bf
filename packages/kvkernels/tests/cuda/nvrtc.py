"""NVRTC by ctypes, without a GPU, a driver or CuPy: compile the kernels and read what they take.

The library is that of the wheel nvidia-cuda-nvrtc, or of LD_LIBRARY_PATH; the disassembler that of
the wheel nvidia-cuda-nvdisasm.
"""

import ctypes
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from kvkernels.cuda import source
from kvkernels.cuda.kernels import Kernel


@dataclass(frozen=True, slots=True)
class Usage:
    """What ptxas reports of one kernel."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@cache
def library() -> ctypes.CDLL | None:
    """Load NVRTC, or return None where there is none."""
    for folder in sys.path:
        for found in sorted(Path(folder).glob("nvidia/cu*/lib/libnvrtc.so.*")):
            # NVRTC looks for its builtins by name, which finds what is loaded already.
            for builtins in found.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(found))
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError:
        return None


def _text_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


@cache
def compile_kernel(kernel: Kernel, arch: str) -> tuple[bytes, Usage]:
    """Compile one kernel as CuPy does; returns the cubin and what it takes.

    Raises AssertionError with the compiler's log.
    """
    return compile_text(source.module_text(("device.cuh", *kernel.files)), kernel.expression, arch)


def compile_text(text: str, expression: str, arch: str) -> tuple[bytes, Usage]:
    """Compile one kernel of a text, likewise."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    unit = (text.encode(), b"k.cu", 0, None, None)
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), *unit) == 0
    try:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
        options = ["-std=c++17", "-ftz=true", "--device-as-default-execution-space"]
        options += ["--ptxas-options=-v", f"-arch={arch}"]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        log = _text_of(nvrtc, program, "ProgramLog").decode()
        assert not failed, log
        lowered = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(lowered))
        assert lowered.value is not None
        return _text_of(nvrtc, program, "CUBIN"), _usage(log, lowered.value.decode())
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def disassembler() -> Path | None:
    """The path of nvdisasm, or None where there is none."""
    found = (path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/nvdisasm*"))
    return next(found, None)


def instructions(cubin: bytes) -> Counter[str]:
    """How often a kernel's machine code has each instruction, by its full name, as LDG.E.128."""
    return Counter(listing(cubin))


def listing(cubin: bytes) -> list[str]:
    """The instructions of a kernel's machine code in their order."""
    program = disassembler()
    assert program is not None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, check=True
        )
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", done.stdout)


def _usage(log: str, name: str) -> Usage:
    _, _, after = log.partition(f"Compiling entry function '{name}'")
    report = after.partition("Compiling entry")[0]
    stack, stores, loads = re.findall(r"(\d+) bytes (?:stack frame|spill)", report)[:3]
    registers = re.findall(r"Used (\d+) registers", report)[0]
    shared = re.findall(r"(\d+) bytes smem", report) or ["0"]
    return Usage(int(registers), int(stores) + int(loads), int(stack), int(shared[0]))
