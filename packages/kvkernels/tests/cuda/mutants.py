"""Bugs planted into the kernels, each with the test that must catch it.

    python -m tests.cuda.mutants [--only WORD]

Each bug is one replacement in one file. Its test must pass without it, and must fail with it, by a wrong
result, by misuse that the fiber GPU reports, or by a crash; it is no catch if the bug does not compile.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvkernels.cuda import source

FOLDER = Path(__file__).parent
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """A planted bug and the test that catches it."""

    name: str
    file: str
    old: str
    new: str
    test: str


DECODE = "test_attention.py::test_decode_is_that_of_float64"
SPLITS = "test_attention.py::test_splits_are_merged_to_that_of_float64"
MIXED = "test_attention.py::test_a_mixed_batch_is_that_of_float64"
ORDER = "test_attention.py::test_the_order_of_threads_changes_no_bit"
CHUNK = "test_prefill.py::test_a_chunk_at_the_end_of_a_long_context_is_that_of_float64"
WINDOW = "test_prefill.py::test_a_window_that_begins_inside_any_tile_is_that_of_float64"
FAR = "test_scenarios.py::test_offsets_beyond_2_to_32_items_are_read_as_in_a_small_pool"
SINKS = "test_scenarios.py::test_a_sink_is_counted_once_whatever_the_number_of_splits"
WRITE = "test_cache.py::test_tokens_are_rounded_into_their_slots_and_minus_1_writes_nothing"
ROTATED = "test_cache.py::test_keys_are_rotated_as_halves_and_values_are_not"
COPIED = "test_cache.py::test_the_first_tokens_of_blocks_are_copied_in_all_caches_by_one_launch"
MERGED = "test_cache.py::test_results_are_merged_to_that_of_float64"

MUTANTS = (
    Mutant(
        "tokens past the end are read",
        "split.cuh",
        "return max_of(begin, min_of(tile * TILE + n, end - 1)) - tile * TILE;",
        "return n;",
        f"{DECODE}[bfloat16]",
    ),
    Mutant(
        "tokens past the end are not masked",
        "split.cuh",
        "score = key >= visible.begin && key < visible.end ? score : -INFINITE;",
        "",
        f"{DECODE}[bfloat16]",
    ),
    Mutant(
        "no barrier before the warps' results are read",
        "split.cuh",
        "meeting.bring(warp);\n    sync_block();",
        "meeting.bring(warp);",
        f"{DECODE}[bfloat16]",
    ),
    Mutant(
        "a barrier that one warp skips",
        "split.cuh",
        "meeting.bring(warp);\n    sync_block();",
        "meeting.bring(warp);\n    if (warp_id() != 3) sync_block();",
        f"{DECODE}[bfloat16]",
    ),
    Mutant(
        "a shuffle that one lane skips",
        "split.cuh",
        "max = max_of(max, shuffle_xor(max, 16));",
        "if (lane_id() < 31) max = max_of(max, shuffle_xor(max, 16));",
        f"{DECODE}[bfloat16]",
    ),
    Mutant(
        "heads of a group in another order",
        "split.cuh",
        "(kv_head * p.group + in_group) * p.q_head;",
        "(in_group * p.num_kv_heads + kv_head) * p.q_head;",
        f"{DECODE}[group-of-5]",
    ),
    Mutant(
        "32-bit offsets of blocks",
        "split.cuh",
        "return block * block_stride + (offset + n) * token_stride;",
        "return int(block * block_stride) + (offset + n) * token_stride;",
        f"{FAR}[split]",
    ),
    Mutant(
        "a sink in every split",
        "split.cuh",
        "p.partial_out[target * D + d] = value;",
        "p.partial_out[target * D + d] = value * beside_sink(lse, p.sinks, head);",
        f"{SINKS}[bfloat16-3]",
    ),
    Mutant(
        "the scale of values not applied",
        "split.cuh",
        "meeting.value(column, d, total) * p.v_scale,",
        "meeting.value(column, d, total),",
        f"{DECODE}[e4m3]",
    ),
    Mutant(
        "a maximum of no keys rescales to NaN",
        "attention.cuh",
        "return before == -INFINITE ? 0.f : exp2_fast(before - after);",
        "return exp2_fast(before - after);",
        f"{MIXED}[bfloat16]",
    ),
    Mutant(
        "weights relative to no maximum",
        "attention.cuh",
        "return max == -INFINITE ? 0.f : max;",
        "return max;",
        f"{MIXED}[bfloat16]",
    ),
    Mutant(
        "a row does not see its own key",
        "attention.cuh",
        "min_of(position + 1, rows.length)",
        "min_of(position, rows.length)",
        f"{MIXED}[bfloat16]",
    ),
    Mutant(
        "a window of one key less",
        "attention.cuh",
        "max_of(position - p.window_left, 0)",
        "max_of(position - p.window_left + 1, 0)",
        f"{DECODE}[window]",
    ),
    Mutant(
        "an ALiBi distance off by one",
        "attention.cuh",
        "score += slope * float(distance);",
        "score += slope * float(distance + 1);",
        f"{DECODE}[alibi]",
    ),
    Mutant(
        "the last split ends with its chunk",
        "plan.cuh",
        "int end = n + 1 == cut.count ? cut.end : first + chunk;",
        "int end = first + chunk;",
        f"{SPLITS}[bfloat16]",
    ),
    Mutant(
        "no barrier at the end of a prefix sum",
        "plan.cuh",
        "int before = sums[here][thread] - value;\n  sync_block();",
        "int before = sums[here][thread] - value;",
        ORDER,
    ),
    Mutant(
        "keys used before their copies have come",
        "prefill.cuh",
        "wait_copies<1>();\n      sync_block();\n      float scores",
        "wait_copies<2>();\n      sync_block();\n      float scores",
        f"{CHUNK}[bfloat16]",
    ),
    Mutant(
        "keys overwritten while a warp reads them",
        "prefill.cuh",
        "warp.multiply_keys(scores, keys);\n      sync_block();",
        "warp.multiply_keys(scores, keys);",
        f"{CHUNK}[bfloat16]",
    ),
    Mutant(
        "the table read past the end",
        "prefill.cuh",
        "bool valid = key >= keys.begin && key < keys.end;",
        "bool valid = key >= keys.begin;",
        f"{CHUNK}[bfloat16]",
    ),
    Mutant(
        "a tile that begins before a row's window is taken for whole",
        "prefill.cuh",
        "begin >= of_last.begin && end <= of_first.end",
        "end <= of_first.end",
        f"{WINDOW}[100]",
    ),
    Mutant(
        "scales of values in the sum of weights",
        "prefill.cuh",
        "sum += weight;\n",
        "sum += FEATURES & TOKEN_SCALES ? weight * tokens.v_scale[side][n * 8 + t2 + j] : weight;\n",
        f"{CHUNK}[int8-token-scales]",
    ),
    Mutant(
        "32-bit offsets of blocks in the generic kernel",
        "generic.cuh",
        "static_cast<const KV *>(p.k_cache) + block * p.k_block",
        "static_cast<const KV *>(p.k_cache) + int(block * p.k_block)",
        f"{FAR}[generic]",
    ),
    Mutant(
        "a token without a slot is written",
        "cache.cuh",
        "if (slot < 0) continue;",
        "if (slot < 0) slot = 0;",
        f"{WRITE}[bfloat16-bfloat16-64-HND]",
    ),
    Mutant(
        "both halves rotated one way",
        "cache.cuh",
        "(d < half ? -other : other) * sine",
        "other * sine",
        f"{ROTATED}[32]",
    ),
    Mutant(
        "a token too many is copied",
        "cache.cuh",
        "int num_tokens = copy[2];",
        "int num_tokens = copy[2] + (copy[2] < 4);",
        f"{COPIED}[bfloat16-64-HND]",
    ),
    Mutant(
        "results without keys are merged",
        "cache.cuh",
        "if (factor > 0.f) value += factor * to_float",
        "value += factor * to_float",
        f"{MERGED}[False-float32]",
    ),
)


def run_test(test: str, sources: Path) -> tuple[int, str]:
    """Run one test with the kernels of a folder; returns the exit status and the output."""
    environment = os.environ | {"KVKERNELS_CUDA_SOURCES": str(sources)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(  # our own command
        [*command, str(FOLDER / test)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def verdict_of(mutant: Mutant, folder: Path) -> str:
    """Plant a bug in a copy of the sources and run its test; returns what came of it."""
    shutil.copytree(source.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = source.read(mutant.file)
    if text.count(mutant.old) != 1:
        return f"BROKEN: the text to replace is there {text.count(mutant.old)} times"
    (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new), "utf-8")
    status, output = run_test(mutant.test, folder)
    if "BuildError" in output or status not in {_PASSED, _FAILED, -11, -6, 139, 134}:
        return "BROKEN: " + output[-300:]
    return "SURVIVED" if status == _PASSED else "caught"


def main() -> int:
    """Plant every bug; returns 1 if one survives or a test fails without one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a word of the bugs to plant")
    only = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    missed = 0
    for test in sorted({mutant.test for mutant in chosen}):
        status, output = run_test(test, source.FOLDER)
        if status != _PASSED:
            print(f"{test} fails without a bug:\n{output[-2000:]}")
            missed += 1
    for mutant in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as work:
            verdict = verdict_of(mutant, Path(work) / "source")
        missed += verdict != "caught"
        seconds = time.perf_counter() - start
        print(f"{verdict:9} {seconds:5.1f} s  {mutant.name}  ({mutant.test})", flush=True)
    print(f"{len(chosen)} bugs planted, {missed} not caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
