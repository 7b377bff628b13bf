"""vLLM's first block manager, the one that forks: `SelfAttnBlockSpaceManager` without caching.

It is measured for forks alone; the manager that took its place is in `vllm_v1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.core.block_manager import SelfAttnBlockSpaceManager
from vllm.inputs import token_inputs
from vllm.sequence import Logprob, SequenceGroup, SequenceStatus
from vllm.sequence import Sequence as VLLMSequence

from benchmarks.allocator.adapters.base import Adapter, Can


class VLLMV0(Adapter):
    """Sequence objects are the engine's; only calls of the block manager are timed for forks."""

    abilities = frozenset({Can.FORK})

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        super().__init__(num_blocks, block_size, caching=caching)
        self.manager = SelfAttnBlockSpaceManager(
            block_size, num_blocks, num_cpu_blocks=0, watermark=0.0, enable_caching=caching
        )

    def admit(self, seq_id: int, prompt: list[int]) -> tuple[Any, int]:
        sequence = VLLMSequence(seq_id, token_inputs(prompt), self.block_size)
        group = SequenceGroup(str(seq_id), [sequence], arrival_time=0.0)
        if self.manager.can_allocate(group).name != "OK":
            raise MemoryError("vLLM has too few free blocks")
        self.manager.allocate(group)
        sequence.status = SequenceStatus.RUNNING
        return sequence, 0

    def free(self, seq: Any) -> None:
        self.manager.free(seq)

    def prepare_fork(self, parent: Any, child_id: int) -> Any:
        return parent.fork(child_id)

    def fork(self, parent: Any, child: Any) -> Any:
        self.manager.fork(parent, child)
        return child

    def prepare_append(self, seqs: Sequence[Any], tokens: Sequence[int]) -> None:
        for seq, token in zip(seqs, tokens, strict=True):
            seq.append_token_id(token, {token: Logprob(0.0)})

    def append_to_forks(self, seqs: Sequence[Any], tokens: Sequence[int]) -> int:
        del tokens  # the sequences have them already
        return sum(len(self.manager.append_slots(seq, num_lookahead_slots=0)) for seq in seqs)

    def table(self, seq: Any) -> list[int]:
        return self.manager.get_block_table(seq)


ADAPTER = VLLMV0
