"""Worlds of random requests on the whole engine with a simulated model, as many as asked for.

    nox -s simulate -- --seed 0 --worlds 500 --requests 300

In each world requests arrive as a clock goes that now and then jumps, are aborted in whatever state
they are, and are read by readers that may be slow. In some worlds two steps are open at a time, run
in order and complete late. Now and then a step fails: before anything has moved, after swaps, or
after it has written. Everything follows from one number, so a world that fails can be had again by
itself.

Knows what happens in a world and what must hold in it. Does not know how the engine keeps it.
"""

import argparse
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

import numpy as np

from kvruntime import BeamSearchParams, EngineConfig, SamplingParams
from kvruntime.model_runner import StepLogits
from kvruntime.request import Request
from kvruntime.steps import SchedulerOutput

from .simulated_model import FAILURES, VOCAB_SIZE, StepFailed, answers, simulated_engine

STATES = ("waiting", "prefilling", "decoding", "preempted", "swapped", "in flight")


class World:
    """One engine, its requests, and what becomes of them."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.seed = seed
        self.num_requests = num_requests
        self.chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
        self.config = self._config()
        self.depth = self.chance.choice((1, 2))  # steps that are open at a time
        self.engine, self.runner = simulated_engine(self.config)
        self.prefixes = [self._tokens(40) for _ in range(3)]
        self.coming = self._arrivals(num_requests)
        self.now = 0.0
        self.live: list[Request] = []
        self.finished: list[Request] = []
        self.open: deque[SchedulerOutput] = deque()  # steps that are scheduled and not complete
        self.ran: deque[StepLogits] = deque()  # what the first of them, which have run, scored
        self.read: dict[tuple[int, int], list[int]] = {}  # by the reader of each sample
        self.counters = Counter[str]()
        self.num_steps = 0
        self.num_blocks_asked = 0  # by all that came, at their full lengths

    def play(self) -> Counter[str]:
        """Let everything happen; the counters of the policies. A failure says how to repeat it."""
        try:
            while self.coming or self.engine.has_work or self.open:
                self._happen()
            self._verify_rest()
        except BaseException as error:
            again = f"--seed {self.seed} --worlds 1 --requests {self.num_requests}"
            error.add_note(f"again: nox -s simulate -- {again}")
            raise
        counters = Counter(self.counters)
        for name, value in asdict(self.engine.stats()).items():
            counters[name] = value
        counters["moved blocks"] = self.runner.num_moved_blocks
        return counters

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def _happen(self) -> None:
        """Arrivals, an abort, a reader, and something of a step."""
        chance = self.chance
        if chance.random() < 0.002:
            self.now += chance.choice((-30, 300))
            self.counters["clock jumps"] += 1
        if self.coming and not self.engine.has_work:
            self.now = max(self.now, self.coming[-1][0])
        while self.coming and self.coming[-1][0] <= self.now:
            _, request = self.coming.pop()
            self.engine.add(request)
            self.live.append(request)
            self.num_blocks_asked += self._num_blocks(request)
        if self.live and chance.random() < 0.01:
            self._abort_in(chance.choice(STATES))
        if self.live and chance.random() < 0.1:
            self._read(chance.choice(self.live))
        try:
            finished = self._advance()
        except StepFailed:
            self._lose()
            return
        for request in finished:
            self.live.remove(request)
            self.finished.append(request)
            self._verify(request)
        assert self.num_steps < self._bound(), "somebody does not end"

    def _advance(self) -> list[Request]:
        """Schedule a step, run one, or complete one; the requests that finished."""
        if self.depth == 1:
            if not self.engine.has_work:
                return []
            self._start()
            finished = self.engine.step()
            self._check()
            return finished
        may_schedule = len(self.open) < self.depth and self.engine.has_work
        if may_schedule and (not self.open or self.chance.random() < 0.6):
            output = self.engine.schedule()
            if output.scheduled:
                self._start()
                assert not self._overlap(output), "what an open step uses was handed out"
                self.open.append(output)
                self.counters["two steps open"] += len(self.open) == 2
                return []
            assert self.open, "nothing is scheduled though no step is open"
        if len(self.ran) < len(self.open) and (not self.ran or self.chance.random() < 0.5):
            self.ran.append(self.runner.execute(self.open[len(self.ran)]))
            return []
        if not self.ran:
            return []
        finished = self.engine.complete(self.open.popleft(), self.ran.popleft())
        self._check()
        return finished

    def _start(self) -> None:
        self.num_steps += 1
        self.now += 1
        self.runner.fails = None
        if self.chance.random() < 0.0005:
            self.runner.fails = self.chance.choice(FAILURES)

    def _overlap(self, output: SchedulerOutput) -> set[int]:
        """Blocks that a step writes though a step before it, which is open, reads them."""
        size = self.config.block_size
        written = {slot // size for slot in output.slot_mapping if slot >= 0}
        written |= {copy.destination for copy in output.copies}
        written |= {swap.destination for swap in output.swaps_in}
        read = {
            block
            for before in self.open
            for item, table in zip(before.scheduled, np.asarray(before.block_tables), strict=True)
            for block in table[: -(-item.stop // size)].tolist()
        }
        return written & read

    def _lose(self) -> None:
        """A step has failed: whoever ran is lost, and so are the steps that are open."""
        self.engine.fail()
        self.open.clear()
        self.ran.clear()
        self.counters["failed steps"] += 1
        for request in list(self.live):
            if any(
                sequence.is_dropped and not sequence.is_finished for sequence in request.sequences
            ):
                self.live.remove(request)
                self.counters["lost"] += 1
        self._check()

    def _abort_in(self, state: str) -> None:
        if there := [request for request in self.live if self._state(request) == state]:
            request = self.chance.choice(there)
            self.engine.abort(request)
            self.live.remove(request)
            self.counters[f"aborted {state}"] += 1
            manager = self.engine.manager
            assert all(sequence.seq_id not in manager for sequence in request.sequences)

    def _state(self, request: Request) -> str:
        first = request.sequences[0]
        if any(item.sequence.request is request for step in self.open for item in step.scheduled):
            return "in flight"
        if any(sequence.is_swapped for sequence in request.sequences):
            return "swapped"
        if not first.has_run:
            return "waiting"
        if any(sequence in self.engine.scheduler.waiting for sequence in request.sequences):
            return "preempted"
        is_prefilling = first.num_computed_tokens < len(request.prompt_token_ids)
        return "prefilling" if is_prefilling else "decoding"

    def _read(self, request: Request) -> None:
        """Take what a request's samples have so far: nothing that was read changes or comes again."""
        if request.beam_search is not None:
            return
        for sequence in request.sequences:
            before = self.read.get(sequence.seq_id, [])
            now = sequence.output_token_ids
            assert now[: len(before)] == before, "what was read has changed"
            self.read[sequence.seq_id] = now

    def _check(self) -> None:
        if self.num_steps % 8 == 0:
            self.engine.manager.check()

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    def _verify(self, request: Request) -> None:
        self._read(request)
        expected = answers(request, self.engine.max_model_len)
        got = [sequence.output_token_ids for sequence in request.answers()]
        assert got == expected, f"request {request.request_id} has other tokens than alone"
        bound = 2 * self.num_blocks_asked * request.params.num_sequences
        assert request.num_preemptions <= bound

    def _verify_rest(self) -> None:
        self.engine.manager.check()
        pool = self.engine.manager.stats()
        assert pool.num_free_blocks + pool.num_cached_blocks == pool.num_blocks
        assert pool.num_sequences == pool.num_swapped_sequences == 0
        assert pool.num_free_host_blocks == pool.num_host_blocks
        assert not self.live
        gone = sum(self.counters[f"aborted {state}"] for state in STATES) + self.counters["lost"]
        assert len(self.finished) + gone == self.num_requests

    def _bound(self) -> int:
        """Steps that all requests so far would need one after the other, many times over."""
        return 1000 + 50 * self.num_blocks_asked * (self.config.block_size + self.num_requests)

    def _num_blocks(self, request: Request) -> int:
        num_tokens = len(request.prompt_token_ids) + request.params.max_tokens
        return request.params.num_sequences * -(-num_tokens // self.config.block_size)

    # ── what there is ────────────────────────────────────────────────────────────────────────

    def _config(self) -> EngineConfig:
        chance = self.chance
        block_size = chance.choice((1, 2, 4, 8))
        settings: dict[str, Any] = {
            "block_size": block_size,
            # From what holds the longest prompt and one token, to what holds several.
            "num_blocks": -(-49 // block_size) + chance.choice((0, 1, 4, 20, 60)),
            "max_num_batched_tokens": chance.choice((1, 3, 16, 64)),
            "max_num_seqs": chance.choice((4, 5, 16)),
            "prefix_caching": chance.random() < 0.7,
            "policy": chance.choice(("fcfs", "priority")),
            "skip_ahead": chance.choice((0, 0, 1, 5)),
            "admission": chance.choice(("prompt", "prompt", "output")),
            "eviction": chance.choice(("before", "before", "after")),
            "preemption": chance.choice(("recompute", "swap", "auto")),
            "num_host_blocks": chance.choice((None, 2, 20)),
        }
        return EngineConfig(**settings)

    def _arrivals(self, num_requests: int) -> list[tuple[float, Request]]:
        """Requests and when they come, the last first: one by one, or in bursts."""
        gap = self.chance.choice((0.5, 2, 10))
        time, arrivals = 0.0, []
        for number in range(num_requests):
            if self.chance.random() < 0.5:
                time += self.chance.expovariate(1 / (2 * gap))
            arrivals.append((time, self._request(number)))
        return arrivals[::-1]

    def _request(self, number: int) -> Request:
        chance = self.chance
        prefix = chance.choice(self.prefixes)[: chance.choice((0, 8, 30, 40))]
        prompt = prefix + self._tokens(chance.randint(1, 8))
        common: dict[str, Any] = {
            "max_tokens": chance.randint(1, 24),
            "ignore_eos": chance.random() < 0.5,
        }
        params: SamplingParams | BeamSearchParams
        if chance.random() < 0.15:
            params = BeamSearchParams(num_beams=chance.randint(1, 4), **common)
        else:
            params = SamplingParams(
                n=chance.choice((1, 1, 1, 2, 4)),
                temperature=chance.choice((0, 0.9)),
                prompt_logprobs=chance.choice((None, None, None, 0)),
                **common,
            )
        return Request(
            number,
            "",
            prompt,
            params,
            seed=number,
            priority=chance.randint(0, 2),
            cache_salt=chance.choice((None, None, "salt")),
        )

    def _tokens(self, length: int) -> list[int]:
        return [self.chance.randrange(3, VOCAB_SIZE) for _ in range(length)]


def main(arguments: SequenceOf[str] | None = None) -> int:
    """Play worlds; print how to repeat each that fails, and what the policies did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first world's number")
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--requests", type=int, default=300, help="in each world")
    options = parser.parse_args(arguments)
    print(f"seeds {options.seed} to {options.seed + options.worlds - 1}", flush=True)
    total, num_failed = Counter[str](), 0
    for seed in range(options.seed, options.seed + options.worlds):
        try:
            total += World(seed, options.requests).play()
        except Exception:  # noqa: BLE001 -- whatever a world fails with is what is looked for
            num_failed += 1
            print(traceback.format_exc(), flush=True)
    print(f"{options.worlds} worlds, {num_failed} failed")
    for name in sorted(total):
        print(f"{name:28} {total[name]:>12,}")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
