"""Why a prompt found as much of itself in the cache as it did, and no more.

What is found ends before a block, and that block is looked for wherever it could be or have been:
with a sequence that computes it, among what has left, in other namespaces, beside what is there.

Knows where to look. Does not know how a prompt is admitted.
"""

from __future__ import annotations

from kvblocks.hashing import TOKEN_BYTES, Namespace, chain_packed, media_keys
from kvblocks.ledger import Ledger
from kvblocks.memory import Memory
from kvblocks.prompts import Prompt
from kvblocks.results import Explanation, SequenceId, WhyNot
from kvblocks.runs import Stretch, cut_stretches


def explain(ledger: Ledger, memory: Memory, prompt: Prompt) -> Explanation:
    """Why a prompt that is about to be admitted finds what it finds. Changes nothing.

    O(sequences and namespaces, and the tokens that they have in common with it).
    """
    size, num_found = ledger.block_size, len(prompt.found.blocks)
    lengths = (prompt.num_tokens, num_found * size)
    start, stop = num_found * size, (num_found + 1) * size
    if stop >= prompt.num_tokens:
        return Explanation(*lengths, WhyNot.WHOLE, start)
    if computing := _find_computing(ledger, prompt, stop):
        seq_id, step = computing
        return Explanation(*lengths, WhyNot.NOT_READY, start, seq_id=seq_id, step=step)
    if departure := memory.departure_of(_key_of_next(ledger, prompt, num_found)):
        return Explanation(
            *lengths,
            WhyNot.EVICTED if departure.is_eviction else WhyNot.FORGOTTEN,
            start,
            step=departure.step,
            num_evicted_since=ledger.runs.num_evicted - departure.num_evicted,
        )
    if other := _find_elsewhere(ledger, memory, prompt, num_found):
        return Explanation(
            *lengths, WhyNot.OTHER_NAMESPACE, start, salt=other.salt, adapter=other.adapter
        )
    key = prompt.keys.get(num_found, b"")
    rest = prompt.tokens[start:stop].tobytes()
    if partial := ledger.runs.find_partial(prompt.found, Stretch(key, rest)):
        return Explanation(*lengths, WhyNot.DIFFERS, start + partial.num_tokens)
    return Explanation(*lengths, WhyNot.NEW, start)


def _key_of_next(ledger: Ledger, prompt: Prompt, num_found: int) -> bytes:
    """The key of the first block that was not found."""
    run, num_blocks, _ = prompt.found
    root = run.hashes[num_blocks - 1] if num_found else prompt.namespace.root
    size = ledger.block_size
    tokens = prompt.tokens[num_found * size : (num_found + 1) * size].tobytes()
    own = media_keys(prompt.media, size).get(num_found)
    return chain_packed(root, tokens, size, {0: own} if own else {}, ledger.digest)[0]


def _find_computing(ledger: Ledger, prompt: Prompt, stop: int) -> tuple[SequenceId, int] | None:
    """A sequence that has the first `stop` tokens but has not committed them.

    With the open step that computes them, or 0 if none does yet.
    """
    size = ledger.block_size
    index = stop // size - 1
    before = {at: key for at, key in prompt.keys.items() if at <= index}
    tokens = prompt.tokens[:stop].tobytes()
    for seq_id in ledger.sequences:
        seq = ledger.get(seq_id)
        own = seq.token_ids[: max(0, stop - seq.first_id)].tobytes()
        start = TOKEN_BYTES * seq.first_id
        if seq.num_committed >= stop or not own or not seq.run.is_kept:
            continue
        if start + len(own) < len(tokens) or not tokens.endswith(own):
            continue
        if before != {at: key for at, key in seq.keys.items() if at <= index}:
            continue
        if ledger.runs.path_tokens(seq.run) == tokens[:start]:
            is_scheduled = seq.num_computed >= stop and seq.last_step > ledger.pool.completed_step
            return seq_id, seq.last_step if is_scheduled else 0
    return None


def _find_elsewhere(
    ledger: Ledger, memory: Memory, prompt: Prompt, num_found: int
) -> Namespace | None:
    """Another namespace in which more of the prompt is cached."""
    size = ledger.block_size
    full = prompt.tokens[: (num_found + 1) * size].tobytes()
    beside = media_keys(prompt.media, size)
    for namespace in reversed(memory.namespaces.values()):
        keys = {**beside, 0: namespace.key + beside.get(0, b"")}
        stretches = cut_stretches(full, 0, keys, size * TOKEN_BYTES)
        is_other = namespace.key != prompt.namespace.key
        if is_other and len(ledger.runs.find(stretches).blocks) > num_found:
            return namespace
    return None
