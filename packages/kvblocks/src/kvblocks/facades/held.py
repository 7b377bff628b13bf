"""What both facades share: requests that take positions by number and name their tokens later.

An engine says how many positions a request needs now, and which of them are written, step by step. A
manager's `allocate` takes a whole prompt, so a request enters with what is cached and one token more,
and takes the other positions by `append`.

Knows how that is done as one call, all or nothing. Does not know either engine's words.
"""

from collections.abc import Sequence

from kvblocks.errors import InvalidConfig, InvalidLength, OutOfBlocks, UnknownSequence
from kvblocks.hashing import Adapter, Media
from kvblocks.manager import BlockManager
from kvblocks.results import BlockMerge, SequenceId, StepPlan


class HeldRequests:
    """The requests that hold blocks of one manager. `InvalidConfig` if it has windows."""

    def __init__(self, manager: BlockManager) -> None:
        if manager.windows:
            raise InvalidConfig(f"a facade needs a manager without windows, got {manager.windows}")
        self.manager = manager
        self._num_known: dict[SequenceId, int] = {}  # positions whose ids the manager has

    def num_blocks_for(self, num_positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_positions // self.manager.block_size)

    def take(
        self,
        seq_id: SequenceId,
        ids: Sequence[int],
        *,
        start: int,
        stop: int,
        salt: str | None = None,
        adapter: Adapter | str | None = None,
        media: Sequence[Media] = (),
        room: int = 0,
    ) -> StepPlan | None:
        """Schedule positions up to `stop`, or return None where blocks are too few.

        A new request begins at `start`, and [0, start) must be cached, no less and no more. It is
        served only if its table could have `room` blocks. O(start + blocks taken).
        `InvalidLength`, `InvalidTokens`; `UnknownSequence` for one that was allocated beside.
        """
        if stop <= start:
            raise InvalidLength(f"at least 1 position must be new, got {start}..{stop}")
        if seq_id in self.manager:
            return self._grow(seq_id, stop, room)
        prompt = ids[: start + 1]
        verdict = self.manager.can_allocate(prompt, salt=salt, adapter=adapter, media=media)
        num_cached_blocks = self.num_blocks_for(len(prompt)) - verdict.num_needed_blocks
        num_cached = num_cached_blocks * self.manager.block_size
        if num_cached != start:
            raise InvalidLength(
                f"a request must begin where its cached prefix ends, got {start} of {len(ids)} "
                f"tokens, cached {num_cached}: look it up again"
            )
        num_blocks = max(self.num_blocks_for(stop), room)
        if num_blocks - num_cached_blocks > verdict.num_available_blocks:
            return None
        self.manager.allocate(seq_id, prompt, salt=salt, adapter=adapter, media=media)
        self._num_known[seq_id] = len(prompt)
        return self.manager.append({seq_id: stop - start})

    def _grow(self, seq_id: SequenceId, stop: int, room: int) -> StepPlan | None:
        self._require_held(seq_id)
        num_missing = stop - self.manager.num_computed_tokens(seq_id)
        batch = {seq_id: num_missing} if num_missing > 0 else {}
        if room:
            num_held = len(self.manager.block_table(seq_id))
            if room - num_held > self.manager.can_append(batch).num_available_blocks:
                return None
        try:
            return self.manager.append(batch)
        except OutOfBlocks:
            return None

    def commit(
        self, seq_id: SequenceId, ids: Sequence[int], num_tokens: int
    ) -> tuple[BlockMerge, ...]:
        """Declare [0, num_tokens) written; returns which blocks of the table were exchanged.

        Less than what is committed changes nothing. O(ids that are new). `UnknownSequence`,
        `InvalidLength`.
        """
        if num_tokens <= self.manager.num_committed_tokens(seq_id):
            return ()
        self._require_held(seq_id)
        num_known = self._num_known[seq_id]
        merges = self.manager.commit(seq_id, num_tokens, ids[num_known:num_tokens])
        self._num_known[seq_id] = max(num_known, num_tokens)
        return merges

    def truncate(self, seq_id: SequenceId, num_tokens: int) -> None:
        """Forget positions that are not committed. `UnknownSequence`, `InvalidLength`."""
        self._require_held(seq_id)
        self.manager.truncate(seq_id, num_tokens)
        self._num_known[seq_id] = min(self._num_known[seq_id], num_tokens)

    def free(self, seq_id: SequenceId) -> None:
        """Give a request up. `UnknownSequence`."""
        self._require_held(seq_id)
        self.manager.free(seq_id)
        del self._num_known[seq_id]

    def _require_held(self, seq_id: SequenceId) -> None:
        """Leave sequences alone that others allocated on the same manager. `UnknownSequence`."""
        if seq_id not in self._num_known:
            raise UnknownSequence(f"no sequence {seq_id!r} of this facade")
