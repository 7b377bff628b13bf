"""Who runs in the next step, with how many tokens, in which blocks.

There are no phases: every sequence has tokens that are known and tokens that are computed, and each
step lets the computed catch up with the known, within one budget of tokens. That one rule covers
prefill, chunked prefill, decoding, cached prefixes and recomputation.

Knows requests and the block manager. Does not know models, arrays or how tokens are chosen.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from kvblocks import BlockCopy, BlockManager, OutOfBlocks
from kvruntime.request import FinishReason, Request, Sequence

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens of a sequence to compute now, and the blocks its whole context lies in."""

    sequence: Sequence
    start: int  # the position of the first token
    token_ids: list[int]
    block_table: array[int]
    completes: bool  # no known token is left after this step, so that the next one is chosen

    @property
    def stop(self) -> int:
        """The position after the last token: the length of the context after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: copies first, then one flat batch of tokens, each with the slot its KV goes to."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    slot_mapping: array[int]
    copies: tuple[BlockCopy, ...]


class Scheduler:
    """First come, first served, within a budget of tokens a step and a pool of blocks.

    When running sequences need more blocks than there are, the one that came last gives its blocks
    up and is computed again later, prompt and generated tokens alike.
    """

    def __init__(
        self, manager: BlockManager, *, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of prompts, those of sequences that came back included

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.extend(request.sequences)

    def schedule(self) -> SchedulerOutput:
        """Open a step: choose who runs, and take the blocks it needs."""
        step = self.manager.begin_step()
        batch = self._schedule_running()
        plans = [self.manager.append(_entries(batch))]
        admitted = self._admit(self.max_num_batched_tokens - sum(batch.values()))
        plans.append(self.manager.append(_entries(admitted)))
        batch |= admitted
        return SchedulerOutput(
            step=step,
            scheduled=tuple(self._describe(sequence, n) for sequence, n in batch.items()),
            slot_mapping=array("q", chain.from_iterable(plan.slot_mapping for plan in plans)),
            copies=tuple(chain.from_iterable(plan.copies for plan in plans)),
        )

    def complete(self, output: SchedulerOutput) -> None:
        """Close a step that has run: its positions are written, and may be shared."""
        self.manager.complete_step(output.step)
        for item in output.scheduled:
            item.sequence.num_computed_tokens = item.stop
            self.manager.commit(item.sequence.seq_id, item.stop)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The samples that go on from a sequence: itself, and its children the first time."""
        request = sequence.request
        if len(request.sequences) == request.params.n:
            return [sequence]
        children = [sequence.fork(index) for index in range(1, request.params.n)]
        for child in children:
            self.manager.fork(sequence.seq_id, child.seq_id)
        place = self.running.index(sequence) + 1
        self.running[place:place] = children
        return [sequence, *children]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running sequence and give its blocks back."""
        sequence.finish_reason = reason
        self.running.remove(sequence)
        self.manager.free(sequence.seq_id)

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it stands, and give its blocks back.

        Also in the midst of a step that failed: nothing is in flight afterwards.
        """
        for sequence in request.sequences:
            for queue in (self.waiting, self.running):
                if sequence in queue:
                    queue.remove(sequence)
            if sequence.seq_id in self.manager:
                self.manager.free(sequence.seq_id)
        self.manager.complete_step(self.manager.begin_step())

    def _schedule_running(self) -> dict[Sequence, int]:
        """Give each running sequence its pending tokens, oldest first; preempt until all fit."""
        batch: dict[Sequence, int] = {}
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            if num_tokens := min(sequence.num_pending_tokens, budget):
                batch[sequence] = num_tokens
                budget -= num_tokens
        while not self.manager.can_append(_entries(batch)).is_now:
            batch.pop(self._preempt_newest(), None)
        return batch

    def _admit(self, budget: int) -> dict[Sequence, int]:
        """Start waiting sequences in order, each with blocks for all its tokens."""
        admitted: dict[Sequence, int] = {}
        while self.waiting and budget:
            sequence = self.waiting[0]
            if not self._has_seat(sequence) or self._prefix_is_being_computed(sequence):
                break
            try:
                allocation = self.manager.allocate(sequence.seq_id, sequence.token_ids)
            except OutOfBlocks:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.num_computed_tokens = allocation.num_cached_tokens
            self._count_cached(sequence)
            admitted[sequence] = min(sequence.num_pending_tokens, budget)
            budget -= admitted[sequence]
        return admitted

    def _count_cached(self, sequence: Sequence) -> None:
        request = sequence.request
        num_cached = min(sequence.num_computed_tokens, len(request.prompt_token_ids))
        self.num_cached_tokens += num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached

    def _has_seat(self, sequence: Sequence) -> bool:
        """Whether the batch has room for a sequence and the samples it will fork into."""
        return self._num_seats(chain(self.running, (sequence,))) <= self.max_num_seqs

    def _num_seats(self, sequences: Iterable[Sequence]) -> int:
        return sum(
            1 if len(s.request.sequences) == s.request.params.n else s.request.params.n
            for s in sequences
        )

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        """Whether waiting a step or a few lets a sequence reuse blocks that another computes now.

        Requests that arrive together often share a system prompt; the first computes it for all.
        """
        if not self.manager.prefix_caching:
            return False
        cached = self.manager.match(sequence.token_ids).num_tokens
        return any(
            _num_shared_tokens(sequence, other, self.manager.block_size) > cached
            for other in self.running
        )

    def _describe(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        return ScheduledSequence(
            sequence=sequence,
            start=start,
            token_ids=sequence.token_ids[start : start + num_tokens],
            block_table=self.manager.block_table(sequence.seq_id),
            completes=num_tokens == sequence.num_pending_tokens,
        )

    def _preempt_newest(self) -> Sequence:
        victim = self.running.pop()
        self.manager.free(victim.seq_id)
        victim.num_computed_tokens = 0
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim


def _entries(batch: Mapping[Sequence, int]) -> dict[tuple[int, int], list[int]]:
    """A batch in the block manager's terms: the token ids of each sequence's next positions."""
    return {
        s.seq_id: s.token_ids[s.num_computed_tokens : s.num_computed_tokens + n]
        for s, n in batch.items()
    }


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
