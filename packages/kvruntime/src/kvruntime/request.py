"""A request, the sequences that serve it, and what it is answered with.

Knows tokens and states. Does not know blocks, kernels or when anything runs.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvruntime.beam_search import BeamSearch, Candidates
from kvruntime.detokenizer import Detokenizer
from kvruntime.guidance import Constraint, Matcher
from kvruntime.logits_processors import History
from kvruntime.sampler import TokenLogprobs
from kvruntime.sampling_params import BeamSearchParams, SamplingParams

__all__ = ["CompletionOutput", "Event", "FinishReason", "Request", "RequestOutput", "Sequence"]


class FinishReason(StrEnum):
    """Why a sample ended: in the words of the OpenAI API, and "error" for what could not go on."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class Event(NamedTuple):
    """Something that happened to a sequence in a step, and why."""

    step: int
    seq_id: tuple[int, int]
    kind: str
    detail: str

    @property
    def subject(self) -> str:
        """The request and its sample, as "3.1"."""
        request_id, index = self.seq_id
        return f"{request_id}.{index}"

    @property
    def what(self) -> str:
        """What happened, and why."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def __str__(self) -> str:
        return f"step {self.step}: {self.subject} {self.what}"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its answers. One sequence computes the prompt; it is forked for the others.

    `priority` counts where the engine's policy is "priority": lower values go first. Prompts of
    different `cache_salt` share no cached blocks.
    """

    request_id: int
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    seed: int
    priority: int = 0
    cache_salt: str | None = None
    arrival: int = 0  # its place among all requests of an engine
    num_cached_tokens: int | None = None  # what was found when it was first admitted
    num_bypassed: int = 0  # later requests that were admitted while this one had no room
    num_preemptions: int = 0
    sequences: list["Sequence"] = field(default_factory=list)
    is_forked: bool = False  # the sequences of all answers exist
    num_sequences: int = 0  # that it ever had
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    beam_search: BeamSearch | None = None
    events: list[Event] = field(default_factory=list)
    end_token_ids: frozenset[int] = frozenset()  # those that end an answer
    constraint: Constraint | None = None  # what its answers must be
    # What its parameters ask for at every token, looked up once.
    is_greedy: bool = field(init=False)
    changes_logits: bool = field(init=False)
    keeps_logprobs: bool = field(init=False)
    name: str = ""  # what its client knows it by

    def __post_init__(self) -> None:
        params = self.params
        self.changes_logits = params.changes_logits
        self.is_greedy = self.keeps_logprobs = False
        if isinstance(params, SamplingParams):
            self.is_greedy = params.is_greedy
            self.keeps_logprobs = params.logprobs is not None or params.num_sequences > params.n
        self.sequences.append(Sequence(self, self.take_index(), list(self.prompt_token_ids)))

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return self.is_forked and all(s.is_finished for s in self.sequences)

    @property
    def num_seats(self) -> int:
        """How many sequences it may run side by side."""
        if self.is_forked and self.beam_search is None:
            return sum(not sequence.is_finished for sequence in self.sequences)
        return self.params.num_sequences

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of tokens of the prompt are still to come."""
        params = self.params
        return (
            isinstance(params, SamplingParams)
            and params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < len(self.prompt_token_ids)
        )

    def take_index(self) -> int:
        """The index of a new sequence: that of a sample is its place among the answers."""
        self.num_sequences += 1
        return self.num_sequences - 1

    def answers(self) -> list["Sequence"]:
        """The n sequences that a finished request is answered with, in order."""
        if self.params.num_sequences == self.params.n or self.beam_search is not None:
            return self.sequences[: self.params.n]
        return sorted(self.sequences, key=Sequence.logprob_per_token, reverse=True)[: self.params.n]


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer of a request: its tokens so far, and how many of them have been computed."""

    request: Request
    index: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    detokenizer: Detokenizer | None = None
    matcher: Matcher | None = None  # of a sample with structured outputs
    candidates: Candidates | None = None  # of a beam, until the other beams have theirs
    has_run: bool = False
    is_swapped: bool = False
    is_dropped: bool = False  # it ended or was aborted, perhaps while a step that has it is open
    obstacle: str = ""  # what kept it from being admitted when it was last its turn
    seq_id: tuple[int, int] = field(init=False)  # what the block manager knows it by

    def __post_init__(self) -> None:
        self.seq_id = self.request.request_id, self.index

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def history(self) -> History:
        """What its next token follows."""
        request = self.request
        return History(
            request.params, request.prompt_token_ids, self.output_token_ids, request.end_token_ids
        )

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known and not computed yet; the sequence runs until there are none."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None

    def logprob_per_token(self) -> float:
        """What samples are compared by."""
        return self.cumulative_logprob / self.num_output_tokens

    def fork(self) -> "Sequence":
        """Another answer that goes on from the same tokens; it joins its request's sequences."""
        child = Sequence(
            self.request,
            self.request.take_index(),
            list(self.token_ids),
            self.num_computed_tokens,
            has_run=self.has_run,
        )
        self.request.sequences.append(child)
        return child


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished answer.

    `token_ids` includes the token that ended it, where there is one; `text` ends before the stop
    text. `stop_reason` is that text, or the stop token, or what the error was. `cumulative_logprob` is the summed
    log-probability of the tokens where `logprobs` or `best_of` asked for it; of a beam, its score.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, its answers in the order of their index.

    `events` says when it was admitted, and when and why it had to wait or was preempted; outputs
    that differ in nothing else are equal.
    """

    request_id: int
    prompt: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    events: tuple[Event, ...] = field(default=(), compare=False)
