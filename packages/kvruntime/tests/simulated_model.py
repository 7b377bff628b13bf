"""A model whose keys and values are the tokens themselves, so that any wrong slot is seen.

`SimulatedRunner` stands in for `ModelRunner`: it moves and writes blocks as a step says, and then
reads every sequence's whole context back through its block table. What follows a context is a
function of its tokens. `answers` computes the same without blocks, batches or steps.
"""

import zlib
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvruntime import BeamSearchParams, EngineConfig
from kvruntime.beam_search import BeamSearch
from kvruntime.config import ModelConfig
from kvruntime.engine import Engine
from kvruntime.model_runner import StepLogits
from kvruntime.request import Request
from kvruntime.sampler import SamplingRow, sample
from kvruntime.steps import SchedulerOutput

VOCAB_SIZE = 32
EOS = 2
MODEL_LEN = 4096
_ROWS = torch.randn(1021, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2


def logits_after(token_ids: list[int]) -> torch.Tensor:
    """The logits [vocab_size] of what follows these tokens."""
    return _ROWS[zlib.crc32(array("I", token_ids).tobytes()) % len(_ROWS)]


FAILURES = ("before it moves anything", "after swaps", "after it has written")


class StepFailed(RuntimeError):
    """A step that fails because it was told to."""


class SimulatedRunner:
    """Carries out the steps of an engine on blocks that hold tokens and positions."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.blocks = np.full((num_blocks, block_size, 2), -1, np.int64)
        self.host = np.full((max(num_host_blocks, 1), block_size, 2), -1, np.int64)
        self.num_moved_blocks = 0
        self.fails: str | None = None  # at one of these points

    def execute(self, output: SchedulerOutput) -> StepLogits:
        """Move, copy, write, then read every context back."""
        self._fail_at(FAILURES[0])
        for source, destination in output.swaps_out:
            self.host[destination] = self.blocks[source]
        for source, destination in output.swaps_in:
            self.blocks[destination] = self.host[source]
        self.num_moved_blocks += len(output.swaps_out) + len(output.swaps_in)
        self._fail_at(FAILURES[1])
        for source, destination, num_tokens in output.copies:
            self.blocks[destination, :num_tokens] = self.blocks[source, :num_tokens]
        self._write(output)
        self._fail_at(FAILURES[2])
        last, whole = [], []
        for item, table in zip(output.scheduled, np.asarray(output.block_tables), strict=True):
            context = item.sequence.token_ids[: item.stop]
            found = self.blocks[table].reshape(-1, 2)[: item.stop]
            expected = np.stack([np.array(context), np.arange(item.stop)], axis=1)
            assert np.array_equal(found, expected), f"{item.sequence.seq_id} reads wrong keys"
            if item.completes:
                last.append(logits_after(context))
            if item.wants_logits:
                rows = [logits_after(context[: i + 1]) for i in range(item.start, item.stop)]
                whole.append(torch.stack(rows))
        empty = torch.empty(0, VOCAB_SIZE)
        return StepLogits(torch.stack(last) if last else empty, tuple(whole))

    def _fail_at(self, point: str) -> None:
        if self.fails == point:
            raise StepFailed(point)

    def _write(self, output: SchedulerOutput) -> None:
        slots = iter(output.slot_mapping)
        flat = self.blocks.reshape(-1, 2)
        for item in output.scheduled:
            for position, token_id in enumerate(item.token_ids, item.start):
                if (slot := next(slots)) >= 0:
                    flat[slot] = token_id, position
        assert next(slots, None) is None, "there are more slots than tokens"


def simulated_engine(config: EngineConfig) -> tuple[Engine, SimulatedRunner]:
    """An engine whose model is simulated."""
    model: Any = SimpleNamespace(
        config=ModelConfig.from_huggingface(
            {
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "max_position_embeddings": MODEL_LEN,
                "eos_token_id": EOS,
            }
        )
    )
    engine = Engine(model, config)
    manager = engine.manager
    runner = SimulatedRunner(manager.num_blocks, config.block_size, manager.num_host_blocks)
    engine.runner = runner  # type: ignore[assignment]  # it does what the engine asks of one
    return engine, runner


def answers(request: Request, max_model_len: int) -> list[list[int]]:
    """What a request must be answered with, by nothing but its tokens."""
    params = request.params
    max_tokens = min(params.max_tokens, max_model_len - len(request.prompt_token_ids))
    ends = frozenset(() if params.ignore_eos else (EOS,))
    if isinstance(params, BeamSearchParams):
        return _beams(request.prompt_token_ids, params, ends, max_tokens)
    outputs: list[list[int]] = []
    for index in range(params.n):
        output: list[int] = []
        while len(output) < max_tokens and not (output and output[-1] in ends):
            row = SamplingRow(params, request.seed, index, len(output))
            output += sample(logits_after(request.prompt_token_ids + output)[None], [row])
        outputs.append(output)
    return outputs


def _beams(
    prompt: list[int], params: BeamSearchParams, ends: frozenset[int], max_tokens: int
) -> list[list[int]]:
    search = BeamSearch(params, stop_token_ids=ends, max_tokens=max_tokens)
    beams: list[list[int]] = [[]]
    while beams:
        rows = [logits_after(prompt + beam).log_softmax(-1) for beam in beams]
        going = search.advance(beams, [search.candidates(row) for row in rows])
        beams = [[*beams[one.parent], one.token_id] for one in going]
    return [answer.token_ids for answer in search.finished[: params.n]]
