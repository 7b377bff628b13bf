"""Worlds of random requests on the whole engine with a simulated model, as many as asked for.

    nox -s simulate -- --seed 0 --worlds 500 --requests 300

In each world requests arrive in bursts or one by one, are aborted in whatever state they are, and
now and then a step fails. Everything that happens follows from one number, so a world that fails
can be had again by itself; time is counted in steps.

Knows what happens in a world and what must hold in it. Does not know how the engine keeps it.
"""

import argparse
import random
import sys
import traceback
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

from kvruntime import BeamSearchParams, EngineConfig, SamplingParams
from kvruntime.request import Request

from .simulated_model import VOCAB_SIZE, StepFailed, answers, simulated_engine


class World:
    """One engine, its requests, and what becomes of them."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311 -- chosen to be repeatable
        self.config = self._config()
        self.rate = self.chance.choice((0.05, 0.3, 1.0))  # bursts a step
        self.engine, self.runner = simulated_engine(self.config)
        self.prefixes = [self._tokens(40) for _ in range(3)]
        self.coming = [self._request(number) for number in range(num_requests)]
        self.live: list[Request] = []
        self.finished: list[Request] = []
        self.num_aborted = 0
        self.num_steps = 0
        self.num_blocks_asked = 0  # by all that came, at their full lengths

    def play(self) -> Counter[str]:
        """Let everything happen; the counters of the policies. A failure says how to repeat it."""
        try:
            while self.coming or self.engine.has_work:
                self._happen()
            self._verify_rest()
        except BaseException as error:
            error.add_note(f"again: nox -s simulate -- --seed {self.seed} --worlds 1")
            raise
        counters = Counter[str]()
        for name, value in asdict(self.engine.stats()).items():
            counters[name] = value
        counters["aborted"] = self.num_aborted
        counters["moved_blocks"] = self.runner.num_moved_blocks
        return counters

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def _happen(self) -> None:
        """Arrivals, an abort, a step."""
        chance = self.chance
        if self.coming and (not self.engine.has_work or chance.random() < self.rate):
            for _ in range(min(len(self.coming), chance.choice((1, 1, 2, 8)))):
                request = self.coming.pop()
                self.engine.add(request)
                self.live.append(request)
                self.num_blocks_asked += self._num_blocks(request)
        if self.live and chance.random() < 0.005:
            self._abort(chance.choice(self.live))
        if self.engine.has_work:
            self._step()

    def _step(self) -> None:
        self.num_steps += 1
        self.runner.fails = self.chance.random() < 0.0001
        try:
            finished = self.engine.step()
        except StepFailed:
            for request in list(self.live):
                self._abort(request)
            return
        if self.num_steps % 8 == 0:
            self.engine.manager.check()
        for request in finished:
            self.live.remove(request)
            self.finished.append(request)
            self._verify(request)
        assert self.num_steps < self._bound(), "somebody does not end"

    def _abort(self, request: Request) -> None:
        self.engine.abort(request)
        self.live.remove(request)
        self.num_aborted += 1
        assert all(sequence.seq_id not in self.engine.manager for sequence in request.sequences)

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    def _verify(self, request: Request) -> None:
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
        assert len(self.finished) + self.num_aborted >= 1

    def _bound(self) -> int:
        """Steps that all requests so far would need one after the other, many times over."""
        return 1000 + 50 * self.num_blocks_asked * (self.config.block_size + self.num_aborted)

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
