"""The loop: schedule, run, choose tokens, end what is done.

Knows how the parts follow one another, and counts what they did. Does not know text, files or time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral

from kvblocks import BlockManager
from kvruntime.errors import InvalidRequest
from kvruntime.model_runner import ModelRunner
from kvruntime.models import Llama
from kvruntime.request import FinishReason, Request, Sequence
from kvruntime.sampler import SamplingRow, sample
from kvruntime.sampling_params import SamplingParams
from kvruntime.scheduler import ScheduledSequence, Scheduler, SchedulerOutput

__all__ = ["Engine", "EngineConfig", "EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    Args:
        block_size: tokens a block.
        num_blocks: blocks of the pool; None takes what `kv_memory_bytes` holds.
        kv_memory_bytes: the pool's size where `num_blocks` is None.
        max_model_len: tokens of a prompt and its output; None takes the model's own limit.
        max_num_batched_tokens: the budget of tokens a step.
        max_num_seqs: sequences that run at the same time.
        prefix_caching: reuse the blocks of equal prefixes.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int = 512 * 2**20
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or (value is None and field.default is None):
                continue
            if not isinstance(value, Integral) or value < 1:
                raise InvalidRequest(
                    f"{field.name} must be an integer of at least 1, got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did since it was made.

    `num_prefill_tokens` and `num_cached_tokens` count the tokens of prompts that were computed and
    those that were found, once more for a sequence that was preempted. `tail_waste_slots` is taken
    when the pool was fullest. `contiguous_slots` is what reserving `max_model_len` slots for each
    sample that ran would have held at the busiest step.
    `num_leaked_blocks` counts blocks that are held though no request is.
    """

    num_prefill_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions_recompute: int
    peak_blocks: int
    num_forks: int
    num_copies: int
    tail_waste_slots: int
    contiguous_slots: int
    num_leaked_blocks: int


class Engine:
    """Serves requests on one model and one pool of blocks. Belongs to one thread."""

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        self.config = config
        self.block_bytes = config.block_size * model.config.kv_bytes_per_token()
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
        # First, since a pool beyond all memory is refused here.
        self.runner = ModelRunner(model, num_blocks=num_blocks, block_size=config.block_size)
        self.manager = BlockManager(
            num_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        self._num_prefill_tokens = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._peak_samples = 0
        self._peak_blocks = 0
        self._tail_waste_slots = 0

    def check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what can never be served, with the numbers. `InvalidRequest`."""
        num_prompt_tokens = len(token_ids)
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        if strange := [t for t in token_ids if not 0 <= t < self.vocab_size]:
            raise InvalidRequest(f"token ids must be in [0, {self.vocab_size}), got {strange[0]}")
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
        if params.n > self.config.max_num_seqs:
            raise InvalidRequest(
                f"n must be at most max_num_seqs, got {params.n} and {self.config.max_num_seqs}"
            )

    def add(self, request: Request) -> None:
        """Queue a request. `InvalidRequest` for what can never be served."""
        self.check_request(request.prompt_token_ids, request.params)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it stands, and give its blocks back; also after a failed step."""
        self.scheduler.abort(request)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one step and return the requests that finished in it."""
        output = self.scheduler.schedule()
        self._count(output)
        logits = self.runner.execute(output)
        self.scheduler.complete(output)

        rows: list[int] = []
        sequences: list[Sequence] = []
        completing = (item.sequence for item in output.scheduled if item.completes)
        for row, sequence in enumerate(completing):
            samples = self.scheduler.fork(sequence)
            rows += [row] * len(samples)
            sequences += samples
        tokens = sample(logits[rows], [_sampling_row(sequence) for sequence in sequences])
        return self._extend(sequences, tokens)

    def stats(self) -> EngineStats:
        """What has been done so far."""
        pool = self.manager.stats()
        return EngineStats(
            num_prefill_tokens=self._num_prefill_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            num_preemptions_recompute=self.scheduler.num_preemptions,
            peak_blocks=self._peak_blocks,
            num_forks=pool.num_forks,
            num_copies=pool.num_copies,
            tail_waste_slots=self._tail_waste_slots,
            contiguous_slots=self._peak_samples * self.max_model_len,
            num_leaked_blocks=0 if self.has_work else pool.num_held_blocks + pool.num_fenced_blocks,
        )

    def _extend(self, sequences: Iterable[Sequence], tokens: Iterable[int]) -> list[Request]:
        finished = []
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            self._num_generated_tokens += 1
            if (reason := self._finish_reason(sequence, token)) is not None:
                self.scheduler.finish(sequence, reason)
                if sequence.request.is_finished:
                    finished.append(sequence.request)
        return finished

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.params
        if token in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if (
            sequence.num_output_tokens >= params.max_tokens
            or len(sequence.token_ids) >= self.max_model_len
        ):
            return FinishReason.LENGTH
        return None

    def _count(self, output: SchedulerOutput) -> None:
        """Count a step's work, and note the fullest moment of the pool."""
        self._num_steps += 1
        self._num_prefill_tokens += sum(map(_num_prompt_tokens, output.scheduled))
        self._peak_samples = max(self._peak_samples, len(self.scheduler.running))
        held = self.manager.stats().num_held_blocks
        if held > self._peak_blocks:
            self._peak_blocks = held
            self._tail_waste_slots = self._num_tail_waste_slots()

    def _num_tail_waste_slots(self) -> int:
        """Slots of last blocks that no known token will fill, for none of the block's holders."""
        block_size = self.manager.block_size
        wasted: dict[int, int] = {}
        for sequence in self.scheduler.running:
            table = self.manager.block_table(sequence.seq_id)
            unfilled = max(0, len(table) * block_size - len(sequence.token_ids))
            wasted[table[-1]] = min(unfilled, wasted.get(table[-1], block_size))
        return sum(wasted.values())


def _sampling_row(sequence: Sequence) -> SamplingRow:
    request = sequence.request
    return SamplingRow(
        request.params, request.seed, sequence.index, position=sequence.num_output_tokens
    )


def _num_prompt_tokens(item: ScheduledSequence) -> int:
    """How many of the scheduled tokens belong to the prompt."""
    num_prompt = len(item.sequence.request.prompt_token_ids)
    return max(0, min(item.stop, num_prompt) - item.start)
