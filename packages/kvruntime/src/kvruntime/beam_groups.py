"""The beams of running requests: which sequence goes on as which beam.

Knows sequences, and that beams share blocks by forks. Does not know scores, nor how logits came.
"""

from collections.abc import Sequence as Rows

import torch

from kvruntime.beam_search import Continuation
from kvruntime.logits_processors import process
from kvruntime.request import FinishReason, Request, Sequence
from kvruntime.scheduler import Scheduler

__all__ = ["BeamGroups"]


class BeamGroups:
    """Lets the beams of each request take their steps together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_generated_tokens = 0
        self._scheduler = scheduler

    def advance(self, logits: torch.Tensor, beams: Rows[Sequence]) -> list[Request]:
        """Note the candidates of beams by their logits [B, vocab_size]; requests that ended.

        A group takes its step once all its beams have their candidates.
        """
        if not beams:
            return []
        # As in transformers, what changes logits of samples changes log-probabilities of beams.
        logprobs = process(logits.log_softmax(dim=-1), [beam.history for beam in beams])
        for beam, row in zip(beams, logprobs, strict=True):
            assert beam.request.beam_search is not None, "it is a beam"
            beam.candidates = beam.request.beam_search.candidates(row)
        groups = dict.fromkeys(beam.request for beam in beams)
        return [request for request in groups if self._step(request)]

    def _step(self, request: Request) -> bool:
        """Let a group take one step, if all its beams have their candidates; whether it ended."""
        search, beams = request.beam_search, request.sequences
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        if search is None or len(candidates) < len(beams):
            return False
        going = search.advance([beam.output_token_ids for beam in beams], candidates)
        self.num_generated_tokens += len(going)
        request.sequences = self._follow(beams, going)
        request.is_forked = True
        if going:
            return False
        for index, answer in enumerate(search.finished):
            reason = FinishReason.STOP if answer.is_stopped else FinishReason.LENGTH
            token_ids = [*request.prompt_token_ids, *answer.token_ids]
            request.sequences.append(
                Sequence(
                    request,
                    index,
                    token_ids,
                    finish_reason=reason,
                    cumulative_logprob=answer.score,
                )
            )
        return True

    def _follow(self, beams: list[Sequence], going: list[Continuation]) -> list[Sequence]:
        """Fork and drop beams so that each that goes on has a sequence; they share what they can."""
        request = beams[0].request
        request.sequences = []
        children: list[Sequence] = []
        used: set[int] = set()
        for one in going:
            parent = beams[one.parent]
            child = self._scheduler.fork(parent) if one.parent in used else parent
            used.add(one.parent)
            children.append(child)
        for place, beam in enumerate(beams):
            if place not in used:
                self._scheduler.drop(beam)
        # Tokens come last: a fork shares all that its parent has computed, and no more.
        for child, one in zip(children, going, strict=True):
            child.token_ids.append(one.token_id)
            child.candidates = None
        return children
