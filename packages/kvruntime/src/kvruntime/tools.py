"""Calls of tools in the text of an answer, in the form that a model's chat template taught it.

Knows the forms: Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
Llama 3 an answer that is `{"name": ..., "parameters": {...}}`, Mistral `[TOOL_CALLS] [{...}, ...]`.
Does not know tokens, requests or what a tool does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import whitespace
from typing import Any, Literal, NoReturn

from kvruntime.structured_outputs import StructuredOutputsParams

__all__ = ["ToolCall", "ToolFormat", "ToolParser", "call_constraint", "tool_format"]

_MAX_CALLS = 16  # of an answer that must call a tool


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls.

    `begin` stands before a call; of a format without it, the whole answer is one. `separator`
    stands between calls; `is_list` says that they are elements of one array.
    """

    name: str
    begin: str
    end: str
    arguments: Literal["arguments", "parameters"]
    separator: str = "\n"
    is_list: bool = False
    prefix: str = ""  # what may stand before an answer that is a call


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


_HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
_LLAMA3 = ToolFormat("llama3_json", "", "", "parameters", separator=";", prefix="<|python_tag|>")
_MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", separator=", ", is_list=True)


def tool_format(chat_template: str) -> ToolFormat | None:
    """Return the form in which a template writes calls; None where it knows none, or another one.

    >>> tool_format("... within <tool_call></tool_call> XML tags ...").name
    'hermes'
    """
    if _MISTRAL.begin in chat_template:
        return _MISTRAL
    if _HERMES.begin in chat_template and "<function=" not in chat_template:
        return _HERMES
    if '"name": function name, "parameters": ' in chat_template:
        return _LLAMA3
    return None


