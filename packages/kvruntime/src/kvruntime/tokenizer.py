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

__all__ = ["Tokenizer"]


class Tokenizer:
    """A tokenizer of the `tokenizers` library together with its chat template.

    A raw prompt gets a BOS token if the checkpoint says so: by the post-processor of its
    `tokenizer.json` or by `add_bos_token` in its `tokenizer_config.json`. A chat prompt is encoded
    as the template wrote it, with `add_special_tokens=False`. Either way the text of a special
    token, such as `<|im_end|>`, becomes that token wherever it stands.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], chat_template: str | None
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._special_tokens = _special_tokens(settings)
        self._chat_template = chat_template
        self._compiled: jinja2.Template | None = None
        self._token_bytes: _TokenBytes | None = None

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
        return cls(backend, settings, _read_chat_template(folder, settings))

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
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens or not self._settings.get("add_bos_token"):
            return ids
        bos = self.bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are not yet whole characters become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which need not be whole characters.

        Those of all tokens of a text, one after the other, are the bytes of that text.
        """
        if self._token_bytes is None:
            self._token_bytes = _TokenBytes(self._backend)
        return self._token_bytes[token_id]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation, as the checkpoint's template writes it.

        Each message has a `role` and a `content`. With `add_generation_prompt` the prompt ends
        where the assistant's answer begins.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        if self._chat_template is None:
            raise InvalidRequest("this checkpoint has no chat template, so it takes raw prompts")
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._chat_template)
            return self._compiled.render(
                messages=messages,
                tools=None,
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
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):  # a byte that SentencePiece has no piece for
            return bytes([int(token[3:5], 16)])
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
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        chosen = [item.get("template") for item in named if item.get("name") == "default"]
        template = next(iter(chosen), None)
    return template if isinstance(template, str) else None


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
