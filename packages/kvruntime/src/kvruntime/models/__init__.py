"""The forward pass of a decoder, without a cache: where keys and values live is the caller's."""

from kvruntime.models.llama import Attention, Llama, tensor_shapes

__all__ = ["Attention", "Llama", "tensor_shapes"]
