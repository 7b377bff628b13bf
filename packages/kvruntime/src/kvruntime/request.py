"""A request, the sequences that serve it, and what it is answered with.

Knows tokens and states. Does not know blocks, kernels or when anything runs.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvruntime.sampling_params import SamplingParams

__all__ = ["CompletionOutput", "FinishReason", "Request", "RequestOutput", "Sequence"]


class FinishReason(StrEnum):
    """Why a sample ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its samples. One sequence computes the prompt; it is forked for the others."""

    request_id: int
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    num_cached_tokens: int | None = None  # what was found when it was first admitted
    sequences: list["Sequence"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self, index=0, token_ids=list(self.prompt_token_ids)))

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return len(self.sequences) == self.params.n and all(s.is_finished for s in self.sequences)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: its tokens so far, and how many of them have been computed."""

    request: Request
    index: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def seq_id(self) -> tuple[int, int]:
        """What the block manager knows this sequence by."""
        return self.request.request_id, self.index

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known and not computed yet; the sequence runs until there are none."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None

    def fork(self, index: int) -> "Sequence":
        """Another sample that goes on from the same tokens."""
        child = Sequence(self.request, index, list(self.token_ids), self.num_computed_tokens)
        self.request.sequences.append(child)
        return child


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sample. `token_ids` includes the end-of-text token where there is one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, its samples in the order of their index."""

    request_id: int
    prompt: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
