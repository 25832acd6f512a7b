"""Rotary position embedding (Su et al., 2021) in the half-split form that KV is kept in."""

from __future__ import annotations

import math

import torch

from kvtier_engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return radians per token for each of the ``head_dim / 2`` pairs of dimensions, float32.

    In float32 throughout, as the models' reference code does: at position 8000 an angle that is
    computed more exactly than in training differs by 5e-4.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    assert rope.kind == "llama3", rope.kind
    wavelengths = 2 * math.pi / plain
    blend = (rope.original_context_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    result = torch.where(
        wavelengths > rope.original_context_tokens / rope.low_freq_factor,
        plain / rope.factor,
        blended,
    )
    is_high = wavelengths < rope.original_context_tokens / rope.high_freq_factor
    return torch.where(is_high, plain, result)


class Rotation:
    """Cosines and sines of one step's positions, computed once and used by every layer."""

    def __init__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> None:
        angles = positions.float()[:, None] * frequencies
        cosine, sine = angles.cos(), angles.sin()
        # [tokens, 1, dim]: one factor per token, the same for all heads.
        self._cosine = torch.cat((cosine, cosine), dim=-1)[:, None].to(dtype)
        self._signed_sine = torch.cat((-sine, sine), dim=-1)[:, None].to(dtype)

    def apply_(self, heads: torch.Tensor) -> None:
        """Rotate ``heads [tokens, heads, dim]`` in place; the last dimension must be dense."""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        heads.mul_(self._cosine).addcmul_(swapped, self._signed_sine)
