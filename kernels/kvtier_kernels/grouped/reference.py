"""INT4 in groups in plain torch, for any device. Arguments were checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed, nibbles, pack_blocks, unpack_blocks
from kvtier_kernels.rows.scales import divisors, encode_scales, load_scales, store_scales

GROUP_DIM: Final = 128
CODE_MAX: Final = 7
CODE_ZERO: Final = 8


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows."""
    pack_blocks(layers, span, packed, encode)


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    unpack_blocks(packed, layers, span, decode)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``codes`` and ``scales`` (uint8, a row's bytes last) from ``values``."""
    for group, start in enumerate(range(0, values.shape[-1], GROUP_DIM)):
        wide = values[..., start : start + GROUP_DIM].float()
        scale_bits = encode_scales(wide.abs().amax(-1, keepdim=True), CODE_MAX)
        quotients = (wide / divisors(scale_bits)).clamp_(-CODE_MAX, CODE_MAX)
        group_codes = quotients.round_().add_(CODE_ZERO).to(torch.uint8)
        target = codes[..., start // 2 : (start + GROUP_DIM) // 2]
        nibbles.join(group_codes, CODE_ZERO, target)
        store_scales(scale_bits, scales[..., 2 * group : 2 * group + 2])


def decode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``values`` from what ``encode`` made: exact products, rounded once."""
    steps = nibbles.split(codes, values.shape[-1]).float().sub_(CODE_ZERO)
    group_scales = load_scales(scales)
    for group, start in enumerate(range(0, values.shape[-1], GROUP_DIM)):
        columns = slice(start, start + GROUP_DIM)
        values[..., columns] = steps[..., columns] * group_scales[..., group : group + 1]
