"""Requests under digests that collide: what is found is what is there, whatever the digest says."""

import random
from collections.abc import Callable, Mapping
from hashlib import sha256

from kvblocks import BlockManager

BLOCK_SIZE = 2
NUM_BLOCKS = 64

WEAK_DIGESTS: Mapping[str, Callable[[bytes], bytes]] = {
    "constant": lambda _: b"\0",
    "8-bit": lambda data: sha256(data).digest()[:1],
}


def play(name: str, seed: int, num_requests: int) -> int:
    """Serve random prompts under a weak digest, and return how many tokens were found.

    No more is found than a prompt has in common with those before it, and as much as under SHA-256.
    """
    rng = random.Random(seed)  # noqa: S311 -- replayable, not secret
    weak, strong = (
        BlockManager(NUM_BLOCKS, BLOCK_SIZE, digest=WEAK_DIGESTS[name], events=True),
        BlockManager(NUM_BLOCKS, BLOCK_SIZE),
    )
    committed: set[tuple[str | None, tuple[int, ...]]] = set()
    num_hits = 0
    for number in range(num_requests):
        salt = rng.choice((None, None, "", "x"))
        prompt = tuple(rng.choices((0, 0, 0, 1, 2), k=rng.randint(1, 12)))
        hits = [serve(manager, number, prompt, salt) for manager in (weak, strong)]
        assert hits[0] == hits[1], f"request {number}: {hits[0]} found, {hits[1]} under SHA-256"
        assert not hits[0] or (salt, prompt[: hits[0]]) in committed, (
            f"request {number}: {hits[0]} tokens of {prompt} found, which nobody had under {salt!r}"
        )
        assert len(weak.take_events()) <= 2
        committed |= {
            (salt, prompt[:end]) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        }
        num_hits += hits[0]
        if number % 1000 == 0:
            weak.check()
    assert weak.state_digest() == strong.state_digest()
    return num_hits


def serve(manager: BlockManager, number: int, prompt: tuple[int, ...], salt: str | None) -> int:
    """A whole request; how many of its tokens were cached."""
    num_cached = manager.allocate(number, prompt, salt=salt).num_cached_tokens
    manager.append({number: len(prompt) - num_cached})
    manager.commit(number, len(prompt))
    if number >= 3:
        manager.free(number - 3)
    return num_cached
