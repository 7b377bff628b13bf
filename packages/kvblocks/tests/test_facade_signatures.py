"""What the facades promise to follow, and whether the real classes still look so.

`KVBLOCKS_PEERS` names a folder with unpacked wheels, one folder `name==version` each. They are read,
not imported.
"""

import ast
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import kvblocks.facades

SOURCE = Path(kvblocks.facades.__file__).parent
PEERS = os.environ.get("KVBLOCKS_PEERS")


class Promise(NamedTuple):
    """A facade's parameters, and the peer's where they differ by design."""

    facade: str  # file:class.method
    peer: str
    parameters: str
    peer_parameters: str | None = None


_VLLM = "vllm/v1/core/kv_cache_manager.py:KVCacheManager"
_VLLM_BLOCKS = "vllm/v1/core/kv_cache_manager.py:KVCacheBlocks"
_TREE = "sglang/srt/mem_cache/radix_cache.py:RadixCache"
_POOL = "sglang/srt/mem_cache/allocator/base.py:BaseTokenToKVPoolAllocator"


def _vllm(method: str, parameters: str) -> Promise:
    return Promise(f"vllm.py:VLLMFacade.{method}", f"{_VLLM}.{method}", parameters)


def _sglang(where: str, method: str, ours: str, theirs: str | None = None) -> Promise:
    return Promise(f"sglang.py:SGLangFacade.{method}", f"{where}.{method}", ours, theirs)


PROMISES = (
    _vllm("usage", "self"),
    _vllm("get_computed_blocks", "self, request, max_cache_hit_length=None"),
    _vllm("get_blocks", "self, request_id"),
    _vllm("get_block_ids", "self, request_id"),
    _vllm(
        "allocate_slots",
        "self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None, "
        "num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False, "
        "num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0, "
        "has_scheduled_reqs=True, skip_zeroing_group_ids=()",
    ),
    _vllm("cache_blocks", "self, request, num_computed_tokens"),
    _vllm("free", "self, request"),
    _vllm("reset_prefix_cache", "self"),
    _vllm("record_prefix_cache_stats", "self, request, num_hits"),
    _vllm("make_prefix_cache_stats", "self"),
    Promise(
        "vllm.py:KVCacheBlocks.get_block_ids",
        f"{_VLLM_BLOCKS}.get_block_ids",
        "self, allow_none=False, *, group_ids=None",
    ),
    Promise("vllm.py:KVCacheBlocks.new_empty", f"{_VLLM_BLOCKS}.new_empty", "self"),
    _sglang(_TREE, "match_prefix", "self, params"),
    _sglang(_TREE, "path_device_indices", "self, node"),
    _sglang(_TREE, "inc_lock_ref", "self, node"),
    _sglang(_TREE, "dec_lock_ref", "self, node, params=None"),
    _sglang(_TREE, "reset", "self"),
    _sglang(_TREE, "evictable_size", "self"),
    _sglang(_TREE, "protected_size", "self"),
    _sglang(_TREE, "total_size", "self"),
    _sglang(_TREE, "checkpoint", "self, req, *, up_to"),
    _sglang(_POOL, "available_size", "self"),
    # Slots belong to requests here, and to nobody there.
    _sglang(_POOL, "alloc", "self, need_size, *, req", "self, need_size"),
    _sglang(_POOL, "free_segment", "self, *, req, start_pos", "self, free_index, *, start_pos"),
    Promise(
        "sglang.py:SGLangFacade.release_kv_cache",
        "sglang/srt/mem_cache/common.py:release_kv_cache",
        "self, req",
        "req, tree_cache, *, checkpoint",
    ),
)
# What an engine unpacks, as annotated on both sides.
RESULTS = {
    "get_computed_blocks": "tuple[KVCacheBlocks, int, int]",
    "get_blocks": "KVCacheBlocks",
    "get_block_ids": "tuple[list[int], ...]",
    "allocate_slots": "KVCacheBlocks | None",
    "reset_prefix_cache": "bool",
}
# Fields that the peer's begin with.
FIELDS = (
    ("sglang.py:MatchResult", "sglang/srt/mem_cache/base_prefix_cache.py:MatchResult"),
    ("sglang.py:MatchPrefixParams", "sglang/srt/mem_cache/base_prefix_cache.py:MatchPrefixParams"),
    ("vllm.py:KVCacheBlocks", _VLLM_BLOCKS),
)
# What is read of an engine's objects: properties of a protocol, attributes or properties there.
READS = (
    ("vllm.py:Request", "vllm/v1/request.py:Request"),
    ("sglang.py:Request", "sglang/srt/managers/schedule_batch.py:Req"),
    ("sglang.py:PrefixKey", "sglang/srt/mem_cache/radix_cache.py:RadixKey"),
)


