"""The forward pass against transformers, and the independence of its rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from kvruntime.config import ModelConfig, RopeParameters
from kvruntime.models import Attention, Llama, tensor_shapes
from kvruntime.weights import load_checkpoint

VARIANTS = [
    "llama",
    "llama-tied",
    "llama-llama3-rope",
    "llama-linear-rope",
    "llama-multi-head",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral",
    "mistral-window",
]

TinyCheckpoint = Callable[[str], Path]
ReferenceLogits = Callable[[Path, list[int]], torch.Tensor]
DenseAttention = Callable[[ModelConfig], Attention]


def prompt(length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return ids


def logits_of(model: Llama, token_ids: list[int], attention: Attention) -> torch.Tensor:
    positions = torch.arange(len(token_ids))
    return model.logits(model.forward(torch.tensor(token_ids), positions, attention))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(
    name: str,
    tiny_checkpoint: TinyCheckpoint,
    reference_logits: ReferenceLogits,
    dense_attention: DenseAttention,
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint(name))
    token_ids = prompt(96, checkpoint.config.vocab_size)
    expected = reference_logits(tiny_checkpoint(name), token_ids)
    assert expected.std() > 1  # logits near zero would agree whatever the model does
    model = Llama(checkpoint.config, checkpoint.tensors)
    actual = logits_of(model, token_ids, dense_attention(checkpoint.config))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "windows"), [("qwen2-window", (None, 8)), ("mistral-window", (8, 8))]
)
def test_windows_are_the_familys_own(
    name: str, windows: tuple[int | None, ...], tiny_checkpoint: TinyCheckpoint
) -> None:
    assert load_checkpoint(tiny_checkpoint(name)).config.sliding_windows == windows


def test_a_window_changes_the_logits_of_a_longer_prompt(
    tiny_checkpoint: TinyCheckpoint, dense_attention: DenseAttention
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("mistral-window"))
    model = Llama(checkpoint.config, checkpoint.tensors)
    unlimited = replace(checkpoint.config, sliding_windows=(None, None))
    token_ids = prompt(16, checkpoint.config.vocab_size)
    with_window = logits_of(model, token_ids, dense_attention(checkpoint.config))
    without = logits_of(model, token_ids, dense_attention(unlimited))
    assert torch.equal(with_window[:8], without[:8])
    assert (with_window[8:] - without[8:]).abs().amax(dim=1).min() > 0.01


@pytest.mark.parametrize("name", VARIANTS)
def test_needed_tensors_are_those_of_transformers(
    name: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    folder = tiny_checkpoint(name)
    config = load_checkpoint(folder).config
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert dict(tensor_shapes(config)) == expected


def test_attention_gets_contiguous_float32_rows_of_the_stated_shapes(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint("llama-tied"))
    seen: list[object] = []

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend((layer, tuple(x.shape), x.dtype, x.is_contiguous()) for x in (q, k, v))
        return torch.zeros_like(q)

    logits_of(Llama(checkpoint.config, checkpoint.tensors), prompt(8, 400), attention)
    shapes = [(8, 4, 24), (8, 2, 24), (8, 2, 24)]
    assert seen == [(layer, shape, torch.float32, True) for layer in (0, 1) for shape in shapes]


SMOLLM2_SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeParameters(100000.0),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    eos_token_ids=(2,),
    bos_token_id=1,
)
TINY_SHAPE = replace(
    SMOLLM2_SHAPE,
    vocab_size=400,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qkv_bias=True,
    qk_norm=True,
)


def row_local(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return something that depends on a row's own q, k, v and layer."""
    groups = q.shape[1] // k.shape[1]
    return (q * k.repeat_interleave(groups, 1)).tanh() * (layer + 1) + v.repeat_interleave(
        groups, 1
    )


@pytest.mark.parametrize("config", [SMOLLM2_SHAPE, TINY_SHAPE], ids=["smollm2", "tiny"])
def test_a_row_is_bit_equal_in_every_batch_of_a_multiple_of_rows(config: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.05
        for name, shape in tensor_shapes(config)
    }
    model = Llama(config, tensors)
    token_ids = torch.randint(0, config.vocab_size, (512,), generator=generator)
    positions = torch.randint(0, config.max_position_embeddings, (512,), generator=generator)

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model.forward(token_ids[rows], positions[rows], row_local)
        return hidden, model.logits(hidden)

    step = model.row_multiple
    alone = [run(torch.arange(start, start + step)) for start in range(0, 512, step)]
    expected_hidden = torch.cat([hidden for hidden, _ in alone])
    expected_logits = torch.cat([logits for _, logits in alone])
    for size in (step, 3 * step, 8, 16, 24, 64, 72, 200, 512):
        rows = torch.randperm(512, generator=generator)[:size]
        hidden, logits = run(rows)
        assert torch.equal(hidden, expected_hidden[rows]), size
        assert torch.equal(logits, expected_logits[rows]), size


def test_kv_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    config = replace(SMOLLM2_SHAPE, num_layers=30)
    assert config.kv_bytes_per_token() == 46080
    assert config.kv_bytes_per_token(itemsize=2) == 23040
