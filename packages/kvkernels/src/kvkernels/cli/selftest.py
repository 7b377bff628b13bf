"""`kvkernels selftest`: every supported feature beside float64, on this machine."""

import argparse
import json
import sys
import time
from typing import Any

from kvkernels.capabilities import warmup
from kvkernels.cli.parser import Parser, Progress, Subparsers, render_table


def add_parser(commands: "Subparsers[Parser]") -> None:
    """Add `selftest`."""
    parser = commands.add_parser(
        "selftest",
        help="compare every supported feature with float64",
        description=(
            "Compute every supported feature on this machine's CPU and compare it with float64.\n"
            "Errors are norms relative to the result; a tolerance of 0 asks for equal bits. The\n"
            "first run also compiles. The exit code is 1 if anything is beyond its tolerance."
        ),
        epilog="Example:\n  kvkernels selftest --json",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the numbers (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, show, and return 1 if something is wrong."""
    from kvkernels import selftest  # noqa: PLC0415  # importing Numba is slow

    progress, start = Progress(), time.perf_counter()
    warmup(progress=progress)
    compiled = time.perf_counter()
    checked = selftest.features()
    outcomes = []
    for done, feature in enumerate(checked):
        progress(done, len(checked), feature.name)
        outcomes.append(feature.run(abs(options.seed)))
    progress(len(checked), len(checked), "")
    seconds = (compiled - start, time.perf_counter() - compiled)
    wrong = [outcome.feature for outcome in outcomes if not outcome.is_good]
    if options.json:
        print(json.dumps(_as_json(outcomes, seconds), indent=2))
    else:
        rows = [
            [
                outcome.feature,
                str(outcome.num_checks),
                f"{outcome.error:.1e}" if outcome.error else "0",
                f"{outcome.tolerance:.0e}" if outcome.tolerance else "0",
                "ok" if outcome.is_good else "WRONG",
            ]
            for outcome in outcomes
        ]
        print(render_table(["feature", "checks", "worst error", "tolerance", ""], rows))
        number = sum(outcome.num_checks for outcome in outcomes)
        print(f"\n{number} checks in {seconds[1]:.1f} s, after {seconds[0]:.1f} s of compiling.")
    if wrong:
        print(f"kvkernels: beyond tolerance: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def _as_json(outcomes: list[Any], seconds: tuple[float, float]) -> dict[str, Any]:
    return {
        "is_good": all(outcome.is_good for outcome in outcomes),
        "seconds_compiling": round(seconds[0], 3),
        "seconds_checking": round(seconds[1], 3),
        "features": [
            {
                "feature": outcome.feature,
                "num_checks": outcome.num_checks,
                # JSON has neither NaN nor infinity.
                "error": outcome.error if abs(outcome.error) < float("inf") else None,
                "tolerance": outcome.tolerance,
                "is_good": outcome.is_good,
            }
            for outcome in outcomes
        ],
    }
