"""One who follows the events of a manager, and does not let any of them break a rule."""

from collections.abc import Iterable

from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Subscriber:
    """The keys that can be found, by nothing but the events; `live` has the parent of each."""

    def __init__(self) -> None:
        self.live: dict[bytes, bytes | None] = {}

    def replay(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.live.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.block_hashes
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        parent = event.parent_block_hash
        for key in event.block_hashes:
            assert parent is None or parent in self.live, "a block is stored behind none"
            assert key not in self.live, "a key is stored twice"
            self.live[key] = parent
            parent = key

    def _remove(self, event: BlockRemoved) -> None:
        assert event.block_hashes
        for key in event.block_hashes:
            assert key in self.live, "a key is removed that is not there"
            assert key not in self.live.values(), "a key is removed before one that follows it"
            del self.live[key]
