"""Answers of a model in this process, token by token.

Knows engines and how tokens become text. Does not know terminals.
"""

import secrets
from collections.abc import Generator, Sequence
from itertools import count

from kvruntime.chat.session import Message, Turn
from kvruntime.detokenizer import Detokenizer
from kvruntime.errors import InvalidRequest
from kvruntime.llm import LLM
from kvruntime.request import Request
from kvruntime.sampling_params import SamplingParams

__all__ = ["LocalAnswerer"]


class LocalAnswerer:
    """Answers by an `LLM` that nobody else uses; each answer leaves its blocks to the next turn.

    `InvalidRequest` where the checkpoint has no chat template.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        if not llm.tokenizer.has_chat_template:
            raise InvalidRequest("this checkpoint has no chat template, so it cannot chat")
        self.llm = llm
        self._params = params
        self._request_ids = count()

    def answer(self, messages: Sequence[Message], turn: Turn) -> Generator[str, None, None]:
        """Run the engine a step at a time. `InvalidRequest` where the conversation does not fit."""
        tokenizer, engine = self.llm.tokenizer, self.llm.engine
        prompt = tokenizer.apply_chat_template(messages)
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        seed = secrets.randbits(64) if self._params.seed is None else self._params.seed
        request = Request(next(self._request_ids), prompt, token_ids, self._params, seed)
        engine.add(request)
        turn.num_prompt_tokens = len(token_ids)
        sequence, text = request.sequences[0], Detokenizer(tokenizer)
        try:
            while not request.is_finished:
                engine.step()
                shown = len(text.text)
                turn.num_cached_tokens = request.num_cached_tokens or 0
                for token_id in sequence.output_token_ids[turn.num_output_tokens :]:
                    text.append(token_id)
                    turn.num_output_tokens += 1
                if len(text.text) > shown:
                    yield text.text[shown:]
            turn.finish_reason = sequence.finish_reason
            shown = len(text.text)
            text.finish()
            if len(text.text) > shown:
                yield text.text[shown:]
        finally:
            if not request.is_finished:
                engine.abort(request)
