"""Compiling kernels, and keeping their machine code on disk. It knows no kernel.

Numba's own cache on disk notices a change of the file that defines a function, and not of the files
of the functions it calls; and two processes that compile at once may give two variants one name.
Here each variant is a file of its own, named by a digest of everything that it depends on: kernels'
sources, signature, processor, and versions. Files appear whole or not at all.
"""

import hashlib
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

# Division by zero is infinity, as on every processor, and the GIL is given up.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_UNCOUNTED: dict[str, Any] = OPTIONS | {"_nrt": False}
SUFFIX = ".kernel"

# What compiles or loads the kernels that are the same for every call, by name.
PREPARE: dict[str, Callable[[], object]] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Modules beside this one of which nothing is compiled.
WITHOUT_KERNELS = {"calls.py", "steps.py", "threads.py", "values.py", "warm.py", "workspace.py"}


@cache
def _environment() -> str:
    """Everything that all variants depend on: our sources, and who compiles them."""
    digest = hashlib.sha256()
    for version in (sys.version, np.__version__, numba.__version__, llvmlite.__version__):
        digest.update(version.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in WITHOUT_KERNELS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelFiles:
    """A folder of machine code, one file a variant: what `FunctionCache` asks of its cache file."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name

    def path(self, key: object) -> Path:
        digest = hashlib.sha256(f"{_environment()} {key!r}".encode()).hexdigest()
        return self._folder / f"{self._name}-{_environment()[:8]}-{digest[:32]}{SUFFIX}"

    def load(self, key: object) -> Any:
        try:
            return pickle.loads(self.path(key).read_bytes())  # noqa: S301  # our own, as Numba's
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, key: object, data: Any) -> None:
        path = self.path(key)
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(dumps(data))  # type: ignore[no-untyped-call]  # Numba's
            Path(file.name).replace(path)
        except OSError as error:
            _warn(error)

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._name}-*{SUFFIX}"):
            path.unlink(missing_ok=True)


class _KernelCache(FunctionCache):
    """Numba's cache of a function's machine code, kept in `_KernelFiles`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]  # Numba's
        self._cache_file: Any = _KernelFiles(
            self.cache_path, f"kvkernels-{function.__name__.strip('_')}"
        )


def _warn(error: Exception) -> None:
    rule = "compiled kernels are not kept, so each process compiles its own"
    advice = "NUMBA_CACHE_DIR may name a folder for them"
    warnings.warn(f"{rule}: {error}; {advice}", RuntimeWarning, stacklevel=4)


def inlined(function: _Function) -> _Function:
    """Let kernels call a function, with which they are compiled. It cannot make arrays.

    It counts no references: counting those of all arrays of a tuple, at each call that is given the
    tuple, takes several times as long as the arithmetic of a tile.
    """
    jitted: _Function = njit(**_UNCOUNTED)(function)
    return jitted


def allocating(function: _Function) -> _Function:
    """Let kernels call a function that makes arrays."""
    jitted: _Function = njit(**OPTIONS)(function)
    return jitted


@cache
def kernel(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function compiled, or loaded, for arguments of these Numba types and no others."""
    dispatcher = njit(**OPTIONS)(function)
    try:
        dispatcher._cache = _KernelCache(function)  # noqa: SLF001  # Numba has no other way in
    except RuntimeError as error:  # no folder can be written to
        _warn(error)
    entry: Callable[..., Any] = dispatcher.compile(arguments)
    return entry


def compiled(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a kernel of a function, which its first call compiles or loads."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # Looked up once: to hash Numba's types takes longer than many kernels.
        @cache
        def entry() -> Callable[..., Any]:
            return kernel(function, arguments)

        @wraps(function)
        def call(*values: Any) -> Any:
            return entry()(*values)

        PREPARE[function.__name__.strip("_")] = entry
        return call

    return decorate


def cache_folder(function: Callable[..., Any]) -> Path | None:
    """Return where the machine code of a function would lie; None if no folder can be written to."""
    try:
        return Path(_KernelCache(function).cache_path)
    except RuntimeError:
        return None


def is_current(path: Path) -> bool:
    """Whether a file was compiled from these sources, by these versions."""
    return f"-{_environment()[:8]}-" in path.name
