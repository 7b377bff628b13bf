"""The kernels compiled for GPUs by NVRTC, which needs none: registers, spills, instructions.

budget.json holds what each tuned kernel may take: what it takes with NVRTC 13.0 and about 5 % more.
"""

import json
import re
from pathlib import Path

import pytest

from kvkernels.cuda.kernels import TUNED, Kernel, copy_tokens

from . import nvrtc

ARCHITECTURES = (
    *("sm_80", "sm_90", "sm_100"),
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_86", "sm_89", "sm_120")),
)
BUDGET = json.loads((Path(__file__).parent / "budget.json").read_text("utf-8"))
# What the machine code of a kernel must have: tensor cores, and loads of whole 16-byte pieces, past the
# first-level cache where nothing is read twice.
INSTRUCTIONS = {
    "attend_split": (r"HMMA\.", r"LDG\.E\.NA.*\.128"),
    "attend_prefill": (r"HMMA\.", r"LDSM\.", r"LDGSTS\.E\.BYPASS.*\.128"),
    "copy_tokens": (r"LDG\.E.*\.128", r"STG\.E.*\.128"),
    "write_tokens": (r"LDG\.E.*\.64",),
}
# Dynamic and static shared memory of a thread block, on the smallest of these GPUs (sm_86, sm_89).
MAX_SHARED_BYTES = 99 * 1024

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="needs the wheel nvidia-cuda-nvrtc (Linux and Windows only)"
)


def test_at_most_20_kernels_are_tuned() -> None:
    assert len({kernel.expression for kernel in TUNED}) == len(TUNED) <= 20


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.expression)
def test_a_tuned_kernel_spills_nothing_and_keeps_its_budget(kernel: Kernel, arch: str) -> None:
    cubin, usage = nvrtc.compile_kernel(kernel, arch)
    assert cubin[:4] == b"\x7fELF"
    assert (usage.spilled_bytes, usage.stack_bytes) == (0, 0)
    assert usage.registers <= BUDGET[kernel.expression]["registers"]
    shared = usage.static_shared_bytes + kernel.shared_bytes
    assert shared <= BUDGET[kernel.expression]["shared_bytes"] <= MAX_SHARED_BYTES


@pytest.mark.skipif(nvrtc.disassembler() is None, reason="needs the wheel nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.expression)
def test_a_tuned_kernel_is_made_of_the_instructions_it_was_written_for(
    kernel: Kernel, arch: str
) -> None:
    found = nvrtc.instructions(nvrtc.compile_kernel(kernel, arch)[0])
    for wanted in INSTRUCTIONS.get(kernel.expression.partition("<")[0], ()):
        assert any(re.match(wanted, name) for name in found), wanted
    assert not [name for name in found if re.match(r"(LDL|STL)\b", name)], "local memory"


@pytest.mark.skipif(nvrtc.disassembler() is None, reason="needs the wheel nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_copy_has_four_loads_under_way_before_it_stores(arch: str) -> None:
    found = nvrtc.listing(nvrtc.compile_kernel(copy_tokens(16), arch)[0])
    moves = [name[:3] for name in found if re.match(r"(LDG|STG)\.E.*\.128", name)]
    assert moves == ["LDG"] * 4 + ["STG"] * 4


def test_every_budget_is_that_of_a_tuned_kernel() -> None:
    assert BUDGET.keys() == {kernel.expression for kernel in TUNED}