def peer_root(path: str) -> Path:
    """The newest wheel in which a path lies."""
    if PEERS is None:
        pytest.skip("KVBLOCKS_PEERS names no folder with the real classes")
    name = path.partition("/")[0]
    folders = list(Path(PEERS).glob(f"{name}==*"))
    if not folders:
        pytest.skip(f"no {name}==<version> in {PEERS}")
    return max(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)])


def find(root: Path, where: str) -> ast.AST:
    """The definition of `file:class.method`, the last one where it is overloaded."""
    path, _, names = where.partition(":")
    node: ast.AST = ast.parse((root / path).read_text("utf-8"))
    for name in names.split("."):
        node = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name
        ][-1]
    return node


def find_peer(where: str) -> ast.AST:
    return find(peer_root(where), where)


def bare(function: ast.AST) -> str:
    """Parameters without annotations: names, order, kinds and defaults."""
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        each.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    return ast.unparse(arguments)


def normal(parameters: str) -> str:
    return bare(ast.parse(f"def f({parameters}): ...").body[0])


def fields(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.ClassDef)
    annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name)]


def attributes(node: ast.AST) -> set[str]:
    """What an object has: methods, and what is assigned to self."""
    methods = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
    return methods | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }


promises = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.facade)


@promises
def test_the_facade_has_the_parameters_it_promises(promise: Promise) -> None:
    assert bare(find(SOURCE, promise.facade)) == normal(promise.parameters)


@promises
def test_the_real_class_has_the_parameters_that_are_followed(promise: Promise) -> None:
    expected = promise.peer_parameters or promise.parameters
    assert bare(find_peer(promise.peer)) == normal(expected)


@pytest.mark.parametrize("method", RESULTS)
def test_the_facade_has_the_results_it_promises(method: str) -> None:
    function = find(SOURCE, f"vllm.py:VLLMFacade.{method}")
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    assert ast.unparse(function.returns) == RESULTS[method]


@pytest.mark.parametrize("method", RESULTS)
def test_the_real_class_has_the_results_that_are_followed(method: str) -> None:
    function = find_peer(f"{_VLLM}.{method}")
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    assert ast.unparse(function.returns) == RESULTS[method]


@pytest.mark.parametrize(("facade", "peer"), FIELDS)
def test_the_real_results_begin_with_the_same_fields(facade: str, peer: str) -> None:
    ours = fields(find(SOURCE, facade))
    assert ours
    assert fields(find_peer(peer))[: len(ours)] == ours


@pytest.mark.parametrize(("facade", "peer"), READS)
def test_the_real_objects_have_what_is_read_of_them(facade: str, peer: str) -> None:
    ours = attributes(find(SOURCE, facade))
    assert ours
    assert ours <= attributes(find_peer(peer))


def test_every_public_method_of_the_facades_is_promised_or_known_to_be_our_own() -> None:
    public = {
        f"{file}:{name}.{each.name}"
        for file, name in (("vllm.py", "VLLMFacade"), ("sglang.py", "SGLangFacade"))
        for each in ast.iter_child_nodes(find(SOURCE, f"{file}:{name}"))
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    }
    own = {"vllm.py:VLLMFacade.take_changed_block_ids", "sglang.py:SGLangFacade.kv_indices"}
    assert public - own == {each.facade for each in PROMISES if "Facade." in each.facade}
