"""What the text of an answer must be: a JSON object, an instance of a schema, a regex, a choice.

Knows how a constraint is written down, and how large it may be. Does not know tokens, nor the
library that enforces it: whether a schema or a grammar means anything is found there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvruntime.errors import InvalidRequest

__all__ = ["MAX_CONSTRAINT_BYTES", "StructuredOutputsParams"]

MAX_CONSTRAINT_BYTES = 65_536
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    r"""One constraint on the text of an answer, in vLLM's names. Exactly one kind is given.

    Args:
        json: a JSON schema, as a mapping or as its text; kept as text.
        regex: the whole answer matches it; the syntax of Rust's regex crate, without look-around,
            and `\d` and `\w` are ASCII.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in llguidance's variant of Lark, beginning at `start`.
        json_object: any JSON object.
        disable_any_whitespace: JSON is written without spaces and line breaks.
        whitespace_pattern: a regex of what may stand between the tokens of JSON; None allows up to
            32 spaces, tabs and line breaks at a time, so that a model cannot go on with them for
            ever.

    A constraint has at most `MAX_CONSTRAINT_BYTES` bytes of UTF-8.

    >>> StructuredOutputsParams(choice=["yes", "no"]).kind
    'choice'
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if _is_given(getattr(self, name))]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured outputs must be exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            _set(self, "json", _schema_text(self.json))
        if self.choice is not None:
            _set(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_whitespace()

    @property
    def kind(self) -> str:
        """Which of the kinds is given."""
        return next(name for name in _KINDS if _is_given(getattr(self, name)))

    def _check_whitespace(self) -> None:
        named = [
            name
            for name in ("disable_any_whitespace", "whitespace_pattern")
            if _is_given(getattr(self, name))
        ]
        if named and self.kind not in {"json", "json_object"}:
            raise InvalidRequest(f"{named[0]} is about JSON, got it with {self.kind}")
        if len(named) > 1:
            raise InvalidRequest(
                "whitespace_pattern must not be given where disable_any_whitespace is"
            )


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _schema_text(schema: object) -> str:
    """The text of a schema, in the order of its keys."""
    try:
        if isinstance(schema, str):
            _check_text("json", schema)
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise InvalidRequest("a json schema must not be nested so deeply") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"a json schema must be JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"a json schema must be an object, got {text}")
    return text


def _choices(choices: Any) -> tuple[str, ...]:
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequest(f"choice must be texts that are not empty, got {choices!r}")
    _check_text("choice", "\n".join(choices))
    return tuple(choices)


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a text, got {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} must be valid Unicode, got {text[error.start]!r}") from None
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidRequest(f"{name} must have at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")


def _set(params: object, name: str, value: object) -> None:
    """Store the form that a frozen value keeps of what it was given."""
    object.__setattr__(params, name, value)
