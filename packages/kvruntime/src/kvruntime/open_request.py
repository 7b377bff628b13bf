"""A request that runs, and how much of its answers has been told.

Knows how tokens become pieces of text, and what of a step is news. Does not know threads, or who
hears it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvruntime.answer_stream import AnswerStream, Delta
from kvruntime.detokenizer import Detokenizer
from kvruntime.observer import Observer
from kvruntime.request import Request
from kvruntime.request import Sequence as Sample
from kvruntime.sampling_params import SamplingParams
from kvruntime.tokenizer import Tokenizer

__all__ = ["OpenRequest"]


@dataclass(slots=True)
class _Sent:
    """How much of one answer has been delivered."""

    detokenizer: Detokenizer
    num_tokens: int = 0
    num_characters: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class OpenRequest:
    """A request that runs, the stream it is answered on, and how far that is."""

    request: Request
    stream: AnswerStream
    tokenizer: Tokenizer
    submitted: float
    is_admitted: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)
    num_seen: dict[int, int] = field(default_factory=dict)  # tokens that observers know, a sample
    last_seen: dict[int, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The tokens generated so far, of all its answers."""
        return sum(sample.num_output_tokens for sample in self.request.sequences)

    @property
    def end_reason(self) -> str:
        """What ended a finished request: an error or its length if that ended any answer."""
        reasons = {sample.finish_reason for sample in self.request.answers()}
        return next(reason for reason in ("error", "length", "stop") if reason in reasons)

    def deltas(self) -> list[Delta]:
        """What is new of each answer; from now on it is not new."""
        found = (self._delta(index, sample) for index, sample in enumerate(self._shown()))
        return [delta for delta in found if delta is not None]

    def deliver(self, deltas: Sequence[Delta], is_over: bool) -> None:  # noqa: FBT001 -- by call_soon
        """Hand deltas to the reader, with what is known of the prompt. On the event loop."""
        self.stream.num_cached_tokens = self.request.num_cached_tokens or 0
        self.stream.prompt_logprobs = self.request.prompt_logprobs
        self.stream.deliver(deltas, is_over=is_over)

    def observe(self, observers: Sequence[Observer], started: float, now: float) -> None:
        """Tell of a step that began and ended then: who was admitted, which tokens came."""
        if not self.is_admitted:
            self.is_admitted = True
            for observer in observers:
                observer.admitted(started - self.submitted)
        for sample in self.request.sequences:
            if sample.num_output_tokens <= self.num_seen.get(sample.index, 0):
                continue
            self.num_seen[sample.index] = sample.num_output_tokens
            before = self.last_seen.get(sample.index)
            for observer in observers:
                if before is not None:
                    observer.next_token(now - before)
                elif not self.last_seen:
                    observer.first_token(now - self.submitted)
            self.last_seen[sample.index] = now

    def _shown(self) -> Sequence[Sample]:
        """The answers there are to show; where they are compared, once all have ended."""
        request = self.request
        if request.is_finished:
            return request.answers()
        is_compared = request.params.num_sequences > request.params.n
        if request.beam_search is not None or is_compared or not request.is_forked:
            return ()
        return request.sequences

    def _delta(self, index: int, sample: Sample) -> Delta | None:
        sent = self.sent.get(index)
        if sent is None:
            detokenizer = sample.detokenizer or Detokenizer(self.tokenizer)
            sent = self.sent[index] = _Sent(detokenizer)
        new = sample.token_ids[len(self.request.prompt_token_ids) + sent.num_tokens :]
        if sent.is_finished or not (new or sample.is_finished):
            return None
        if sample.detokenizer is None:
            for token_id in new:
                sent.detokenizer.append(token_id)
        if sample.is_finished:
            sent.detokenizer.finish()
        text = sent.detokenizer.stable_text
        params = self.request.params
        wants_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        delta = Delta(
            index,
            text[sent.num_characters :],
            tuple(new),
            tuple(sample.logprobs[sent.num_tokens :]) if wants_logprobs else (),
            sample.finish_reason,
            sample.stop_reason,
        )
        sent.num_tokens += len(new)
        sent.num_characters = len(text)
        sent.is_finished = sample.is_finished
        return delta
