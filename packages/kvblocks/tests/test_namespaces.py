"""Content is shared within one namespace, behind the same media, and nowhere else."""

from itertools import product
from typing import Any

import pytest

from kvblocks import (
    Adapter,
    BlockManager,
    InvalidNamespace,
    InvalidTokens,
    Media,
    chain_hashes,
    namespace_root,
)
from kvblocks.hashing import media_keys, pack_tokens, split_blocks

from .helpers import filled, refused

# Salt and adapter; each is another namespace.
NAMESPACES: list[tuple[str | None, Any]] = [
    *((None, None), ("", None), ("x", None), ("1", None)),
    *((None, "x"), ("x", "x"), ("", ""), (None, "")),
    *((None, 1), (None, "1"), (None, Adapter("1", 1)), (None, Adapter(1, 1))),
    *(("ab", "c"), ("a", "bc"), ("abc", None), (None, "abc")),
    *(("7:adapter", None), ("12:adapter.name=1:x", None), (None, "12:adapter.name=1:x")),
]


def test_every_namespace_finds_its_own_content_and_no_other() -> None:
    manager = BlockManager(num_blocks=2 * len(NAMESPACES), block_size=2)
    blocks = {}
    for number, (salt, adapter) in enumerate(NAMESPACES):
        answer = manager.allocate(number, [1, 2, 3], salt=salt, adapter=adapter)
        assert answer.num_cached_tokens == 0
        manager.append({number: 3})
        manager.commit(number, 3)
        blocks[salt, adapter] = answer.block_ids[0]
    assert len({*blocks.values()}) == len(NAMESPACES)
    for salt, adapter in NAMESPACES:
        match = manager.match([1, 2, 3], salt=salt, adapter=adapter)
        assert match.block_ids == (blocks[salt, adapter],)


def test_roots_of_namespaces_differ() -> None:
    assert len({namespace_root(*names) for names in NAMESPACES}) == len(NAMESPACES)


def test_an_adapter_without_a_generation_has_the_generation_0() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    filled(manager, "a", [1, 2, 3], adapter="x")
    assert manager.match([1, 2, 3], adapter=Adapter("x", 0)).num_tokens == 2


def test_an_adapter_that_was_loaded_again_finds_nothing_of_before() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    filled(manager, "before", [1, 2, 3], adapter=Adapter("x", generation=1))
    manager.free("before")
    assert manager.match([1, 2, 3], adapter=Adapter("x", generation=2)).num_tokens == 0
    # What the first generation left is evicted like anything else.
    assert manager.stats().num_cached_blocks == 1
    filled(manager, "after", [1, 2, 3], adapter=Adapter("x", generation=2))
    assert manager.match([1, 2, 3], adapter=Adapter("x", generation=1)).num_tokens == 0


def test_a_reset_of_a_salt_forgets_all_its_adapters() -> None:
    manager = BlockManager(num_blocks=12, block_size=2)
    for number, names in enumerate(product((None, "x"), (None, "a", 1))):
        filled(manager, number, [1, 2, 3], salt=names[0], adapter=names[1])
        manager.free(number)
    manager.reset_prefix_cache(salt="x")
    for salt, adapter in product((None, "x"), (None, "a", 1)):
        found = manager.match([1, 2, 3], salt=salt, adapter=adapter).num_tokens
        assert found == (0 if salt == "x" else 2)


PICTURE = [1, 2, 3, 4, 7, 7, 7, 7, 7, 7, 8]  # two blocks of text, then placeholders


@pytest.fixture
def seen() -> BlockManager:
    manager = BlockManager(num_blocks=16, block_size=2)
    manager.allocate("a", PICTURE, media=[Media(4, b"cat")])
    manager.append({"a": len(PICTURE)})
    manager.commit("a", len(PICTURE))
    return manager


@pytest.mark.parametrize(
    ("media", "num_tokens"),
    [
        ([Media(4, b"cat")], 10),
        ([Media(4, b"dog")], 4),
        ([], 4),
        ([Media(5, b"cat")], 4),  # shifted by one within identical placeholders
        ([Media(6, b"cat")], 4),
        ([Media(4, b"cat"), Media(6, b"cat")], 6),
        ([Media(4, b"cat"), Media(5, b"cat")], 4),
        ([Media(0, b"cat")], 0),
        ([Media(10, b"dog"), Media(4, "cat")], 10),  # in any order; the last block is not full
    ],
)
def test_a_match_ends_where_media_differ(
    seen: BlockManager, media: list[Media], num_tokens: int
) -> None:
    assert seen.match(PICTURE, media=media).num_tokens == num_tokens


