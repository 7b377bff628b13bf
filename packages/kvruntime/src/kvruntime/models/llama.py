"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share, on one flat batch of rows.

Knows the weights and how a row of hidden state becomes the next layer's. Does not know which
sequence a row belongs to, nor where keys and values are kept: the caller's `Attention` writes and
reads them, and applies the scale and the sliding window.

Row invariance: a row comes out the same, bit for bit, in every batch whose number of rows is a
multiple of `Llama.row_multiple`; callers pad to it. What the padding holds is of no consequence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch.nn import functional as F  # noqa: N812 - the name torch users know it by

from kvruntime.config import ModelConfig
from kvruntime.models.linear import Linear, row_multiple
from kvruntime.models.rope import angles, inverse_frequencies, rotate

__all__ = ["Attention", "Llama", "tensor_shapes"]


class Attention(Protocol):
    """What the caller hands in: stores K and V of these rows, then attends."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output of every row.

        All are float32 and contiguous: q and the result [T, num_heads, head_dim], k and v
        [T, num_kv_heads, head_dim]. q and k carry their positions already.
        """


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the Hugging Face name and the shape of each tensor that the model needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
            if config.qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
        if config.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer, float32; projections that read the same input are one matrix."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], index: int) -> "_Layer":
        def get(name: str) -> torch.Tensor:
            return tensors[f"model.layers.{index}.{name}"]

        def find(name: str) -> torch.Tensor | None:
            return tensors.get(f"model.layers.{index}.{name}")

        biases = [find(f"self_attn.{name}_proj.bias") for name in "qkv"]
        return cls(
            input_norm=get("input_layernorm.weight"),
            qkv=Linear(
                torch.cat([get(f"self_attn.{name}_proj.weight") for name in "qkv"]),
                torch.cat([bias for bias in biases if bias is not None])
                if all(bias is not None for bias in biases)
                else None,
            ),
            q_norm=find("self_attn.q_norm.weight"),
            k_norm=find("self_attn.k_norm.weight"),
            o=Linear(get("self_attn.o_proj.weight")),
            post_attention_norm=get("post_attention_layernorm.weight"),
            gate_up=Linear(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
            down=Linear(get("mlp.down_proj.weight")),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class Llama:
    """A decoder-only transformer; the four families differ in what `config` says only.

    `tensors` holds what `tensor_shapes(config)` names, in float32; on another device than the CPU
    they are moved there, with all that runs. Fused copies of the projections
    are made, and packed ones, so building costs some passes over the weights and their memory twice.
    `row_multiple` holds for the number of threads that torch uses when it is built.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, device: str = "cpu"
    ) -> None:
        self.config = config
        if device != "cpu":
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._embedding = tensors["model.embed_tokens.weight"]
        self._layers = [_Layer.of(tensors, index) for index in range(config.num_layers)]
        self._norm = tensors["model.norm.weight"]
        self._head = Linear(
            self._embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        )
        linears = chain.from_iterable(layer.linears for layer in self._layers)
        self.row_multiple = row_multiple((*linears, self._head))
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Return the hidden state of every row after the final norm, float32 [T, hidden_size].

        `token_ids` and `positions` are int64 [T]; rows may be of any sequences in any order. Each
        row's result is the same in every batch whose T is a multiple of `row_multiple`, if `attention` keeps
        rows apart as well. Cost: two operations per weight and row, and `attention` once a layer.
        """
        cos, sin = angles(self._frequencies, positions)
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, self._normalise(x, layer.input_norm), cos, sin)
            x = x + layer.o(attention(index, q, k, v).flatten(1))
            inner = layer.gate_up(self._normalise(x, layer.post_attention_norm))
            gate, up = inner.chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return self._normalise(x, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, float32 [R, vocab_size], of hidden [R, hidden_size].

        Rows come from `forward`; each row's result is the same in every batch whose R is a
        multiple of `row_multiple`.
        """
        return self._head(hidden)

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of rows x, each [T, heads, head_dim] and contiguous."""
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normalise(q, layer.q_norm), self._normalise(k, layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
