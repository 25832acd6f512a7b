"""FP8 in plain torch, for any device. Arguments were checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed, pack_blocks, unpack_blocks
from kvtier_kernels.rows.scales import divisors, encode_scales, load_scales, store_scales

CODE_MAX: Final = 448


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows."""
    pack_blocks(layers, span, packed, encode)


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    unpack_blocks(packed, layers, span, decode)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``codes`` and ``scales`` (uint8, a row's bytes last) from ``values``."""
    wide = values.float()
    scale_bits = encode_scales(wide.abs().amax(-1, keepdim=True), CODE_MAX)
    quotients = (wide / divisors(scale_bits)).clamp_(-CODE_MAX, CODE_MAX)
    codes.copy_(quotients.to(torch.float8_e4m3fn).view(torch.uint8))
    store_scales(scale_bits, scales)


def decode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``values`` from what ``encode`` made: exact products, rounded once."""
    # A code's bits, sign apart, are those of float16 for 2**-8 of its value when moved up by 7.
    bits = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000)
    values.copy_(bits.view(torch.float16).float().mul_(load_scales(scales) * 256))
