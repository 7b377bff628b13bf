"""The loop: schedule, run, choose tokens, end what is done.

Knows how the parts follow one another, and counts what they did. Does not know files or time, and
text only where a stop text is looked for.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import islice

import torch

from kvblocks import BlockManager, Stats
from kvruntime.beam_groups import BeamGroups
from kvruntime.beam_search import BeamSearch
from kvruntime.detokenizer import Detokenizer
from kvruntime.engine_config import EngineConfig
from kvruntime.errors import EngineBusy, InvalidRequest
from kvruntime.guidance import Constraint, Guidance, constrain
from kvruntime.kv_cache import block_bytes
from kvruntime.logits_processors import process
from kvruntime.model_runner import ModelRunner, StepLogits
from kvruntime.models import Llama
from kvruntime.peaks import Peaks
from kvruntime.request import FinishReason, Request, Sequence
from kvruntime.sampler import SamplingRow, TokenLogprobs, sample, token_logprobs
from kvruntime.sampling_params import BeamSearchParams, GenerationParams, SamplingParams
from kvruntime.scheduler import Scheduler
from kvruntime.stats import EngineStats
from kvruntime.steps import ScheduledSequence, SchedulerOutput
from kvruntime.tokenizer import Tokenizer

__all__ = ["Engine"]


class Engine:
    """Serves requests on one model and one pool of blocks. Belongs to one thread.

    Without a tokenizer, requests with stop texts or structured outputs are refused.
    """

    def __init__(
        self, model: Llama, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        self.config = config
        self.block_bytes = block_bytes(model.config, config.block_size, config.kv_dtype)
        num_blocks = config.num_blocks or config.kv_memory_bytes // self.block_bytes
        if num_blocks < 1:
            raise InvalidRequest(
                f"kv_memory_bytes must hold at least one block of {self.block_bytes} bytes, "
                f"got {config.kv_memory_bytes}"
            )
        self.vocab_size = model.config.vocab_size
        self.model_len = model.config.max_position_embeddings
        self.max_model_len = min(
            config.max_model_len or self.model_len, self.model_len, num_blocks * config.block_size
        )
        num_host_blocks = config.num_host_blocks
        if num_host_blocks is None:
            num_host_blocks = 0 if config.preemption == "recompute" else num_blocks
        # First, since a pool beyond all memory is refused here.
        self.runner = ModelRunner(
            model, config, num_blocks=num_blocks, num_host_blocks=num_host_blocks
        )
        self.manager = BlockManager(
            num_blocks,
            config.block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=config.prefix_caching,
        )
        self.scheduler = Scheduler(self.manager, config)
        self._beams = BeamGroups(self.scheduler)
        self._peaks = Peaks()
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        self._num_prefill_tokens = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._num_rejections = 0

    def check_request(
        self,
        token_ids: list[int],
        params: GenerationParams,
        constraint: Constraint | None = None,
    ) -> Constraint | None:
        """Refuse what can never be served, with the numbers. `InvalidRequest`.

        Returns what answers must be, compiled now unless it is given.
        """
        try:
            self._check_prompt(token_ids)
            self._check_params(params)
            return constraint or self.prepare(params)
        except InvalidRequest:
            self._num_rejections += 1
            raise

    def check_room(self, num_answers: int, num_prompt_tokens: int, num_arriving: int = 0) -> None:
        """Refuse what the queue has no room for now, beside `num_arriving` others. `EngineBusy`."""
        waiting = self.scheduler.num_waiting_sequences + num_arriving
        limit = self.config.max_num_waiting
        if limit is not None and waiting + num_answers > limit:
            raise EngineBusy(
                f"at most {limit} answers may wait, got {num_answers} more than the "
                f"{waiting} that wait already"
            )
        waiting, limit = self.scheduler.num_waiting_tokens, self.config.max_num_waiting_tokens
        if limit is not None and waiting and waiting + num_prompt_tokens > limit:
            raise EngineBusy(
                f"prompts of at most {limit} tokens may wait, got a prompt beside the {waiting} "
                f"tokens that wait already"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        `InvalidRequest` for what can never be served, `EngineBusy` where as many answers or tokens
        wait as may wait.
        """
        request.constraint = self.check_request(
            request.prompt_token_ids, request.params, request.constraint
        )
        try:
            self.check_room(request.num_seats, len(request.prompt_token_ids))
        except EngineBusy:
            self._num_rejections += 1
            raise
        request.end_token_ids = self._stop_token_ids(request.params)
        if isinstance(request.params, BeamSearchParams):
            longest = self.max_model_len - len(request.prompt_token_ids)
            request.beam_search = BeamSearch(
                request.params,
                stop_token_ids=request.end_token_ids,
                max_tokens=min(request.params.max_tokens, longest),
            )
        self.scheduler.add(request)

    def count_rejection(self) -> None:
        """Count a request that was refused before it came here."""
        self._num_rejections += 1

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it stands, and give its blocks back."""
        self.scheduler.abort(request)

    def prepare(self, params: GenerationParams) -> Constraint | None:
        """Compile what these parameters ask answers to be, so that no step waits for it.

        For any thread. `InvalidRequest` for what cannot be followed.
        """
        if params.structured_outputs is None:
            return None
        return self._guidance.constraint(params.structured_outputs)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one step and return the requests that finished in it.

        A step that fails drops the requests that run; those that wait are served by the next.
        """
        try:
            output = self.schedule()
            return self.complete(output, self.runner.execute(output))
        except BaseException:
            self.fail()
            raise

    def schedule(self) -> SchedulerOutput:
        """Open a step, which is to be executed, and then completed.

        The next may be opened before; see `Scheduler`. It is empty if it has to wait.
        """
        output = self.scheduler.schedule()
        if output.scheduled:
            self._num_steps += 1
            # Those that decode together are beyond their prompts.
            prefilling = islice(output.scheduled, output.num_decoding, None)
            self._num_prefill_tokens += sum(map(_num_prompt_tokens, prefilling))
            self._peaks.note(output, self.scheduler.running, self.manager)
        return output

    def complete(self, output: SchedulerOutput, logits: StepLogits) -> list[Request]:
        """Close the oldest open step, choose its tokens, and return the requests that finished."""
        self.scheduler.complete(output)
        self._note_prompt_logprobs(output, logits)

        rows: list[int] = []
        samples: list[Sequence] = []
        beam_rows: list[int] = []
        beams: list[Sequence] = []
        completing = [item.sequence for item in output.scheduled if item.completes]
        for row, sequence in enumerate(completing):
            if sequence.is_dropped:
                continue
            if sequence.request.beam_search is not None:
                beam_rows.append(row)
                beams.append(sequence)
            elif sequence.request.is_forked:
                rows.append(row)
                samples.append(sequence)
            else:
                forked = self._fork_samples(sequence)
                rows += [row] * len(forked)
                samples += forked
        # Most steps sample every row once, and logits are large.
        sampled = logits.last if samples == completing else logits.last[rows]
        found = self._beams.advance(logits.last[beam_rows], beams)
        return self._sample(sampled, samples) + found

    def fail(self) -> tuple[Request, ...]:
        """Give up all open steps, and drop the requests that run, which are returned."""
        return self.scheduler.fail()

    def stats(self) -> EngineStats:
        """What has been done so far."""
        pool, counters = self.manager.stats(), self.scheduler.counters
        return EngineStats(
            num_prefill_tokens=self._num_prefill_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens + self._beams.num_generated_tokens,
            num_steps=self._num_steps,
            num_deferrals=counters.num_deferrals,
            num_bypasses=counters.num_bypasses,
            num_evicted_blocks=pool.num_evicted_blocks,
            num_preemptions_recompute=counters.num_preemptions_recompute,
            num_preemptions_swap=counters.num_preemptions_swap,
            num_swap_fallbacks=counters.num_swap_fallbacks,
            num_swapped_out_blocks=counters.num_swapped_out_blocks,
            num_swapped_in_blocks=counters.num_swapped_in_blocks,
            num_rejections=self._num_rejections,
            peak_blocks=self._peaks.num_blocks,
            num_forks=pool.num_forks,
            num_copies=pool.num_copies,
            tail_waste_slots=self._peaks.tail_waste_slots,
            contiguous_slots=self._peaks.num_samples * self.max_model_len,
            num_leaked_blocks=0 if self.has_work else _num_leaked(pool),
        )

    # ── what is refused ──────────────────────────────────────────────────────────────────────

    def _check_prompt(self, token_ids: list[int]) -> None:
        num_prompt_tokens = len(token_ids)
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        self._check_token_ids(token_ids)
        pool = self.manager.num_blocks * self.manager.block_size
        limits = {
            "the model's context": self.model_len,
            "the pool": pool,
            "max_model_len": self.max_model_len,
        }
        for name, limit in limits.items():
            if num_prompt_tokens >= limit:
                raise InvalidRequest(
                    f"the prompt has {num_prompt_tokens} tokens, but {name} holds {limit}, "
                    f"which must leave room for at least one generated token"
                )

    def _check_params(self, params: GenerationParams) -> None:
        name = "num_beams" if isinstance(params, BeamSearchParams) else "n"
        for setting in ("max_num_seqs", "max_num_waiting"):
            limit = getattr(self.config, setting)
            if limit is not None and params.num_sequences > limit:
                raise InvalidRequest(
                    f"{name} must be at most {setting}, got {params.num_sequences} and {limit}"
                )
        self._check_token_ids(params.stop_token_ids)
        self._check_token_ids(params.logit_bias)
        if isinstance(params, SamplingParams) and params.stop and self._tokenizer is None:
            raise InvalidRequest("stop texts need a tokenizer, and this engine has none")

    def _check_token_ids(self, token_ids: Iterable[int]) -> None:
        if strange := [t for t in token_ids if not 0 <= t < self.vocab_size]:
            raise InvalidRequest(f"token ids must be in [0, {self.vocab_size}), got {strange[0]}")

    # ── samples ──────────────────────────────────────────────────────────────────────────────

    def _fork_samples(self, sequence: Sequence) -> list[Sequence]:
        """The samples that go on from the one that computed the prompt: itself and its children."""
        request = sequence.request
        request.is_forked = True
        num_children = request.params.num_sequences - 1
        children = [self.scheduler.fork(sequence) for _ in range(num_children)]
        for one in (sequence, *children):
            one.detokenizer = self._detokenizer(request.params)
            one.matcher = request.constraint.matcher() if request.constraint else None
        return [sequence, *children]

    def _detokenizer(self, params: GenerationParams) -> Detokenizer | None:
        if not isinstance(params, SamplingParams) or not params.stop or self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @cached_property
    def _guidance(self) -> Guidance:
        if self._tokenizer is None:
            raise InvalidRequest("structured outputs need a tokenizer, and this engine has none")
        return Guidance(
            self._tokenizer, vocab_size=self.vocab_size, eos_token_ids=sorted(self._eos_token_ids)
        )

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Request]:
        """Choose a token for each of these samples; the requests that finished with it."""
        processed = logits
        if any(sequence.request.changes_logits for sequence in sequences):
            processed = process(logits, [sequence.history for sequence in sequences])
        processed = constrain(processed, logits, [sequence.matcher for sequence in sequences])
        tokens = sample(processed, [_sampling_row(sequence) for sequence in sequences])
        _note_logprobs(logits, sequences, tokens)
        finished = []
        self._num_generated_tokens += len(tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            if sequence.matcher is not None:
                sequence.matcher.advance(token)
            if (reason := self._finish_reason(sequence, token)) is not None:
                self.scheduler.finish(sequence, reason)
                if sequence.request.is_finished:
                    finished.append(sequence.request)
        return finished

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request, detokenizer, matcher = sequence.request, sequence.detokenizer, sequence.matcher
        if matcher is not None and matcher.error:
            sequence.stop_reason = matcher.error
            return FinishReason.ERROR
        if detokenizer is not None and detokenizer.append(token):
            sequence.stop_reason = detokenizer.stop_reason
            return FinishReason.STOP
        if token in request.end_token_ids:
            if token in request.params.stop_token_ids:
                sequence.stop_reason = token
            return FinishReason.STOP
        if matcher is not None and matcher.is_finished:
            return FinishReason.STOP
        num_tokens = len(sequence.token_ids)
        num_generated = num_tokens - len(request.prompt_token_ids)
        if num_generated >= request.params.max_tokens or num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _stop_token_ids(self, params: GenerationParams) -> frozenset[int]:
        if params.ignore_eos:
            return frozenset(params.stop_token_ids)
        return self._eos_token_ids.union(params.stop_token_ids)

    def _note_prompt_logprobs(self, output: SchedulerOutput, logits: StepLogits) -> None:
        """Keep the log-probabilities of prompts; the row of a token says what follows it."""
        wanting = [item for item in output.scheduled if item.wants_logits]
        for item, rows in zip(wanting, logits.whole, strict=True):
            request, params = item.sequence.request, item.sequence.request.params
            known = request.prompt_logprobs or [None]
            following = request.prompt_token_ids[len(known) : item.stop + 1]
            if following and isinstance(params, SamplingParams):
                first = len(known) - 1 - item.start
                known += token_logprobs(
                    rows[first : first + len(following)], following, params.prompt_logprobs or 0
                )
            request.prompt_logprobs = known


def _num_leaked(pool: Stats) -> int:
    """Blocks of either memory that are neither free nor cached."""
    num_host = pool.num_host_blocks - pool.num_free_host_blocks
    return pool.num_held_blocks + pool.num_fenced_blocks + num_host


def _sampling_row(sequence: Sequence) -> SamplingRow | None:
    """What a sample is drawn by; nothing if it is greedy."""
    request = sequence.request
    if request.is_greedy:
        return None
    assert isinstance(request.params, SamplingParams), "beams are not drawn"
    return SamplingRow(
        request.params, request.seed, sequence.index, position=sequence.num_output_tokens
    )


def _note_logprobs(logits: torch.Tensor, sequences: list[Sequence], tokens: list[int]) -> None:
    """Keep the log-probabilities of samples that ask for them, or are compared by them."""
    wanted: dict[int, int] = {}
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if sequence.request.keeps_logprobs and isinstance(params, SamplingParams):
            wanted[row] = params.logprobs or 0
    if not wanted:
        return
    rows = list(wanted)
    noted = token_logprobs(logits[rows], [tokens[row] for row in rows], max(wanted.values()))
    for row, found in zip(rows, noted, strict=True):
        top = tuple(islice(found.top, wanted[row]))
        sequence = sequences[row]
        sequence.logprobs.append(TokenLogprobs(found.token_id, found.logprob, found.rank, top))
        sequence.cumulative_logprob += found.logprob


def _num_prompt_tokens(item: ScheduledSequence) -> int:
    """How many of the scheduled tokens belong to the prompt."""
    num_prompt = len(item.sequence.request.prompt_token_ids)
    return max(0, min(item.stop, num_prompt) - item.start)
