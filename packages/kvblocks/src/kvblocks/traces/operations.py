"""Logs of operations, as `kvblocks.recording` writes them: each prompt that was allocated is a request.

What a log says is carried out again on a manager of its own: only so is it known which calls were
refused, and which sequences a decode batch went on with.

Knows which calls bring prompts and generated tokens. Does not know how a call is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvblocks.errors import InvalidLog, InvalidTrace, OutOfBlocks, SequenceExists
from kvblocks.hashing import media_keys, namespace_root, pack_tokens, read_media, split_blocks
from kvblocks.replay import Applied, Replay, call_options, id_of
from kvblocks.results import SequenceId
from kvblocks.traces.records import Blocks, MalformedRow, Request, Trace


def read_log(lines: Iterable[str], name: str, block_size: int | None) -> Trace:
    """Read a log of operations, cut into the blocks of its manager if nobody says otherwise.

    A block is named by its tokens and the media that begin in it; the scope is that of salt and
    adapter. Prompts of which the log has the length only have no names. Calls that were refused are
    counted in a warning. O(what it takes to carry the log out). `InvalidTrace` where its first line
    does not say what made its manager.
    """
    try:
        # Events and explanations would be kept for nobody; digests are not what is asked for.
        replay = Replay(lines, events=False, explains=False)
    except InvalidLog as error:
        raise InvalidTrace(f"{name}: {error}") from None
    reader = _Reader(replay, block_size or replay.manager.block_size)
    for applied in reader.carried_out():
        reader.note(applied)
    requests = tuple(each.as_request() for each in reader.prompts)
    is_named = any(request.scope is not None for request in requests)
    return Trace(
        "log",
        reader.block_size if is_named else None,
        requests,
        tuple(reader.malformed),
        reader.warnings(),
    )


@dataclass
class _Prompt:
    """A prompt, and how far its sequence has come."""

    num_tokens: int
    blocks: Blocks
    scope: bytes | None
    num_committed: int = 0

    def as_request(self) -> Request:
        num_generated = max(0, self.num_committed - self.num_tokens)
        return Request(None, self.num_tokens, num_generated, self.blocks, self.scope)


@dataclass
class _Reader:
    """What has been read so far."""

    replay: Replay
    block_size: int
    prompts: list[_Prompt] = field(default_factory=list)
    malformed: list[MalformedRow] = field(default_factory=list)
    running: dict[SequenceId, _Prompt] = field(default_factory=dict)
    num_refused: int = 0
    num_refused_prompts: int = 0

    def carried_out(self) -> Iterator[Applied]:
        """The calls; a line that cannot be carried out is noted, and the next one is read."""
        while True:
            try:
                yield from self.replay
            except InvalidLog as error:
                place, _, reason = str(error).partition(": ")
                self.malformed.append(MalformedRow(place, reason))
            else:
                return

    def note(self, applied: Applied) -> None:
        """Note a prompt, or what was generated for one."""
        given = applied.arguments
        if applied.error is not None:
            self._note_refused(applied)
        elif applied.op == "allocate":
            self._note_prompt(applied)
        elif applied.op == "free":
            self.running.pop(id_of(given["seq"]), None)
        elif applied.op == "commit":
            self._note_committed([id_of(given["seq"])])
        elif applied.op == "batch.commit":
            self._note_committed(self.replay.batch(given["batch"]).seq_ids)

    def _note_refused(self, applied: Applied) -> None:
        is_prompt = applied.op == "allocate"
        if is_prompt and not isinstance(applied.error, OutOfBlocks | SequenceExists):
            self.malformed.append(MalformedRow(f"line {applied.line}", str(applied.error)))
            return
        self.num_refused += 1
        self.num_refused_prompts += is_prompt

    def _note_prompt(self, applied: Applied) -> None:
        given, options = applied.arguments, call_options(applied.arguments)
        if isinstance(given["tokens"], int):
            prompt = _Prompt(given["tokens"], (), None)
        else:
            packed = pack_tokens(given["tokens"])
            num_full = len(packed) // self.block_size
            media = media_keys(read_media(options.get("media", ())), self.block_size)
            names = enumerate(split_blocks(packed.tobytes(), self.block_size, num_full))
            blocks = tuple(tokens + media.get(index, b"") for index, tokens in names)
            scope = namespace_root(options.get("salt"), options.get("adapter"))
            prompt = _Prompt(len(packed), blocks, scope)
        self.prompts.append(prompt)
        self.running[id_of(given["seq"])] = prompt

    def _note_committed(self, seq_ids: Iterable[SequenceId]) -> None:
        for seq_id in seq_ids:
            if seq_id in self.running:  # or else it is a fork, or its prompt could not be read
                num_committed = self.replay.manager.num_committed_tokens(seq_id)
                self.running[seq_id].num_committed = num_committed

    def warnings(self) -> tuple[str, ...]:
        """What was refused when it was recorded, and is so again."""
        if not self.num_refused:
            return ()
        refused = f"{self.num_refused:,} calls were refused"
        return (f"{refused}, {self.num_refused_prompts:,} of them prompts, which are no requests",)
