"""Offline use: a model, prompts in, finished texts out.

Knows checkpoints, tokenizers and the engine, and turns text into requests and back. Does not know
servers, terminals or files other than the checkpoint.
"""

import os
import secrets
import time
from collections import abc
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from numbers import Integral
from operator import index
from reprlib import repr as shortened
from typing import Any, TypeAlias, cast

import torch

import kvkernels
from kvruntime.device import require_device
from kvruntime.engine import Engine
from kvruntime.engine_config import EngineConfig
from kvruntime.errors import InvalidRequest
from kvruntime.explain import explain
from kvruntime.models import Llama
from kvruntime.request import CompletionOutput, Request, RequestOutput, Sequence
from kvruntime.sampling_params import BeamSearchParams, SamplingParams
from kvruntime.stats import EngineStats
from kvruntime.steps import StepRecord
from kvruntime.weights import Checkpoint, Progress, load_checkpoint

__all__ = ["LLM"]

Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | BeamSearchParams
Prompt: TypeAlias = str | SequenceOf[int]


class LLM:
    """A model that answers batches of prompts on paged memory.

    Args:
        model: "smollm2", a GGUF file, a folder of Hugging Face, or a loaded `Checkpoint`.
        config: the engine's settings.
        num_threads: threads of torch and of the kernels, a setting of the whole process.
        progress: called as the checkpoint loads and as tokens are generated.

    Example::

        llm = LLM("smollm2")
        [answer] = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]])
        print(answer.outputs[0].text)

    Raises `CheckpointError` for a checkpoint that cannot be used, `InvalidRequest` for prompts and
    settings that cannot be served; nothing is queued then. A call that ends otherwise, by an
    interrupt say, drops its requests: the next call starts afresh.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint,
        config: EngineConfig | None = None,
        *,
        num_threads: int = 1,
        progress: Progress | None = None,
    ) -> None:
        if num_threads < 1:
            raise InvalidRequest(f"num_threads must be at least 1, got {num_threads}")
        config = config or EngineConfig()
        require_device(config.device)
        checkpoint = (
            model if isinstance(model, Checkpoint) else load_checkpoint(model, progress=progress)
        )
        torch.set_num_threads(num_threads)
        kvkernels.set_num_threads(num_threads)
        self.tokenizer = checkpoint.tokenizer
        self.engine = Engine(
            Llama(checkpoint.config, checkpoint.tensors, device=config.device),
            config,
            checkpoint.tokenizer,
        )
        self._progress = progress
        self._request_ids = count()
        self._seconds = 0.0

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params | SequenceOf[Params] | None = None,
        *,
        priority: int | SequenceOf[int] = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, texts or token ids, batched together; outputs are in their order.

        `params` and `priority` are one for all prompts, or one for each. Prompts of different
        `cache_salt` share no cached blocks.
        """
        encoded = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._answer(encoded, params, priority, cache_salt)

    def chat(
        self,
        conversations: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: Params | SequenceOf[Params] | None = None,
        *,
        priority: int | SequenceOf[int] = 0,
        cache_salt: str | None = None,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's own chat template.

        `tools` are written as for the OpenAI API; `kvruntime.tools` finds their calls in an answer.
        """
        texts = [
            self.tokenizer.apply_chat_template(conversation, tools=tools)
            for conversation in _conversations(conversations)
        ]
        encoded = [(text, self.encode(text, add_special_tokens=False)) for text in texts]
        return self._answer(encoded, params, priority, cache_salt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, as `generate` would; a chat's has its special tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of a command line that are no text
            raise InvalidRequest(
                f"a prompt must be valid Unicode, got {text[error.start]!r}"
            ) from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def explain(self, answer: RequestOutput) -> str:
        """Say what happened to a request and why: one line a wait, admission, preemption and end.

        With the steps of the engine in which it ran, as far as the step log reaches back.
        """
        return explain(answer, self.step_log)

    @property
    def step_log(self) -> tuple[StepRecord, ...]:
        """The last steps, `log_steps` of them: who ran, what happened to whom, and the pool."""
        return tuple(self.engine.scheduler.log)

    @property
    def stats(self) -> EngineStats:
        """What the engine did since it was made."""
        return self.engine.stats()

    @property
    def seconds(self) -> float:
        """The time spent generating, loading apart."""
        return self._seconds

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.encode(prompt)
        try:
            return None, [index(token_id) for token_id in prompt]
        except TypeError:
            raise InvalidRequest(
                f"a prompt must be a text or a sequence of token ids, got {shortened(prompt)}"
            ) from None

    def _answer(
        self,
        encoded: SequenceOf[tuple[str | None, list[int]]],
        params: Params | SequenceOf[Params] | None,
        priority: int | SequenceOf[int],
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        each = _one_each("params", SamplingParams() if params is None else params, len(encoded))
        priorities = _one_each("priority", priority, len(encoded))
        constraints = [
            self.engine.check_request(token_ids, chosen)
            for (_, token_ids), chosen in zip(encoded, each, strict=True)
        ]
        drawn = secrets.randbits(64)  # one for all, so that equal prompts have equal answers
        requests = [
            Request(
                next(self._request_ids),
                self._text(text, token_ids),
                token_ids,
                chosen,
                _seed(chosen, drawn),
                rank,
                cache_salt,
                constraint=constraint,
            )
            for (text, token_ids), chosen, rank, constraint in zip(
                encoded, each, priorities, constraints, strict=True
            )
        ]
        try:
            for request in requests:
                self.engine.add(request)
            self._run(sum(one.params.num_sequences * one.params.max_tokens for one in requests))
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return [self._output(request) for request in requests]

    def _text(self, text: str | None, token_ids: list[int]) -> str:
        """The text of a prompt; one that was given as ids is decoded once the ids are checked."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False) if text is None else text

    def _run(self, num_tokens: int) -> None:
        start, done = time.perf_counter(), self.stats.num_generated_tokens
        while self.engine.has_work:
            self.engine.step()
            if self._progress:
                generated = self.stats.num_generated_tokens - done
                self._progress("generating tokens", generated, num_tokens)
        if self._progress:
            self._progress("generating tokens", num_tokens, num_tokens)
        self._seconds += time.perf_counter() - start

    def _output(self, request: Request) -> RequestOutput:
        outputs = tuple(
            self._completion(index, sequence) for index, sequence in enumerate(request.answers())
        )
        params = request.params
        wants_prompt = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            request.num_cached_tokens or 0,
            outputs,
            tuple(request.prompt_logprobs or [None]) if wants_prompt else None,
            tuple(request.events),
        )

    def _completion(self, index: int, sequence: Sequence) -> CompletionOutput:
        token_ids, reason = sequence.output_token_ids, sequence.finish_reason
        assert reason is not None, "a request is answered when all its samples have ended"
        if sequence.detokenizer is None:
            text = self.tokenizer.decode(token_ids)
        else:
            sequence.detokenizer.finish()
            text = sequence.detokenizer.text
        params = sequence.request.params
        is_beam = isinstance(params, BeamSearchParams)
        wants_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        is_counted = is_beam or bool(sequence.logprobs)
        return CompletionOutput(
            index,
            text,
            token_ids,
            reason,
            sequence.stop_reason,
            sequence.cumulative_logprob if is_counted else None,
            tuple(sequence.logprobs) if wants_logprobs else None,
        )


def _seed(params: Params, drawn: int) -> int:
    chosen = params.seed if isinstance(params, SamplingParams) else 0  # beams know no chance
    return drawn if chosen is None else chosen


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(given, abc.Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{name} must be one, or one a prompt, got {len(given)} for {count}")
    return list(given)


def _listed(prompts: Prompt | SequenceOf[Prompt]) -> SequenceOf[Prompt]:
    """One prompt is a list of one: a text, or a sequence of token ids."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [cast("Prompt", prompts)]
    return cast("SequenceOf[Prompt]", prompts)


def _conversations(
    conversations: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
) -> SequenceOf[SequenceOf[Message]]:
    """One conversation is a list of one: its first element is a message."""
    listed: SequenceOf[Any] = conversations
    if conversations and isinstance(conversations[0], Mapping):
        listed = [conversations]
    for conversation in listed:
        if not conversation or not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidRequest(
                f"a conversation must be a list of messages, each with a role and a content, "
                f"got {shortened(conversation)}"
            )
    return listed
