"""The tokens that a constraint allows next, through the library llguidance.

A constraint is compiled once for a tokenizer; each sample has a matcher of its own, which follows
the tokens that are chosen. A matcher depends on nothing else, so it stays right whatever becomes of
the sample's blocks.

Knows grammars and token masks. Does not know requests, chance or why a sample runs.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvruntime.errors import InvalidRequest, MissingDependency
from kvruntime.structured_outputs import StructuredOutputsParams
from kvruntime.tokenizer import Tokenizer

__all__ = ["Constraint", "Guidance", "Matcher", "constrain"]

_MAX_LATEST = 32  # beside those of requests
# A row of an Earley parser: with the library's 2,000 an ambiguous grammar takes half a second for a
# token, in which nobody else's is computed.
_MAX_ITEMS_IN_ROW = 500
_MAX_LEXER_STATES = 25_000  # one or two kilobytes each, for each constraint that is kept
_WHITESPACE = r"[ \t\r\n]{0,32}"


class Guidance:
    """Compiles constraints for the tokens of one model. Building it costs a fraction of a second.

    Args:
        tokenizer: byte-level BPE, or SentencePiece's BPE with byte fallback.
        vocab_size: columns of the logits.
        eos_token_ids: what ends an answer whose text is complete.

    Raises `MissingDependency` without the package llguidance, `InvalidRequest` where it cannot read
    the tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._library = _llguidance()
        self._vocab_size = vocab_size
        try:
            self._tokens = self._library.LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # the library raises no narrower type
            raise InvalidRequest(
                f"structured outputs are not available with this tokenizer: {error}"
            ) from error
        self._limits = self._library.LLParserLimits(
            max_items_in_row=_MAX_ITEMS_IN_ROW,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        self._latest: OrderedDict[StructuredOutputsParams, Constraint] = OrderedDict()
        self._lock = Lock()

    def constraint(self, params: StructuredOutputsParams) -> Constraint:
        """Compile a constraint.

        The last constraints are kept: one that was seen lately costs microseconds, a new one
        milliseconds, a very large one a second. For any thread. `InvalidRequest` with the library's
        reason for a constraint that it does not take.
        """
        with self._lock:
            found = self._latest.get(params)
        if found is None or found.is_used_up:  # compiled so long that others shall not wait
            found = Constraint(partial(self._compile, params), self._vocab_size)
        with self._lock:
            self._latest[params] = found
            self._latest.move_to_end(params)
            if len(self._latest) > _MAX_LATEST:
                self._latest.popitem(last=False)
        return found

    def _compile(self, params: StructuredOutputsParams) -> Any:
        try:
            grammar = _grammar(self._library, params)
        except ValueError as error:  # a schema that is nested too deeply
            raise _refusal(params, error) from error
        matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        return matcher


class Constraint:
    """What answers must be, compiled; requests that ask for the same may share it."""

    def __init__(self, compile_: Callable[[], Any], vocab_size: int) -> None:
        self._compile = compile_
        self._vocab_size = vocab_size
        self._compiled: Any = compile_()

    @property
    def is_used_up(self) -> bool:
        """Whether an answer has met the limit of what is worked out once for all."""
        return self._compiled is None

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer; compiles again what is used up."""
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile()
        return Matcher(compiled.deep_copy(), self._vocab_size, self._renew)

    def _renew(self) -> Any:
        """Compile again; nobody gets any more of what was compiled before."""
        self._compiled = None
        return self._compile()


class Matcher:
    """Follows one answer, and says which tokens may come next.

    What the library works out on the way it keeps for all answers of one constraint, within a
    limit. An answer that meets it goes on with all of it to itself, so that what others have used
    up does not decide what becomes of it.
    """

    def __init__(self, matcher: Any, vocab_size: int, renew: Callable[[], Any]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._renew: Callable[[], Any] | None = renew
        self._token_ids: list[int] = []

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, bool [vocab_size]; an end-of-text token where it may end."""
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._starts_afresh():
            packed = self._matcher.compute_bitmask()
        bits = np.unpackbits(
            np.frombuffer(packed, np.uint8), count=self._vocab_size, bitorder="little"
        )
        return bits.view(np.bool_)

    def advance(self, token_id: int) -> None:
        """Follow a token that was allowed."""
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id) and self._matcher.is_error():
            self._starts_afresh()

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing can follow, or cannot be followed further."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why the answer cannot be followed further; empty as long as it can."""
        return str(self._matcher.get_error())

    def _starts_afresh(self) -> bool:
        """Follow the answer again from its beginning, once; whether it can go on."""
        if self._renew is None:
            return False
        self._matcher = self._renew()
        self._renew = None
        for token_id in self._token_ids:
            self._matcher.compute_bitmask()  # as if nobody else had ever asked
            self._matcher.consume_token(token_id)
        return not self._matcher.is_error()


def constrain(
    logits: torch.Tensor, raw: torch.Tensor, matchers: Sequence[Matcher | None]
) -> torch.Tensor:
    """Return logits [R, vocab_size] that leave each row the tokens that its matcher allows.

    Where they leave none, since a bias or a minimal length forbids what is allowed, the row of the
    model's own logits `raw` is taken: what an answer must be goes before what is wished of it.
    Rows without a matcher cost nothing.
    """
    guided = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not guided:
        return logits
    allowed = np.stack([matcher.allowed() for matcher in matchers if matcher is not None])
    forbidden = torch.from_numpy(~allowed)
    rows = logits[guided].masked_fill(forbidden, -torch.inf)
    is_empty = (rows == -torch.inf).all(dim=-1)
    if is_empty.any():
        emptied = list(compress(guided, is_empty.tolist()))
        rows[is_empty] = raw[emptied].masked_fill(forbidden[is_empty], -torch.inf)
    result = logits.clone()
    result[guided] = rows
    return result


_NAMES = {
    "json": "json schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json object",
}


def _grammar(library: Any, params: StructuredOutputsParams) -> str:
    """A constraint in the library's own form."""
    of = library.LLMatcher
    match params.kind:
        case "regex":
            # As in JSON schemas, \d and \w are ASCII.
            regex = library.regex_to_lark(params.regex, "dw")
            grammar = of.grammar_from_lark(f"start: /{regex}/")
        case "grammar":
            grammar = of.grammar_from_lark(params.grammar)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in params.choice or ())
            grammar = of.grammar_from_lark(f"start: {' | '.join(texts)}")
        case _:
            schema = {"type": "object"} if params.json is None else params.json
            grammar = of.grammar_from_json_schema(schema, overrides=_json_options(params))
    return str(grammar)


def _refusal(params: StructuredOutputsParams, reason: object) -> InvalidRequest:
    return InvalidRequest(f"the {_NAMES[params.kind]} cannot be followed: {reason}")


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingDependency(
            "structured outputs need llguidance: pip install 'kvruntime[guided]'"
        ) from error
