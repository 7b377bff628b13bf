"""A GPU of fibers: the kernels' own text, compiled by g++ against host/device.h and run on the CPU.

It launches what kvkernels.cuda launches, with the same parameters, on NumPy arrays. Libraries are kept in
build/host-gpu, keyed by all that goes into them.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvkernels.cuda import source
from kvkernels.cuda.kernels import Kernel

Array = np.ndarray[Any, Any]
HOST = Path(__file__).parent / "host"
FLAGS = (
    *("-std=c++17", "-O1", "-mf16c", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-gnu-unique", "-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas"),
)

UNIT = """
#include "device.h"
{includes}
extern "C" __attribute__((visibility("default")))
int size_of_params() {{ return sizeof({params}); }}

extern "C" __attribute__((visibility("default")))
void launch(const void *params, unsigned grid, unsigned threads, size_t shared, uint64_t seed,
            unsigned workers, char *failure, size_t room) {{
  const {params} &p = *static_cast<const {params} *>(params);
  auto body = [&p] {{ {expression}(p); }};
  std::string what = host::launch(grid, threads, shared, seed, workers, body);
  snprintf(failure, room, "%s", what.c_str());
}}
"""


def _where_it_is(array: Array) -> tuple[int, Any]:
    return array.ctypes.data, array


Place = Callable[[Array], tuple[int, Any]]
_place: list[Place] = [_where_it_is]


def place_arrays(place: Place) -> Place:
    """Set what says where arrays lie on the device, and what keeps them there; returns what did before."""
    before, _place[0] = _place[0], place
    return before


def place_of(array: Array) -> tuple[int, Any]:
    """Where an array lies on the device, and what keeps it there: on fibers it is there itself."""
    return _place[0](array)


class MisuseError(Exception):
    """The kernel did what a GPU does not forgive; the message names the block and the thread."""


class BuildError(Exception):
    """The kernel is no C++ that g++ takes."""


def compiler() -> str | None:
    """The C++ compiler of this machine, or None."""
    return shutil.which("g++")


def build(kernel: Kernel, sources: Path = source.FOLDER, *flags: str) -> Path:
    """Compile a kernel into a library, unless it is there already."""
    includes = "\n".join(f'#include "{sources / name}"' for name in kernel.files)
    unit = UNIT.format(includes=includes, params=kernel.params, expression=kernel.expression)
    parts = [unit, *FLAGS, *flags]
    parts += [(sources / name).read_text("utf-8") for name in kernel.files]
    parts += [path.read_text("utf-8") for path in sorted(HOST.glob("*.h"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(__file__).parents[4] / "build" / "host-gpu"
    library = folder / f"{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        (Path(work) / "unit.cpp").write_text(unit, "utf-8")
        command = [str(compiler()), *FLAGS, *flags, f"-I{HOST}", "-o", "unit.so", "unit.cpp"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(done.stderr[:4000])
        # Another process may be at the same: a rename is all or nothing.
        (Path(work) / "unit.so").replace(library)
    return library


class HostGPU:
    """Launches kernels on fibers. `seed` shuffles the order of threads; 0 keeps it.

    The environment may name other sources (KVKERNELS_CUDA_SOURCES, with a planted bug) and further flags
    of the compiler (KVKERNELS_CUDA_FLAGS, sanitizers).
    """

    def __init__(self, *, seed: int = 1) -> None:
        self.seed = seed
        self.num_multiprocessors = 2
        self.launches: list[str] = []
        self._sources = Path(os.environ.get("KVKERNELS_CUDA_SOURCES", source.FOLDER))
        self._flags = os.environ.get("KVKERNELS_CUDA_FLAGS", "").split()
        self._libraries: dict[Kernel, ctypes.CDLL] = {}

    def reseeded(self, seed: int) -> "HostGPU":
        """Return one that has threads in another order."""
        return HostGPU(seed=seed)

    def launch(
        self, kernel: Kernel, grid: int, params: "np.ndarray[Any, Any]", stream: int
    ) -> None:
        """Run a kernel now; there are no streams here."""
        del stream
        if kernel not in self._libraries:
            library = ctypes.CDLL(
                str(build(kernel, self._sources, *self._flags)), mode=os.RTLD_LOCAL
            )
            library.launch.argtypes = [
                *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t),
                *(ctypes.c_uint64, ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t),
            ]
            library.launch.restype = None
            assert library.size_of_params() == params.itemsize
            self._libraries[kernel] = library
        self.launches.append(kernel.expression)
        failure = ctypes.create_string_buffer(512)
        arguments = (params.ctypes.data, grid, kernel.threads, kernel.shared_bytes)
        library = self._libraries[kernel]
        library.launch(*arguments, self.seed, os.cpu_count() or 1, failure, len(failure))
        if failure.value:
            raise MisuseError(f"{kernel.expression}: {failure.value.decode()}")
