"""Text to token ids and back, and messages to a prompt, by the files of a checkpoint's folder.

Knows `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Knows no model: an id may
be beyond the rows of an embedding, which whoever feeds the model checks.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.sandbox
import tokenizers

from kvruntime.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from kvruntime.json_files import read_object
from kvruntime.tools import ToolFormat, tool_format

__all__ = ["Tokenizer"]

_LONG_TEXT = 10_000  # characters, which take milliseconds to encode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A tokenizer of the `tokenizers` library together with its chat template.

    A raw prompt gets a BOS token if the checkpoint says so: by the post-processor of its
    `tokenizer.json` or by `add_bos_token` in its `tokenizer_config.json`. A chat prompt is encoded
    as the template wrote it, with `add_special_tokens=False`. Either way the text of a special
    token, such as `<|im_end|>`, becomes that token wherever it stands.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        self._settings = settings
        self._special_tokens = _special_tokens(settings)
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._compiled: dict[str, jinja2.Template] = {}
        self._token_bytes: _TokenBytes | None = None
        self.tool_format = tool_format(self._tool_template or "")
        self._backend = _with_visible_tags(backend, self.tool_format)
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(each for each, token in added.items() if token.special)
        decoder = self._backend.decoder
        self._has_byte_tokens = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the tokenizer of a Hugging Face folder; costs a fraction of a second.

        Raises:
            CheckpointNotFound: there is no `tokenizer.json`.
            CheckpointError: one of the files is not what its name says.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointNotFound(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise CheckpointError(f"{path} cannot be read as a tokenizer ({error})") from error
        # A saved tokenizer may carry the settings of its training; a prompt is never cut or filled.
        backend.no_truncation()
        backend.no_padding()
        path = folder / "tokenizer_config.json"
        settings = read_object(path) if path.is_file() else {}
        return cls(
            backend,
            settings,
            _read_chat_template(folder, settings),
            _named_template(settings, "tool_use"),
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library, for its incremental `DecodeStream`."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text, if there is one."""
        return self._token_id("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a text; a model's configuration may name more."""
        token_id = self._token_id("eos_token")
        return () if token_id is None else (token_id,)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be called."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with what the checkpoint puts around a raw prompt.

        Pass `add_special_tokens=False` for a chat prompt: its template has written them already.
        """
        if len(text) < _LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # other threads go on meanwhile
            [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if not add_special_tokens or not self._settings.get("add_bos_token"):
            return ids
        bos = self.bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are not yet whole characters become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_left_out(self, token_id: int) -> bool:
        """Whether `decode` makes nothing of an id: that of a special token, or of none."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def byte_token(self, token_id: int) -> int | None:
        """The byte that a token of SentencePiece's byte fallback stands for; None of any other."""
        if not self._has_byte_tokens:
            return None
        found = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return None if found is None else int(found[1], 16)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which need not be whole characters.

        Those of all tokens of a text, one after the other, are the bytes of that text.
        """
        if self._token_bytes is None:
            self._token_bytes = _TokenBytes(self._backend)
        return self._token_bytes[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a conversation, as the checkpoint's template writes it.

        Each message has a `role` and a `content`; one of the assistant may have `tool_calls`. Tools
        are those of the OpenAI API, and `tool_format` says how they will be called. With
        `add_generation_prompt` the prompt ends where the assistant's answer begins.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages, or knows no tools.
        """
        template = self._tool_template if tools else self._chat_template
        if template is None:
            raise InvalidRequest("this checkpoint has no chat template, so it takes raw prompts")
        if tools and self.tool_format is None:
            raise InvalidRequest(
                "tools need a chat template that knows them, in the form of Hermes, Llama 3 or "
                "Mistral, and this checkpoint has another"
            )
        parsed = [_with_parsed_arguments(message) for message in messages]
        try:
            if template not in self._compiled:
                self._compiled[template] = _environment().from_string(template)
            return self._compiled[template].render(
                messages=parsed,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program and may fail in any way
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}"
            ) from error

    def _token_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


class _TokenBytes:
    """The bytes of tokens, by the decoder that a tokenizer has."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        decoder = json.loads(backend.to_str())["decoder"] or {}
        kinds = {decoder.get("type"), *(one["type"] for one in decoder.get("decoders", ()))}
        self._is_byte_level = "ByteLevel" in kinds
        self._added = backend.get_added_tokens_decoder()

    def __getitem__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        if found := _BYTE_TOKEN.fullmatch(token):  # a byte that SentencePiece has no piece for
            return bytes([int(found[1], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_of_character() -> dict[str, int]:
    """The characters that GPT-2 writes bytes as: printable ones as they are, then from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template from its own file, else from the settings, where it may be one of many."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 ({error})") from error
    template = settings.get("chat_template")
    return template if isinstance(template, str) else _named_template(settings, "default")


def _named_template(settings: Mapping[str, Any], name: str) -> str | None:
    """Return one of several templates that the settings have."""
    templates = settings.get("chat_template")
    named = (
        [item for item in templates if isinstance(item, dict)]
        if isinstance(templates, list)
        else []
    )
    chosen = [item.get("template") for item in named if item.get("name") == name]
    return next((template for template in chosen if isinstance(template, str)), None)


def _with_visible_tags(
    backend: tokenizers.Tokenizer, tool_format: ToolFormat | None
) -> tokenizers.Tokenizer:
    """Let the tags around calls of tools be text where they are special tokens, so that they are decoded."""
    tags = {tool_format.begin, tool_format.end, tool_format.prefix} if tool_format else set()
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in tags for token in added):
        return backend
    written = json.loads(backend.to_str())
    for token in written["added_tokens"]:
        token["special"] &= token["content"] not in tags
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write calls of tools as templates expect them: their arguments are objects, not JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _json_object(function["arguments"])
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the arguments of a tool call must be a JSON object, got {text!r}")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of `bos_token`, `eos_token` and their like."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _environment() -> jinja2.Environment:
    """Return the sandbox that chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(tz=UTC).astimezone().strftime(pattern)
