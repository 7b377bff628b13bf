"""The CUDA C++ text of the kernels, as package data. It is compiled where it runs, by NVRTC."""

import re
from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent

# A type of params.cuh as NumPy has it; pointers are integers.
_ITEMS = {"int": "i4", "float": "f4", "i64": "i8", "u64": "u8"}
_POINTER = "u8"


@cache
def read(name: str) -> str:
    """Read one file of the sources."""
    return (FOLDER / name).read_text("utf-8")


@cache
def module_text(names: tuple[str, ...]) -> str:
    """Join files into the one text of a module.

    A cache of compiled modules that is keyed by their text is then keyed by all of it.
    """
    return "\n".join(read(name).replace("#pragma once", "") for name in names)


@cache
def struct(name: str) -> "np.dtype[np.void]":
    """Read a struct of params.cuh as the NumPy dtype with its layout.

    >>> struct("QueryTile").names
    ('sequence', 'first')
    """
    body = re.search(rf"struct {name} {{(.*?)}};", read("params.cuh"), re.DOTALL)
    if body is None:
        raise KeyError(name)
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for statement in re.sub(r"//.*", "", body[1]).split(";"):
        words = statement.replace("const ", "").split(maxsplit=1)
        if not words:
            continue
        kind, declared = words
        for field in declared.split(","):
            item = _POINTER if "*" in field else _ITEMS[kind]
            name, _, length = field.strip(" *]\n").partition("[")
            fields.append((name, item, (int(length),) if length else ()))
    return np.dtype(fields, align=True)
