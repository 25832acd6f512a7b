"""Scales of symmetric codes in bfloat16, in plain torch, bit for bit the same on every device."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from kvtier_kernels.rows import UnrepresentableError

#: A row or group with no larger magnitude is zeros: its scale could not be told from zero.
MAGNITUDE_MIN: Final = 2.0**-64

_BFLOAT16_MAX: Final = 255 * 2.0**120


@cache
def scale_bits_max(code_max: int) -> int:
    """The largest scale, as bfloat16's bits, that gives no infinity when it meets ``code_max``."""
    bits = torch.tensor(_BFLOAT16_MAX / code_max, dtype=torch.float32).view(torch.int32)
    return int(bits) >> 16


def encode_scales(magnitudes: torch.Tensor, code_max: int) -> torch.Tensor:
    """Scales for float32 magnitudes, the largest of each row or group, as bfloat16's bits (int32).

    Raises ``UnrepresentableError`` where a magnitude is NaN or infinite.
    """
    if not bool(torch.isfinite(magnitudes).all()):
        raise UnrepresentableError("NaN or infinity among the values")
    # By a tensor: torch's CUDA kernels divide by a number as a product with its reciprocal.
    bits = (magnitudes / torch.full_like(magnitudes, code_max)).view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = rounded.clamp_(max=scale_bits_max(code_max))
    return rounded.masked_fill_(magnitudes < MAGNITUDE_MIN, 0)


def divisors(scale_bits: torch.Tensor) -> torch.Tensor:
    """The scales in float32, to divide by: infinity for zero, so that all codes are zero."""
    scales = (scale_bits << 16).view(torch.float32)
    return scales.masked_fill(scale_bits == 0, float("inf"))


def store_scales(scale_bits: torch.Tensor, target: torch.Tensor) -> None:
    """Write scales ``[..., n]`` into bytes ``[..., 2 * n]``."""
    target.copy_(scale_bits.to(torch.int16).view(torch.uint8))


def load_scales(source: torch.Tensor) -> torch.Tensor:
    """Scales in float32 ``[..., n]`` from bytes ``[..., 2 * n]``."""
    # A copy of its own: what a wider dtype views has to begin at an even byte.
    return source.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