def test_what_follows_equal_text_is_found_beside_media(seen: BlockManager) -> None:
    seen.allocate("b", PICTURE, media=[Media(4, b"dog")])
    seen.append({"b": 7})
    seen.commit("b", len(PICTURE))
    seen.free("b")
    for digest in (b"cat", b"dog"):
        assert seen.match(PICTURE, media=[Media(4, digest)]).num_tokens == 10
    assert seen.match(PICTURE).num_tokens == 4
    assert len({*seen.block_table("a")}) == 6
    seen.check()


def test_forgotten_positions_forget_their_media() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    manager.allocate("a", PICTURE, media=[Media(4, b"cat")])
    manager.append({"a": 4})
    manager.truncate("a", 4)
    manager.append({"a": [7, 7]})
    manager.commit("a", 6)
    assert manager.match(PICTURE).num_tokens == 6
    assert manager.match(PICTURE, media=[Media(4, b"cat")]).num_tokens == 4


def test_media_of_tokens_that_come_later_are_waited_for() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    manager.allocate("a", PICTURE[:3], media=[Media(4, b"cat")])
    manager.append({"a": PICTURE})
    manager.commit("a", len(PICTURE))
    assert manager.match(PICTURE).num_tokens == 4
    assert manager.match(PICTURE, media=[Media(4, b"cat")]).num_tokens == 10


def test_media_are_in_the_hashes_from_their_block_on(seen: BlockManager) -> None:
    filled(seen, "b", PICTURE)
    with_cat, without = seen.block_hashes("a"), seen.block_hashes("b")
    assert with_cat[:2] == without[:2]
    assert not {*with_cat[2:]} & {*without}
    blocks = split_blocks(pack_tokens(PICTURE).tobytes(), 2, 5)
    by_hand = chain_hashes(namespace_root(), blocks, media_keys([Media(4, b"cat")], 2))
    assert with_cat == tuple(by_hand)


def test_no_media_are_an_empty_list_of_media() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    manager.allocate("a", [1, 2, 3], media=[])
    manager.append({"a": 3})
    manager.commit("a", 3)
    filled(manager, "b", [1, 2, 3])
    assert manager.block_hashes("a") == manager.block_hashes("b")
    assert manager.stats().num_cached_tokens == 2


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"salt": 1}, InvalidNamespace, "salt must be a string or None, got 1"),
        ({"salt": ["a"]}, InvalidNamespace, "got \\['a'\\]"),
        ({"adapter": b"a"}, InvalidNamespace, "adapter must be a name"),
        ({"adapter": True}, InvalidNamespace, "adapter must be a name"),
        ({"adapter": ("a", "1")}, InvalidNamespace, "number of its generation"),
        ({"adapter": ("a", 1, 2)}, InvalidNamespace, "number of its generation"),
        ({"adapter": {}}, InvalidNamespace, "adapter must be a name"),
        ({"media": [(-1, b"a")]}, InvalidTokens, "different positions from 0 on, got \\[-1\\]"),
        ({"media": [(1, b"a"), (1, b"b")]}, InvalidTokens, "got \\[1, 1\\]"),
        ({"media": [(1, 2)]}, InvalidTokens, "a digest as bytes or text"),
        ({"media": [("1", b"a")]}, InvalidTokens, "media must have a position"),
        ({"media": [1]}, InvalidTokens, "pairs of a position and a digest"),
        ({"media": 1}, InvalidTokens, "pairs of a position and a digest"),
    ],
)
def test_what_is_no_namespace_is_refused(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    for call in (manager.match, manager.can_allocate):
        with refused(manager, error, message):
            call([1, 2, 3], **keywords)
    with refused(manager, error, message):
        manager.allocate("a", [1, 2, 3], **keywords)
    with refused(manager, error, message):
        manager.pin("a", [1, 2, 3], **keywords)
