"""How many tokens an engine in this process generates, when all requests are there at once.

Knows `LLM` and clocks. Does not know servers.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvruntime.bench.prompts import Asked
from kvruntime.errors import InvalidRequest
from kvruntime.llm import LLM
from kvruntime.sampling_params import SamplingParams
from kvruntime.stats import EngineStats

__all__ = ["Throughput", "measure_throughput"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What one call of `LLM.generate` did. `cpu_seconds` are those of the whole process."""

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seconds: float
    cpu_seconds: float
    stats: EngineStats

    def a_second(self, count: int) -> float:
        """So many a second by the clock on the wall."""
        return count / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """One object for machines."""
        return {
            **asdict(self),
            "requests_a_second": self.a_second(self.num_requests),
            "output_tokens_a_second": self.a_second(self.num_output_tokens),
            "total_tokens_a_second": self.a_second(self.num_prompt_tokens + self.num_output_tokens),
        }


def measure_throughput(llm: LLM, asked: Sequence[Asked], *, ignore_eos: bool = True) -> Throughput:
    """Answer all prompts in one batch, greedily; loading is not counted.

    `ignore_eos` lets every answer be as long as was asked. `InvalidRequest` for what does not fit.
    """
    prompts = [_prompt(one) for one in asked]
    params = [
        SamplingParams(max_tokens=one.max_tokens, temperature=0, ignore_eos=ignore_eos)
        for one in asked
    ]
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, params)
    return Throughput(
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
        stats=llm.stats,
    )


def _prompt(asked: Asked) -> str | list[int]:
    prompt = asked.prompt
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) < len(prompt):
        raise InvalidRequest("throughput is measured with texts or token ids, not with messages")
    return ids
