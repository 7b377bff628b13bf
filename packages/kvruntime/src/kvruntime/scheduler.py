"""Who runs in the next step, with how many tokens, in which blocks.

There are no phases: every sequence has tokens that are known and tokens that are computed, and each
step lets the computed catch up with the known, within one budget of tokens. That one rule covers
prefill, chunked prefill, decoding, cached prefixes and recomputation.

Knows requests and the block manager. Does not know models, arrays or how tokens are chosen.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from kvblocks import BlockManager, BlockSwap, Verdict
from kvruntime.engine_config import SchedulerConfig
from kvruntime.paging import Paging, Part, needing
from kvruntime.request import Event, FinishReason, Request, Sequence
from kvruntime.steps import SchedulerOutput, StepRecord

__all__ = ["Scheduler", "SchedulerCounters"]


@dataclass(slots=True)
class SchedulerCounters:
    """How often each policy acted. A request that waits for room is deferred once, until it runs."""

    num_deferrals: int = 0
    num_bypasses: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_swap_fallbacks: int = 0  # preemptions by recompute for which the host had no room
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_cached_tokens: int = 0  # of prompts, those of sequences that came back included


class Scheduler:
    """Serves in order, within a budget of tokens a step and a pool of blocks.

    When running sequences need more blocks than there are, those of the request that came last give
    theirs up and go on later, before requests that never ran. The policies of `SchedulerConfig` say
    what "in order" means, and what else is done first.

    Steps may overlap: while one is open, the next has only what is in none, and neither touches a
    block that the other writes. Who is in an open step is not preempted; a shortage waits for it.
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig) -> None:
        self.manager = manager
        self.config = config
        self.waiting: list[Sequence] = []  # in the order in which they are admitted
        self.running: list[Sequence] = []  # in the order in which they are served
        self.counters = SchedulerCounters()
        self.log: deque[StepRecord] = deque(maxlen=config.log_steps)
        self._paging = Paging(manager)
        self._open: list[SchedulerOutput] = []
        self._num_arrived = 0
        self._step = 0
        self._swaps_out: list[BlockSwap] = []
        self._swaps_in: list[BlockSwap] = []
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def num_waiting_sequences(self) -> int:
        """Answers to come of requests that wait."""
        return sum(1 if s.request.is_forked else s.request.num_seats for s in self.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts of requests that wait."""
        requests = {sequence.request for sequence in self.waiting}
        return sum(len(request.prompt_token_ids) for request in requests)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        for sequence in request.sequences:
            self._wait(sequence)

    def schedule(self) -> SchedulerOutput:
        """Open a step: choose who runs, and take the blocks it needs.

        While another step is open nothing may be left to schedule until it completes: then the
        answer is empty, and no step was opened.
        """
        self._step += 1
        self._events, self._swaps_out, self._swaps_in = [], [], []
        # Before the step begins, so that blocks that are swapped out can be had at once: their
        # copies come before all else that the step does.
        batch, num_preempted = self._schedule_running()
        self._paging.begin()
        parts = [self._paging.append(batch)]
        budget = self.config.max_num_batched_tokens - sum(batch.values())
        # What just gave its blocks up must not take them back from those that needed them.
        if not num_preempted:
            parts.append(self._admit(budget))
        while not any(part.batch for part in parts):
            if not self._open:
                parts.append(self._admit(budget))
            if self._open or not parts[-1].batch:
                self._paging.cancel()  # nothing is in it
                if self._open:
                    self._step -= 1
                    return self._paging.describe(self._step, [], (), ())
                self._preempt([self.running[-1]], "a beam that it waits for has no room")
                self._paging.begin()
        output = self._paging.describe(self._step, parts, self._swaps_out, self._swaps_in)
        self._open.append(output)
        self._record(output)
        return output

    def complete(self, output: SchedulerOutput) -> None:
        """Close the oldest open step, which has run: its positions are written, and may be shared."""
        assert output is self._open[0], "steps complete in the order in which they were opened"
        del self._open[0]
        self._paging.complete(output)

    def fork(self, sequence: Sequence) -> Sequence:
        """Another answer that goes on from a sequence, sharing its blocks where it has any."""
        child = sequence.fork()
        if sequence.seq_id in self.manager and not sequence.is_swapped:
            self.manager.fork(sequence.seq_id, child.seq_id)
            self._run(child)
        else:
            child.num_computed_tokens = 0
            self._wait(child)
        return child

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and give its blocks back."""
        sequence.finish_reason = reason
        self._tell(sequence, "finished", reason)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and give its blocks back.

        Those that an open step uses are handed out again when that is complete.
        """
        sequence.is_dropped = True
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.seq_id in self.manager:
            self.manager.free(sequence.seq_id)

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it stands, and give its blocks back."""
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._tell(sequence, "aborted")
            self.drop(sequence)

    def fail(self) -> tuple[Request, ...]:
        """Close all open steps, wherever they failed, and drop the requests that run."""
        requests = dict.fromkeys(sequence.request for sequence in self.running)
        are_coming = bool(self._swaps_in) or any(output.swaps_in for output in self._open)
        self._paging.fail(swaps_in=are_coming)
        self._open.clear()
        for request in requests:
            self.abort(request)
        return tuple(requests)

    # ── who goes on ──────────────────────────────────────────────────────────────────────────

    def _schedule_running(self) -> tuple[dict[Sequence, int], int]:
        """Give each running sequence its pending tokens, in order; preempt until all fit."""
        batch: dict[Sequence, int] = {}
        budget = self.config.max_num_batched_tokens
        in_flight = {item.sequence for output in self._open for item in output.scheduled}
        for sequence in self.running:
            num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
            if num_tokens and sequence not in in_flight:
                num_tokens = min(num_tokens, budget)
                batch[sequence] = num_tokens
                budget -= num_tokens
                if not budget:
                    break
        if self._open and self._shortage(batch):
            return {}, 0
        num_preempted = 0
        while reason := self._shortage(batch):
            victims = self._newest()
            for victim in victims:
                batch.pop(victim, None)
            self._preempt(victims, reason)
            num_preempted += len(victims)
        return batch, num_preempted

    def _shortage(self, batch: Mapping[Sequence, int]) -> str:
        """Why a batch of running sequences cannot have its blocks; nothing if it can."""
        if not batch:
            return ""
        verdict = self._paging.can_append(batch)
        if not verdict.is_now:
            return str(verdict)
        # The last request has nobody to preempt but itself.
        is_last = self.running[0].request is self.running[-1].request
        return "" if is_last else self._would_evict(verdict)

    def _would_evict(self, verdict: Verdict) -> str:
        """Why blocks that can be had shall not be had yet: cached content would be lost."""
        if self.config.eviction == "before":
            return ""
        if verdict.num_needed_blocks <= self.manager.stats().num_free_blocks:
            return ""
        return f"{verdict}, but only by evicting cached blocks"

    def _newest(self) -> list[Sequence]:
        """Whom to preempt: the request that came last, as a whole; the last one, sample by sample.

        So that samples go on sharing what they share, and the oldest sequence always goes on.
        """
        request = self.running[-1].request
        if self.running[0].request is request:
            return [self.running[-1]]
        return [sequence for sequence in self.running if sequence.request is request]

    def _preempt(self, victims: list[Sequence], reason: str) -> None:
        swapped = self._swap_out(victims)
        for victim in victims:
            self.running.remove(victim)
            victim.request.num_preemptions += 1
            if victim in swapped:
                victim.is_swapped = True
                self.counters.num_preemptions_swap += 1
                self._tell(victim, "preempted, swapped to the host", reason)
            else:
                self.manager.free(victim.seq_id)
                victim.num_computed_tokens = 0
                self.counters.num_preemptions_recompute += 1
                self._tell(victim, "preempted, to be recomputed", reason)
            self._wait(victim)

    def _swap_out(self, victims: Iterable[Sequence]) -> set[Sequence]:
        """Move the blocks of victims to the host, as far as that is chosen and has room."""
        mode = self.config.preemption
        if mode == "recompute":
            return set()
        least = self.manager.block_size if mode == "auto" else 1
        moving = [s for s in victims if self.manager.num_computed_tokens(s.seq_id) >= least]
        seq_ids = [sequence.seq_id for sequence in moving]
        if not seq_ids:
            return set()
        if not self.manager.can_swap_out(seq_ids).is_now:
            self.counters.num_swap_fallbacks += len(moving)
            return set()
        swaps = self.manager.swap_out(seq_ids)
        self.counters.num_swapped_out_blocks += len(swaps)
        self._swaps_out += swaps
        return set(moving)

    # ── who starts ───────────────────────────────────────────────────────────────────────────

    def _admit(self, budget: int) -> Part:
        """Start waiting sequences in order, each with blocks for all its tokens."""
        admitted: dict[Sequence, int] = {}
        bypassed: list[Request] = []
        for sequence in list(self.waiting):
            if not budget:
                break
            if sequence.candidates is not None:
                continue  # it has nothing to compute until the other beams have theirs
            if obstacle := self._obstacle(sequence):
                self._defer(sequence, *obstacle)
                if not self._may_be_bypassed(sequence):
                    break
                bypassed.append(sequence.request)
                continue
            self._start(sequence)
            admitted[sequence] = min(sequence.num_pending_tokens, budget)
            budget -= admitted[sequence]
            for request in bypassed:
                request.num_bypassed += 1
            self.counters.num_bypasses += len(bypassed)
            if any(request.num_bypassed >= self.config.skip_ahead for request in bypassed):
                break
        return self._paging.append(admitted)

    def _may_be_bypassed(self, sequence: Sequence) -> bool:
        """What has run keeps its place; what has not is passed `skip_ahead` times, no more."""
        return not sequence.has_run and sequence.request.num_bypassed < self.config.skip_ahead

    def _obstacle(self, sequence: Sequence) -> tuple[Literal["waits", "deferred"], str] | None:
        """Why a sequence cannot start now: it waits for its turn, or is deferred for room."""
        if self._num_seats(sequence) > self.config.max_num_seqs:
            return "waits", f"max_num_seqs is {self.config.max_num_seqs}"
        if not sequence.is_swapped and self._prefix_is_being_computed(sequence):
            return "waits", "another request computes its prefix"
        reason = self._no_room(sequence)
        return ("deferred", reason) if reason else None

    def _no_room(self, sequence: Sequence) -> str:
        if self.config.admission == "output" and (reason := self._over_promised(sequence)):
            return reason
        verdict = self._verdict(sequence)
        if verdict.num_missing_blocks or not verdict.is_now:
            return str(verdict)
        return self._would_evict(verdict) if self.running else ""

    def _verdict(self, sequence: Sequence) -> Verdict:
        """Whether there are blocks for all its tokens."""
        if not sequence.is_swapped:
            return self.manager.can_allocate(sequence.token_ids, salt=sequence.request.cache_salt)
        verdict = self.manager.can_swap_in([sequence.seq_id])
        block_size = self.manager.block_size
        num_swapped = -(-self.manager.num_computed_tokens(sequence.seq_id) // block_size)
        num_more = -(-len(sequence.token_ids) // block_size) - num_swapped
        return needing(verdict, verdict.num_needed_blocks + num_more)

    def _num_seats(self, newcomer: Sequence) -> int:
        """The seats taken if a sequence joined, with those for the answers it will fork into."""
        seats: dict[Request, int] = {}
        for sequence in chain(self.running, (newcomer,)):
            request = sequence.request
            alone = request.is_forked and request.beam_search is None
            seats[request] = seats.get(request, 0) + 1 if alone else request.num_seats
        return sum(seats.values())

    def _over_promised(self, newcomer: Sequence) -> str:
        """Why the pool could not hold all that runs, and a newcomer, at their full lengths."""
        requests = {sequence.request for sequence in self.running}
        promised = sum(self._num_blocks_at_most(request) for request in requests)
        needed = self._num_blocks_at_most(newcomer.request)
        total = self.manager.num_blocks
        if newcomer.request in requests or not requests or promised + needed <= total:
            return ""
        return f"{needed} blocks might be needed, {promised} of {total} are promised to others"

    def _num_blocks_at_most(self, request: Request) -> int:
        num_tokens = len(request.prompt_token_ids) + request.params.max_tokens
        return request.params.num_sequences * -(-num_tokens // self.manager.block_size)

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        """Whether waiting a step or a few lets a sequence reuse blocks that another computes now.

        Requests that arrive together often share a system prompt; the first computes it for all.
        """
        if not self.manager.prefix_caching:
            return False
        salt = sequence.request.cache_salt
        cached = self.manager.match(sequence.token_ids, salt=salt).num_tokens
        return any(
            _num_shared_tokens(sequence, other, self.manager.block_size) > cached
            for other in self.running
            if other.request.cache_salt == salt
        )

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        self.waiting.remove(sequence)
        if sequence.is_swapped:
            self._swap_in(sequence)
            return
        allocation = self.manager.allocate(
            sequence.seq_id, sequence.token_ids, salt=request.cache_salt
        )
        found = allocation.num_cached_tokens
        # Logits are needed of positions that are found as well; these are computed again, from
        # the blocks that are there, and written nowhere.
        if request.wants_prompt_logprobs:
            found = min(found, max(0, len(request.prompt_logprobs) - 1))
        sequence.num_computed_tokens = found
        sequence.has_run = True
        sequence.obstacle = ""
        num_cached = min(found, len(request.prompt_token_ids))
        self.counters.num_cached_tokens += num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        self._tell(sequence, "admitted", f"{found} of {len(sequence.token_ids)} tokens cached")
        self._run(sequence)

    def _swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence's blocks back, and take those of the tokens it has yet to compute."""
        swaps = self.manager.swap_in([sequence.seq_id])
        self.manager.reserve({sequence.seq_id: len(sequence.token_ids)})
        self._swaps_in += swaps
        self.counters.num_swapped_in_blocks += len(swaps)
        sequence.is_swapped = False
        sequence.obstacle = ""
        self._tell(sequence, "swapped in", f"{len(swaps)} blocks copied from the host")
        self._run(sequence)

    def _defer(self, sequence: Sequence, kind: str, reason: str) -> None:
        if sequence.obstacle == kind:
            return
        sequence.obstacle = kind
        self.counters.num_deferrals += kind == "deferred"
        self._tell(sequence, kind, reason)

    # ── the queues ───────────────────────────────────────────────────────────────────────────

    def _priority(self, sequence: Sequence) -> int:
        return sequence.request.priority if self.config.policy == "priority" else 0

    def _run(self, sequence: Sequence) -> None:
        insort(
            self.running,
            sequence,
            key=lambda s: (self._priority(s), s.request.arrival, s.index),
        )

    def _wait(self, sequence: Sequence) -> None:
        """Queue a sequence; what has run goes before what has not."""
        insort(
            self.waiting,
            sequence,
            key=lambda s: (self._priority(s), not s.has_run, s.request.arrival, s.index),
        )

    # ── what is told ─────────────────────────────────────────────────────────────────────────

    def _tell(self, sequence: Sequence, kind: str, detail: str = "") -> None:
        event = Event(self._step, sequence.seq_id, kind, detail)
        sequence.request.events.append(event)
        self._events.append(event)

    def _record(self, output: SchedulerOutput) -> None:
        pool = self.manager.stats()
        self.log.append(
            StepRecord(
                step=output.step,
                scheduled=tuple(
                    (item.sequence.seq_id, len(item.token_ids)) for item in output.scheduled
                ),
                events=self._events,
                num_free_blocks=pool.num_free_blocks,
                num_cached_blocks=pool.num_cached_blocks,
                num_held_blocks=pool.num_held_blocks,
                num_evicted_blocks=pool.num_evicted_blocks,
                num_swapped_out_blocks=len(output.swaps_out),
                num_swapped_in_blocks=len(output.swaps_in),
                copies=output.copies,
            )
        )


def _num_shared_tokens(sequence: Sequence, other: Sequence, block_size: int) -> int:
    """The common prefix of two sequences, in full blocks that leave `sequence` a token to compute."""
    ours, theirs = sequence.token_ids, other.token_ids
    shared = 0
    while (
        shared + block_size < len(ours)
        and shared + block_size <= len(theirs)
        and ours[shared : shared + block_size] == theirs[shared : shared + block_size]
    ):
        shared += block_size
    return shared
