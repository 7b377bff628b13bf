"""How `generate` and `demo` print their answers: tables for people, one object for machines."""

import json
from collections.abc import Sequence

from kvruntime.llm import LLM
from kvruntime.report import Answer, show_answers, show_stats, to_json

__all__ = ["show"]


def show(llm: LLM, answers: Sequence[Answer], *, as_json: bool) -> None:
    """Print every answer, and what the engine did for all of them."""
    if as_json:
        print(json.dumps(to_json(answers, llm), indent=2), flush=True)
    else:
        show_answers(answers)
        show_stats(llm)
