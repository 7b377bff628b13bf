"""Rotary position embedding in the half-split order of Hugging Face checkpoints.

Knows frequencies and the rotation of one row by its position (Su et al., RoFormer, 2021). Knows
no table and no longest position: a row's angles are computed from its own position.
"""

import math

import torch

from kvruntime.config import RopeParameters

__all__ = ["angles", "inverse_frequencies", "rotate"]


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Return the angle a position adds to each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return frequencies
    stretched = frequencies / rope.factor
    if rope.rope_type == "linear":
        return stretched
    wavelengths = 2 * math.pi / frequencies
    context = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = (context / wavelengths - low) / (high - low)
    # The order of the operations is that of transformers, for equality to the last bit.
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    result = torch.where(wavelengths > context / low, stretched, blended)
    return torch.where(wavelengths < context / high, frequencies, result)


def angles(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines, each float32 [T, 1, head_dim / 2], of positions int64 [T]."""
    turns = positions[:, None, None].to(torch.float32) * frequencies
    return turns.cos(), turns.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of x [T, heads, head_dim] by its row's angles; the result is contiguous."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
