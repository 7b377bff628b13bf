"""The identity of cached content: a SHA-256 chain over packed tokens.

    root        = H("kvblocks.root.1" | the namespace's parts, each tagged and length-prefixed)
    hash of i   = H(hash of i-1, or root | tokens of block i as little-endian uint32)

Equal in every process, on every machine. Two blocks have equal hashes when their own tokens, all
tokens before them and their namespace are equal.

Knows bytes and digests. Does not know blocks, sequences or which content is cached.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate

from kvblocks.errors import InvalidTokens

TOKEN_BYTES = 4
_ROOT = b"kvblocks.root.1"
_SALT = b"salt"


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


@lru_cache(maxsize=1024)
def namespace_root(salt: str | None = None) -> bytes:
    """The root of a chain: content is shared only within one namespace.

    No salt is None; "" is another salt. Any string is a salt, lone surrogates included.

    >>> namespace_root(None) == namespace_root("")
    False
    """
    return sha256(
        _ROOT + (b"" if salt is None else _part(_SALT, salt.encode("utf-8", "surrogatepass")))
    ).digest()


def chain_hashes(root: bytes, blocks: Iterable[bytes]) -> list[bytes]:
    """The chained hashes of packed blocks, one SHA-256 each."""
    chain = accumulate(
        blocks, lambda parent, tokens: sha256(parent + tokens).digest(), initial=root
    )
    next(chain)
    return list(chain)


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
