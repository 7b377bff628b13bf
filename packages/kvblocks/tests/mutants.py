"""Planted faults: one small change to the source at a time, and whether a test notices.

    nox -s mutants -- kvblocks --seed 1 --number 100

A comparison is turned round, a constant is one more, a plus is a minus, a condition is its contrary, or
a statement is gone. What is changed is drawn at random from the modules named here. A mutant that no
test notices is shown with its line: a rule without a test, or a change that changes nothing.

Knows Python's syntax. Does not know what the source is for.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import kvblocks

SOURCE = Path(kvblocks.__file__).parent
PACKAGE = Path(__file__).parents[1]
MODULES = (
    "append",
    "decode",
    "events",
    "hashing",
    "ledger",
    "manager",
    "pins",
    "pool",
    "prompts",
    "queries",
    "reservations",
    "runs",
    "sequence",
    "swap",
    "tree",
    "windows",
)
# The quick ones first: most mutants fall at once. The command line and the planners are left out.
LEFT_OUT = ("cli", "plan", "simulate", "traces", "sizing", "report", "model_config", "waste", "api")
SECONDS = 600  # a mutant that never ends is noticed as well
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


class Mutant(NamedTuple):
    """One change to a module: of the node that `ast.walk` comes to as the `number`th."""

    module: str
    number: int
    line: int


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of a module, without its source: see `planted`."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(child) for each in functions for part in each.body for child in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in inside and mutate(copy.deepcopy(node)):
            yield Mutant(module, number, getattr(node, "lineno", 0))


def planted(mutant: Mutant) -> tuple[str, str]:
    """The source of a mutant's module with its change, and the change in words."""
    tree = ast.parse((SOURCE / f"{mutant.module}.py").read_text("utf-8"))
    node = next(islice(ast.walk(tree), mutant.number, None))
    before = ast.unparse(node).splitlines()[0]
    mutate(node)
    return ast.unparse(tree), f"{before}  ->  {ast.unparse(node).splitlines()[0]}"


def mutate(node: ast.AST) -> bool:
    """Change a node in place, if there is a way to."""
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    else:
        return False
    return True


def is_noticed(mutant: Mutant) -> bool:
    """Whether the tests fail with a mutant in the place of its module."""
    source, _ = planted(mutant)
    return fails(mutant.module, source)


def fails(module: str, source: str) -> bool:
    """Whether the tests fail with this source in the place of a module."""
    with TemporaryDirectory() as folder:
        copied = Path(folder) / "kvblocks"
        shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__"))
        (copied / f"{module}.py").write_text(source, "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", *tests()]
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(
                command,
                cwd=PACKAGE,
                env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def tests() -> list[str]:
    """The tests that mutants are held against, small files first."""
    files = sorted((PACKAGE / "tests").glob("test_*.py"), key=lambda file: file.stat().st_size)
    return [str(file) for file in files if not any(word in file.name for word in LEFT_OUT)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults one by one; 1 if the source as it stands fails its tests."""
    parser = argparse.ArgumentParser(description="Planted faults against the tests.")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--number", type=int, default=100, help="of mutants (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="%(default)s")
    options = parser.parse_args(arguments)
    if fails("pool", (SOURCE / "pool.py").read_text("utf-8")):
        print("the tests fail without a mutant")
        return 1
    every = [mutant for module in MODULES for mutant in mutants_of(module)]
    rng = random.Random(options.seed)  # noqa: S311 -- replayable, not secret
    drawn = rng.sample(every, min(options.number, len(every)))
    print(f"seed {options.seed}: {len(drawn)} of {len(every):,} mutants", flush=True)
    num_noticed = 0
    with ThreadPoolExecutor(options.processes) as workers:
        for mutant, noticed in zip(drawn, workers.map(is_noticed, drawn), strict=True):
            num_noticed += noticed
            if not noticed:
                _, change = planted(mutant)
                print(f"not noticed: {mutant.module}.py:{mutant.line}: {change}", flush=True)
    print(f"{num_noticed} of {len(drawn)} noticed, {100 * num_noticed / len(drawn):.0f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
