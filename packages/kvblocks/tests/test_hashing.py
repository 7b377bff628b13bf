"""Identity: the documented chain of SHA-256, equal in every process and on every machine."""

import os
import struct
import subprocess
import sys
from array import array
from hashlib import sha256

import pytest

from kvblocks import BlockManager, InvalidTokens, chain_hashes, namespace_root
from kvblocks.hashing import pack_tokens, split_blocks

from .helpers import filled

PROGRAM = """
from kvblocks import BlockManager
manager = BlockManager(8, 4)
for name, salt in (("A", None), ("B", ""), ("C", "s")):
    manager.allocate(name, range(9), salt=salt)
    manager.append({name: 9})
    manager.commit(name, 9)
    print([digest.hex() for digest in manager.block_hashes(name)])
    manager.free(name)
print(manager.state_digest())
"""


def run_with_hash_seed(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_hashes_and_digests_are_equal_in_every_process() -> None:
    first, *others = (run_with_hash_seed(seed) for seed in ("0", "1", "random"))
    assert first.count("\n") == 4
    assert others == [first, first]


def test_the_chain_is_the_documented_formula() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9])
    root = sha256(b"kvblocks.root.1").digest()
    first = sha256(root + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert manager.block_hashes("A") == (first, second)


def test_a_salt_is_tagged_and_length_prefixed_in_the_root() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", [1, 2, 3, 4], salt="é!")
    root = sha256(b"kvblocks.root.1" + b"4:salt=3:\xc3\xa9!").digest()
    assert namespace_root("é!") == root
    assert manager.block_hashes("A") == (sha256(root + struct.pack("<4I", 1, 2, 3, 4)).digest(),)


def test_roots_of_different_salts_differ() -> None:
    salts = (
        None,
        "",
        "a",
        "b",
        "ab",
        "0:",
        "4:salt=0:",
        "??",
        "\ud83d\ude00",
        "\N{GRINNING FACE}",
        "\ud800",
        "\ud801",
    )
    assert len({namespace_root(salt) for salt in salts}) == len(salts)


def test_a_chain_of_no_blocks_is_empty() -> None:
    assert chain_hashes(namespace_root(), []) == []


def test_only_full_committed_blocks_have_hashes() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("A", range(12))
    manager.append({"A": 9})
    assert manager.block_hashes("A") == ()
    manager.commit("A", 7)
    assert len(manager.block_hashes("A")) == 1


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    manager = BlockManager(8, 4)
    filled(manager, "A", [1, 1, 1, 1, 5, 5, 5, 5])
    filled(manager, "B", [2, 2, 2, 2, 5, 5, 5, 5])
    assert manager.block_hashes("A")[1] != manager.block_hashes("B")[1]


def test_blocks_are_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = array("I", [1, 2]).tobytes()
    assert list(split_blocks(packed, 1, 2)) == [struct.pack("<I", 1), struct.pack("<I", 2)]
    other = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr(sys, "byteorder", other)
    assert list(split_blocks(packed, 1, 2)) == [struct.pack(">I", 1), struct.pack(">I", 2)]


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([0, 2**32 - 1], [0, 2**32 - 1]),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        (iter([7]), [7]),
        ({5: "a", 6: "b"}, [5, 6]),
        (array("q", [1, 2**31]), [1, 2**31]),
        (array("B", [1, 255]), [1, 255]),
        (b"ab\xff", [97, 98, 255]),
        (bytearray(b"abcd"), [97, 98, 99, 100]),
        (memoryview(b"abcd"), [97, 98, 99, 100]),
        ([True, False], [1, 0]),
        ([], []),
    ],
)
def test_token_ids_come_from_any_iterable_of_integers(tokens: list[int], ids: list[int]) -> None:
    assert pack_tokens(tokens).tolist() == ids


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, -(2**64)])
def test_a_token_id_is_an_unsigned_32_bit_integer(token: int) -> None:
    with pytest.raises(InvalidTokens, match=r"token ids must be in \[0, 2\*\*32\): "):
        pack_tokens([0, token])


@pytest.mark.parametrize("tokens", ["text", [1.0], [None], ["1"], [[1]], 5, None, array("d", [1])])
def test_what_is_no_iterable_of_integers_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidTokens, match="tokens must be an iterable of integers: "):
        pack_tokens(tokens)
