"""A request with what both facades read, and nothing else of an engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvblocks.facades.sglang import MatchPrefixParams, RadixKey, SGLangFacade, TreeNode


@dataclass(frozen=True, slots=True)
class LoRA:
    """An adapter."""

    lora_name: str
    lora_path: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a picture begins."""

    offset: int


@dataclass(frozen=True, slots=True)
class Picture:
    """What stands behind placeholder tokens."""

    identifier: str
    mm_position: Place


@dataclass(slots=True)
class Request:
    """Plain fields under the names of both engines."""

    name: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    extra_key: str | None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: LoRA | None = None
    mm_features: list[Picture] = field(default_factory=list)
    prompt_embeds: object | None = None
    node: TreeNode | None = field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        return self.name

    @property
    def rid(self) -> str:
        return self.name

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def full_untruncated_fill_ids(self) -> list[int]:
        return self.all_token_ids

    @property
    def last_node(self) -> TreeNode:
        assert self.node is not None, "match first"
        return self.node


def request(name: str, tokens: Iterable[int], *, salt: str | None = None) -> Request:
    return Request(name, list(tokens), cache_salt=salt)


def look_up(cache: SGLangFacade, one: Request) -> int:
    """Match all but the last token, as an engine that needs the logits does."""
    key = RadixKey(
        one.all_token_ids, one.extra_key, limit=one.num_tokens - 1, cache_salt=one.cache_salt
    )
    found = cache.match_prefix(MatchPrefixParams(key))
    one.node = found.last_device_node
    return found.device_prefix_len
