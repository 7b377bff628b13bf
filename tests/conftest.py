"""The files that the commands on the pages are given."""

import json
import random
from pathlib import Path

import pytest

from kvblocks.recording import RecordingBlockManager


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files under the names that the pages use."""
    folder = tmp_path_factory.mktemp("samples")
    rng = random.Random(0)  # noqa: S311 -- the same files every time
    rows = []
    for number in range(60):
        chat, turn = number % 12, number // 12
        rows.append(
            {
                "timestamp": 1000 * number,
                "input_length": 512 * (turn + 2),
                "output_length": rng.randrange(20, 200),
                "hash_ids": [0, *(100 * chat + i for i in range(1, turn + 2))],
            }
        )
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "conversation_trace.jsonl").write_text(text, "utf-8")
    lengths = "".join(f"{rng.randrange(100, 3000)}\n" for _ in range(40))
    (folder / "lengths.txt").write_text(lengths, "utf-8")
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for name, policy in (("operations.jsonl", "lru"), ("other.jsonl", "fifo")):
        with (folder / name).open("w", encoding="utf-8") as log:
            _chat(RecordingBlockManager(log, 96, 8, policy=policy))
    return folder


def _chat(manager: RecordingBlockManager) -> None:
    """Some prompts that share a beginning, with a fork each."""
    for number in range(12):
        prompt = [*range(20), *range(100 * number, 100 * number + 9)]
        manager.allocate(number, prompt)
        manager.append({number: len(prompt) - manager.num_computed_tokens(number)})
        manager.commit(number, len(prompt))
        manager.fork(number, (number, "sample"))
        manager.append({number: [1], (number, "sample"): [2]})
        manager.commit(number, len(prompt) + 1)
        manager.free(number)
