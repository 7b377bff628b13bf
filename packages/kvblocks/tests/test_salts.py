"""Salts keep content apart: what is cached under one is never found under another."""

from kvblocks import BlockManager

from .helpers import filled

NUM_SALTS = 1001


def test_a_million_look_ups_under_other_salts_find_nothing() -> None:
    # Salts that begin alike, an empty one and none; prompts that differ in a token or two.
    salts = [None, "", *("a" * (i % 7) + str(i) for i in range(NUM_SALTS - 2))]
    prompts = [bytes((i % 256, i // 256, 0)) for i in range(NUM_SALTS)]
    manager = BlockManager(NUM_SALTS, 2)
    for i, (salt, prompt) in enumerate(zip(salts, prompts, strict=True)):
        filled(manager, i, prompt[:2], salt=salt)
        manager.free(i)
    num_hits = num_own_hits = 0
    for salt, own in zip(salts, prompts, strict=True):
        for prompt in prompts:
            hit = manager.match(prompt, salt=salt).num_tokens
            if prompt is own:
                num_own_hits += hit
            else:
                num_hits += hit
    assert num_own_hits == 2 * NUM_SALTS
    assert num_hits == 0
