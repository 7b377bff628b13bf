"""What is asked: prompts of chosen lengths, prompts that share their beginnings, traces and files.

Knows token ids, words and the files that people have. Does not know servers, engines or clocks.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvblocks import KVBlocksError
from kvblocks.traces import Request, Trace, read_trace
from kvruntime.errors import InvalidRequest

__all__ = ["Asked", "Shape", "as_text", "prompts_of_file", "prompts_of_trace", "random_prompts"]

Content: TypeAlias = str | list[int] | list[dict[str, Any]]

# In most vocabularies of byte-pair encodings each of these is one token.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car"
)
_WORDS = tuple(_TEXT.split())
# Below it lie control tokens and single bytes.
_FIRST_ID = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: a text, token ids or messages; how many tokens at most, and when by its trace."""

    prompt: Content
    max_tokens: int
    arrival: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, and which ids there are.

    Each length is drawn evenly between (1 - `range_ratio`) and (1 + `range_ratio`) times what is
    given. `num_prefixes` beginnings of `prefix_len` tokens are shared by the requests in turn.
    """

    input_len: int = 64
    output_len: int = 32
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab_size: int = 30_000

    def __post_init__(self) -> None:
        for name, least in (
            ("input_len", 1),
            ("output_len", 1),
            ("prefix_len", 0),
            ("num_prefixes", 1),
            ("vocab_size", 2),
        ):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise InvalidRequest(f"range_ratio must be in [0, 1), got {self.range_ratio}")

    def ids(self, count: int, *seed: int) -> list[int]:
        """Token ids that follow from the seed, so that equal seeds give equal content."""
        first = _FIRST_ID if self.vocab_size > _FIRST_ID else 0
        drawn: list[int] = (
            np.random.default_rng(seed).integers(first, self.vocab_size, count).tolist()
        )
        return drawn


def random_prompts(num_requests: int, shape: Shape, *, seed: int = 0) -> list[Asked]:
    """Prompts of random token ids; with `prefix_len`, requests share their beginnings in turn.

    >>> first, second = random_prompts(2, Shape(input_len=4, prefix_len=3))
    >>> first.prompt[:3] == second.prompt[:3], first.prompt[3:] == second.prompt[3:]
    (True, False)
    """
    chance = np.random.default_rng((seed, 0))
    prefixes = [shape.ids(shape.prefix_len, seed, 1, i) for i in range(shape.num_prefixes)]
    asked = []
    for number in range(num_requests):
        num_input = _drawn(chance, shape.input_len, shape.range_ratio)
        num_output = _drawn(chance, shape.output_len, shape.range_ratio)
        own = shape.ids(num_input, seed, 2, number)
        asked.append(Asked(prefixes[number % shape.num_prefixes] + own, num_output))
    return asked


def prompts_of_trace(
    path: Path, shape: Shape, *, num_requests: int, length_scale: float = 1.0, seed: int = 0
) -> list[Asked]:
    """The first requests of a trace, with prompts made up to its lengths, and its times from 0.

    Reads the formats of `kvblocks.traces`. Where a trace names the blocks of its prompts, equal names
    become equal tokens, so that a cache finds what it would have found. `length_scale` multiplies all
    lengths, those of blocks included; `shape` says which token ids there are.

    Raises `InvalidRequest` for a file that is no trace, and for times that are missing or unordered.
    """
    if not length_scale > 0:
        raise InvalidRequest(f"length_scale must be above 0, got {length_scale}")
    try:
        trace = read_trace(path)
    except KVBlocksError as error:
        raise InvalidRequest(str(error)) from error
    writer = _TraceWriter(trace, shape, length_scale, seed)
    first = trace.requests[:num_requests]
    start = min((one.timestamp for one in first if one.timestamp is not None), default=0.0)
    asked = [
        Asked(
            writer.prompt(number, request),
            max(1, round(request.num_output_tokens * length_scale)),
            None if request.timestamp is None else request.timestamp - start,
        )
        for number, request in enumerate(first)
    ]
    if trace.has_timestamps:
        asked.sort(key=lambda one: one.arrival or 0.0)
    return asked


def prompts_of_file(path: Path, shape: Shape, *, num_requests: int) -> list[Asked]:
    """The prompts of a file, one a line, again from the first when they are too few.

    A line is a text, or a JSON object with a `prompt` (a text or token ids) or `messages`, and perhaps
    `max_tokens`; without it the output is `shape.output_len` long. `InvalidRequest` names a bad line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} must be UTF-8 ({error})") from error
    found = [
        _asked(line, f"{path}, line {number}", shape.output_len)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise InvalidRequest(f"{path} must hold at least one prompt")
    return [found[number % len(found)] for number in range(num_requests)]


def as_text(asked: Asked) -> Asked:
    """The same request with words instead of token ids, about one word a token.

    >>> as_text(Asked([0, 1, 65], 8)).prompt
    'time year year'
    """
    prompt = asked.prompt
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        words = (_WORDS[int(item) % len(_WORDS)] for item in prompt if isinstance(item, int))
        return replace(asked, prompt=" ".join(words))
    return asked


class _TraceWriter:
    """Turns the names of blocks into tokens, each name into the same ones."""

    def __init__(self, trace: Trace, shape: Shape, scale: float, seed: int) -> None:
        self._shape = shape
        self._scale = scale
        self._seed = seed
        self._block_size = max(1, round((trace.block_size or 1) * scale))
        # What a name stands for depends on all before it, so equal paths get equal numbers.
        self._numbers: dict[tuple[Hashable, ...], int] = {}

    def prompt(self, number: int, request: Request) -> list[int]:
        """Token ids of a request: those of its named blocks, and its own behind them."""
        num_tokens = max(1, round(request.num_input_tokens * self._scale))
        prompt: list[int] = []
        parent: int | None = None
        for name in request.blocks:
            if len(prompt) >= num_tokens:
                break
            parent = self._numbers.setdefault((request.scope, parent, name), len(self._numbers))
            prompt += self._shape.ids(self._block_size, self._seed, 3, parent)
        own = self._shape.ids(max(0, num_tokens - len(prompt)), self._seed, 4, number)
        return (prompt + own)[:num_tokens]


def _drawn(chance: np.random.Generator, length: int, ratio: float) -> int:
    """A length around another."""
    if ratio == 0:
        return length
    low, high = max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))
    return int(chance.integers(low, high + 1))


def _asked(line: str, place: str, output_len: int) -> Asked:
    if not line.lstrip().startswith("{"):
        return Asked(line, output_len)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: not JSON ({error})") from error
    max_tokens = row.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise InvalidRequest(f"{place}: max_tokens must be a positive integer, got {max_tokens!r}")
    given = [row[key] for key in ("prompt", "messages") if key in row]
    if len(given) != 1 or not _is_content(given[0]):
        raise InvalidRequest(
            f"{place}: an object must have a prompt, a text or token ids, or else messages"
        )
    return Asked(given[0], max_tokens)


def _is_content(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, Sequence) or not value:
        return False
    return all(type(item) is int for item in value) or all(isinstance(m, dict) for m in value)
