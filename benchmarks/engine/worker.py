"""One engine in a process of its own: `python -m benchmarks.engine.worker ENGINE FOLDER`.

Reads a workload and a round a line, and answers with a line of JSON: the processor seconds of the
whole process and the tokens. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.engine import engines
from benchmarks.engine.workloads import WORKLOADS


def main() -> None:
    """Load the engine, then serve."""
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    torch.set_num_threads(1)
    answer = engines.ENGINES[name][0](folder)
    workloads = {workload.name: workload for workload in WORKLOADS}
    print(json.dumps({"version": engines.version(name)}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        requests = workloads[asked["workload"]].requests(asked["round"])
        start, wall = time.process_time(), time.perf_counter()
        tokens = answer(requests)
        figures = {
            "cpu_seconds": time.process_time() - start,
            "wall_seconds": time.perf_counter() - wall,
            "tokens": tokens,
        }
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
