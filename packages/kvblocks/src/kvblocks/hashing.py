"""The identity of cached content: a SHA-256 chain over packed tokens.

    root        = H("kvblocks.root.1" | salt | adapter)
    hash of i   = H(hash of i-1, or root | tokens of block i as little-endian uint32 | media)

Salt, adapter and the media that begin in a block are parts, each tagged and length-prefixed; what is
absent adds nothing. Equal in every process, on every machine. Two blocks have equal hashes when their
own tokens and media, all before them and their namespace are equal.

Knows bytes and digests. Does not know blocks, sequences or which content is cached.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from kvblocks.errors import InvalidNamespace, InvalidTokens

TOKEN_BYTES = 4
NAMESPACE_BYTES = 64  # of a namespace's key: the digests of a salt and of an adapter
_ROOT = b"kvblocks.root.1"
_NO_MEDIA: Mapping[int, bytes] = MappingProxyType({})

Digest: TypeAlias = Callable[[bytes], bytes]


class Adapter(NamedTuple):
    """A LoRA adapter, or whatever else changes the weights; a reload counts its generation up."""

    name: str | int
    generation: int = 0


class Media(NamedTuple):
    """What stands behind placeholder tokens from a position on, named by a digest of its content."""

    position: int
    digest: bytes | str


class Namespace(NamedTuple):
    """Where content is shared: `key` begins with a digest of the salt, `root` begins hash chains."""

    key: bytes
    root: bytes
    salt: str | None
    adapter: Adapter | None


def sha256_digest(data: bytes) -> bytes:
    """SHA-256."""
    return sha256(data).digest()


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Pack token ids to uint32; each byte of `bytes` is one id. O(n); `InvalidTokens`.

    >>> pack_tokens([1, 2]).tolist()
    [1, 2]
    """
    if isinstance(tokens, bytes | bytearray):
        tokens = iter(tokens)  # array() would take them for machine words
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise InvalidTokens(f"token ids must be in [0, 2**32): {error}") from None
    except TypeError as error:
        raise InvalidTokens(f"tokens must be an iterable of integers: {error}") from None


def num_common_tokens(ours: bytes | bytearray, theirs: bytes) -> int:
    """How many packed tokens two stretches have in common from their start."""
    length = min(len(ours), len(theirs))
    same = (at for at in range(0, length, TOKEN_BYTES) if ours[at : at + 4] != theirs[at : at + 4])
    return next(same, length) // TOKEN_BYTES


def make_namespace(
    salt: str | None = None, adapter: Adapter | str | int | None = None
) -> Namespace:
    """The namespace of a salt and an adapter. `InvalidNamespace` for what is neither."""
    if salt is not None and not isinstance(salt, str):
        raise InvalidNamespace(f"salt must be a string or None, got {salt!r}")
    if adapter is None:
        return _namespace(salt, None, 0)
    pair: tuple[Any, ...] = adapter if isinstance(adapter, tuple) else (adapter, 0)
    if len(pair) != 2 or type(pair[0]) not in {str, int} or type(pair[1]) is not int:
        raise InvalidNamespace(
            f"adapter must be a name, or a name and the number of its generation, got {adapter!r}"
        )
    return _namespace(salt, *pair)


def salt_key(salt: str | None) -> bytes:
    """What the keys of all namespaces of a salt begin with."""
    return make_namespace(salt).key[:32]


def namespace_root(salt: str | None = None, adapter: Adapter | str | int | None = None) -> bytes:
    """The root of a chain: content is shared only within one namespace.

    No salt is None; "" is another salt. Any string is a salt, lone surrogates included. An adapter is
    a name, a string or a number, in a generation (0 if not said).

    >>> namespace_root(None) == namespace_root("")
    False
    >>> namespace_root(adapter="a") == namespace_root(adapter=Adapter("a", generation=1))
    False
    """
    return make_namespace(salt, adapter).root