class ToolParser:
    """Separates an answer's calls from its text, while the text comes.

    A call is one of a tool in `names` whose arguments are an object. Everything else stays text, in
    the order it came: what may yet become a call is held back until that is decided. What only
    separates calls is left out.

    >>> parser = ToolParser(tool_format("<tool_call>"), {"add"})
    >>> parser.append('Sum: <tool'), parser.append('_call>{"name": "add", "arg')
    (['Sum: '], [])
    >>> parser.append('uments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments='{"a": 1}')]
    """

    def __init__(self, tool_format: ToolFormat, names: set[str] | frozenset[str]) -> None:
        self._format = tool_format
        self._names = names
        self._held = ""
        self._is_after_call = False
        self._is_plain = False  # no call can come any more

    def append(self, text: str) -> list[str | ToolCall]:
        """Take more of the text; the pieces that are decided now."""
        self._held += text
        return list(self._pieces(is_last=False))

    def finish(self) -> list[str | ToolCall]:
        """No text follows; the rest of the pieces."""
        return list(self._pieces(is_last=True))

    def _pieces(self, *, is_last: bool) -> Iterator[str | ToolCall]:
        while self._held:
            pieces = self._next(is_last=is_last)
            if pieces is None:
                return
            yield from pieces

    def _next(self, *, is_last: bool) -> Sequence[str | ToolCall] | None:
        """What is decided now, at the beginning of what is held; None waits for more."""
        if self._is_plain:
            return self._take(len(self._held))
        if self._is_after_call:
            self._held = self._held.lstrip(f"{whitespace}{self._format.separator}")
            if not self._held:
                return None
        if not self._format.begin:
            if self._may_be_call(is_last=is_last):
                return self._calls(is_last=is_last)
            self._is_plain = True
            return []
        at = self._held.find(self._format.begin)
        if at == 0:
            return self._calls(is_last=is_last)
        num_text = len(self._held) if at < 0 else at
        if at < 0 and not is_last:
            num_text -= _overlap(self._held, self._format.begin)
        return self._take(num_text) if num_text else None

    def _take(self, num_characters: int) -> list[str]:
        """Give up what is held as text."""
        self._is_after_call = False
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        return [text]

    def _may_be_call(self, *, is_last: bool) -> bool:
        """Whether an answer that is a call may begin with what is held."""
        rest = self._held.lstrip()
        prefix = self._format.prefix
        is_open = prefix.startswith(rest) and not is_last
        return is_open or rest.removeprefix(prefix).lstrip()[:1] in {"", "{"}

    def _calls(self, *, is_last: bool) -> Sequence[str | ToolCall] | None:
        """The calls that what is held begins with, or the text it turns out to be."""
        head = len(self._held) - len(self._after_begin())
        try:
            value, length = _DECODER.raw_decode(self._held[head:])
        except (ValueError, RecursionError):
            return self._give_up(len(self._format.begin)) if is_last else None
        stop = head + length
        calls = self._read(value)
        if calls is None:
            return self._give_up(stop)
        rest = self._held[stop:].lstrip()
        if self._format.end.startswith(rest) and rest != self._format.end and not is_last:
            return None  # its end may follow
        self._held = rest.removeprefix(self._format.end)
        self._is_after_call = True
        return calls

    def _after_begin(self) -> str:
        held = self._held
        if self._format.begin:
            return held[len(self._format.begin) :].lstrip()
        return held.lstrip().removeprefix(self._format.prefix).lstrip()

    def _give_up(self, num_characters: int) -> Sequence[str | ToolCall]:
        """What looked like a call is text; where there is no tag, all is."""
        self._is_plain = not self._format.begin
        return self._take(num_characters) if num_characters else []

    def _read(self, value: Any) -> list[ToolCall] | None:
        values = value if isinstance(value, list) and self._format.is_list else [value]
        calls = [self._call(one) for one in values]
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return None
        if value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        try:
            if isinstance(arguments, str):
                arguments = _DECODER.decode(arguments)
            text = json.dumps(arguments, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        return ToolCall(value["name"], text) if isinstance(arguments, Mapping) else None


def call_constraint(
    tool_format: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any] | None]],
    *,
    is_required: bool,
    is_parallel: bool,
) -> StructuredOutputsParams:
    """Return the constraint of an answer whose calls are calls of these functions, by their schemas.

    Each function has a name and the JSON schema of its arguments, None for any object. With
    `is_required` the answer is one call, or several; without it, it may be any text, with calls or
    without. Several need `is_parallel`.
    """
    begin = tool_format.begin

    def several(one: str) -> str:
        more = f"({_quoted(tool_format.separator)} {one}){{0,{_MAX_CALLS - 1}}}"
        return f"{one} {more}" if is_parallel else one

    if tool_format.is_list:
        rest = f'" [" {several("call")} "]"'
        answer = f"{_quoted(begin)} rest"
    elif begin:
        end = _quoted(f"\n{tool_format.end}")
        rest = f'"\\n" call {end}'
        answer = several(f"{_quoted(begin)} rest")
    else:
        rest = "call"
        answer = several("rest")
    if is_required:
        rules = [f"start: {answer}"]
    elif begin:
        start = "(before rest)* TEXT" if is_parallel else "before rest | TEXT"
        rules = [f"start: {start}", f"before[lazy]: TEXT {_quoted(begin)}", _TEXT]
    else:
        rules = [f"start: {answer} | OTHER?", _OTHER]
    names = " | ".join(f"f{index}" for index in range(len(functions)))
    calls = [_lark_call(index, tool_format, *one) for index, one in enumerate(functions)]
    grammar = "\n".join([*rules, f"rest: {rest}", f"call: {names}", *calls])
    return StructuredOutputsParams(grammar=grammar)


_TEXT = r"TEXT: /(.|\n)*/"
_OTHER = r"OTHER: /[^{<\s](.|\n)*/"  # of which no call begins


def _lark_call(
    index: int, tool_format: ToolFormat, name: str, schema: Mapping[str, Any] | None
) -> str:
    """The rules of a call; the schema is a document of its own, so that its references hold."""
    head = _quoted(f'{{"name": {json.dumps(name)}, "{tool_format.arguments}": ')
    bounded = {"x-guidance": {"whitespace_pattern": r"[ \t\r\n]{0,32}"}}
    arguments = json.dumps({"type": "object", **(schema or {}), **bounded}, ensure_ascii=False)
    return f'f{index}: {head} a{index} "}}"\na{index}: %json {arguments}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
