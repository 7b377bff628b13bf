"""SGLang's `UnifiedRadixCache` over its tree in Rust, driven like its `RadixCache`."""

from __future__ import annotations

import os
from typing import Any

os.environ["SGLANG_RUST_BUILD_MODE"] = "never"  # the wheel has it built

from benchmarks.allocator.adapters.base import Can
from benchmarks.allocator.adapters.sglang_radix import SGLangRadix

# That module makes SGLang importable, so it stays before SGLang.
# isort: split
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class SGLangRust(SGLangRadix):
    """The nodes of the tree are Rust's, so their memory is not seen from Python."""

    abilities = SGLangRadix.abilities - {Can.SHOW_MEMORY}

    def _make_tree(self) -> Any:
        tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not self.caching,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.pages,
                page_size=self.block_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )
        if tree._tree_core_backend != "rust":  # noqa: SLF001 -- nothing public tells
            raise ImportError("SGLang fell back from its tree in Rust to the one in Python")
        return tree


ADAPTER = SGLangRust
