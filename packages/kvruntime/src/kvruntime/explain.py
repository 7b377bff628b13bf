"""The story of one request, in lines for a person.

Knows events and the step log. Does not know why a policy decided so: that stands in the events.
"""

from collections.abc import Iterable

from kvruntime.request import RequestOutput
from kvruntime.steps import StepRecord

__all__ = ["explain"]


def explain(answer: RequestOutput, log: Iterable[StepRecord]) -> str:
    """One line on the whole, then one for each event."""
    num_generated = sum(len(output.token_ids) for output in answer.outputs)
    ran = [
        record.step
        for record in log
        if any(request_id == answer.request_id for (request_id, _), _ in record.scheduled)
    ]
    steps = f", ran in {len(ran)} logged steps, {ran[0]} to {ran[-1]}" if ran else ""
    head = (
        f"request {answer.request_id}: {len(answer.prompt_token_ids)} prompt tokens, "
        f"{answer.num_cached_tokens} of them cached, {num_generated} generated{steps}"
    )
    return "\n".join([head, *(f"  {event}" for event in answer.events)])
