"""Two codes in a byte, the earlier one in the low half, in plain torch."""

from __future__ import annotations

import torch


def nibble_bytes(dim: int) -> int:
    """Bytes that the codes of ``dim`` values take."""
    return -(-dim // 2)


def join(codes: torch.Tensor, fill: int, target: torch.Tensor) -> None:
    """Write codes 0 .. 15 (uint8, contiguous) as bytes; ``fill`` stands in an odd row's last half.

    Codes 0 .. 15 in order make the bytes ``10 32 54 76 98 BA DC FE``.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=fill)
    pairs = codes.view(torch.int16)
    target.copy_((pairs | (pairs >> 4)) & 0xFF)


def split(source: torch.Tensor, dim: int) -> torch.Tensor:
    """The ``dim`` codes of each row as uint8."""
    pairs = source.to(torch.int16)
    pairs = (pairs | (pairs << 4)) & 0x0F0F
    return pairs.view(torch.uint8)[..., :dim]