def read_media(media: Iterable[Any]) -> tuple[Media, ...]:
    """The media of a sequence in order, each at a position of its own. `InvalidTokens`."""
    try:
        items = [Media(*item) for item in media]
    except TypeError as error:
        raise InvalidTokens(f"media must be pairs of a position and a digest: {error}") from None
    for item in items:
        if type(item.position) is not int or type(item.digest) not in {bytes, str}:
            raise InvalidTokens(
                f"media must have a position, and a digest as bytes or text, got {item!r}"
            )
    items.sort(key=lambda item: item.position)
    positions = [item.position for item in items]
    if any(before >= position for before, position in pairwise([-1, *positions])):
        raise InvalidTokens(f"media must begin at different positions from 0 on, got {positions}")
    return tuple(items)


def media_keys(media: Iterable[Media], block_size: int) -> dict[int, bytes]:
    """What media add to the identity of the blocks in which they begin, by index.

    The blocks after those differ with them, as the chain goes through.

    >>> sorted(media_keys([Media(5, b"cat"), Media(9, b"dog")], block_size=4))
    [1, 2]
    """
    keys: dict[int, bytes] = {}
    for position, digest in media:
        index, offset = divmod(position, block_size)
        value = digest.encode("utf-8", "surrogatepass") if isinstance(digest, str) else digest
        part = _part(b"media", b"%d:%b" % (offset, value))
        keys[index] = keys.get(index, b"") + part
    return keys


def keys_of(namespace: Namespace, media: Sequence[Media], block_size: int) -> dict[int, bytes]:
    """What stands before the blocks of a prompt, by index; the first always has its namespace."""
    if not media:
        return {0: namespace.key}
    keys = media_keys(media, block_size)
    keys[0] = namespace.key + keys.get(0, b"")
    return keys


def chain_hashes(
    root: bytes,
    blocks: Iterable[bytes],
    media: Mapping[int, bytes] = _NO_MEDIA,
    digest: Digest = sha256_digest,
) -> list[bytes]:
    """The chained hashes of packed blocks, one digest each; `media` by index, of `media_keys`."""
    hashes = []
    for index, tokens in enumerate(blocks):
        root = digest(root + tokens + media[index] if index in media else root + tokens)
        hashes.append(root)
    return hashes


def chain_packed(
    root: bytes, tokens: bytes, block_size: int, media: Mapping[int, bytes], digest: Digest
) -> list[bytes]:
    """What `chain_hashes` says of packed blocks, as fast as it can be said."""
    width = block_size * TOKEN_BYTES
    if media or digest is not sha256_digest or sys.byteorder == "big":
        blocks = split_blocks(tokens, block_size, len(tokens) // width)
        return chain_hashes(root, blocks, media, digest)
    # With events on, this is most of what a prompt costs: no call of ours for each block.
    return [
        root := sha256(root + tokens[at : at + width]).digest()
        for at in range(0, len(tokens), width)
    ]


@lru_cache(maxsize=1024, typed=True)
def _namespace(salt: str | None, adapter: str | int | None, generation: int) -> Namespace:
    """Type, name and generation: 1, "1" and a second loading of "1" are three adapters."""
    parts = [b"", b""]
    if salt is not None:
        parts[0] = _part(b"salt", salt.encode("utf-8", "surrogatepass"))
    if adapter is not None:
        tag = b"adapter.name" if isinstance(adapter, str) else b"adapter.number"
        name = _part(tag, str(adapter).encode("utf-8", "surrogatepass"))
        parts[1] = name + _part(b"adapter.generation", b"%d" % generation)
    root = sha256(_ROOT + b"".join(parts)).digest()
    key = b"".join(sha256(part).digest() for part in parts)
    return Namespace(key, root, salt, None if adapter is None else Adapter(adapter, generation))


def _part(tag: bytes, value: bytes) -> bytes:
    """One part of a namespace; tag and length keep neighbours from running into each other."""
    return b"%d:%b=%d:%b" % (len(tag), tag, len(value), value)


def split_blocks(tokens: bytes, block_size: int, num_blocks: int) -> Iterator[bytes]:
    """Cut packed tokens into the first blocks, each as every machine would write it."""
    width = block_size * TOKEN_BYTES
    if sys.byteorder == "big":
        swapped = array("I", tokens)
        swapped.byteswap()
        tokens = swapped.tobytes()
    for at in range(0, num_blocks * width, width):
        yield tokens[at : at + width]
