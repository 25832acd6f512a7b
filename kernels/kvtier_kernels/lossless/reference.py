"""Lossless bfloat16 in plain torch, for any device. Arguments were checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import (
    Packed,
    UnrepresentableError,
    nibbles,
    pack_blocks,
    unpack_blocks,
)

SIDE_BYTES: Final = 8
#: Code of a value whose exponent has none.
ESCAPE: Final = 15
ESCAPES_MAX: Final = 3
#: Depths that stand for exponents wherever these are: of NaN and infinity, of zero and denormals.
DEPTH_SPECIAL: Final = 30
DEPTH_ZERO: Final = 31

_DEPTH_OUTSIDE: Final = 32
_EXPONENT_SPECIAL: Final = 255


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows."""
    pack_blocks(layers, span, packed, encode)


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    unpack_blocks(packed, layers, span, decode)


def encode(
    values: torch.Tensor, low: torch.Tensor, codes: torch.Tensor, side: torch.Tensor
) -> None:
    """Fill ``low``, ``codes`` and ``side`` (uint8, a row's bytes last) from ``values``."""
    bits = values.view(torch.int16)
    low.copy_(((bits >> 8) & 0x80) | (bits & 0x7F))
    exponents = (bits >> 7).bitwise_and_(0xFF).flatten(0, 1)
    base, depths = _depths(exponents)
    present = _present(depths)
    row_codes = _codes(present).gather(1, depths.long())
    nibbles.join(row_codes.view(values.shape), 0, codes)
    side.copy_(_side(base, present, row_codes, exponents).view(side.shape))


def decode(
    values: torch.Tensor, low: torch.Tensor, codes: torch.Tensor, side: torch.Tensor
) -> None:
    """Fill ``values`` from what ``encode`` made, bit for bit."""
    row_side = side.flatten(0, 1)
    row_codes = nibbles.split(codes, values.shape[-1]).flatten(0, 1)
    exponents = _palette(row_side).gather(1, row_codes.long())
    escaped, nth, columns = _escapes(row_codes)
    exponents[escaped, columns] = row_side[escaped, SIDE_BYTES - ESCAPES_MAX + nth]
    signs_mantissas = low.view(torch.int8).to(torch.int16).bitwise_and_(0x807F - 0x10000)
    bits = exponents.to(torch.int16).bitwise_left_shift_(7).view(values.shape)
    values.view(torch.int16).copy_(bits.bitwise_or_(signs_mantissas))


def _depths(exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The base of each row ``[rows, 1]`` and the depth of each value."""
    base = exponents.amax(-1, keepdim=True)
    depths = base - exponents
    lowest, deepest = int(exponents.amin()), int(depths.amax())
    if lowest and deepest < DEPTH_SPECIAL and int(base.amax()) < _EXPONENT_SPECIAL:
        return base, depths
    special = exponents == _EXPONENT_SPECIAL
    base = exponents.masked_fill(special, 0).amax(-1, keepdim=True)
    depths = base - exponents
    depths.masked_fill_(depths >= DEPTH_SPECIAL, _DEPTH_OUTSIDE)
    depths.masked_fill_(special, DEPTH_SPECIAL)
    return base, depths.masked_fill_(exponents == 0, DEPTH_ZERO)


def _present(depths: torch.Tensor) -> torch.Tensor:
    """Which depths occur in a row ``[rows, 33]``; those outside have no code, so they do not."""
    # What lies outside sets bit 0, which is set: where there is an outside, the base occurs.
    bits = torch.bitwise_left_shift(1, depths.int().bitwise_and_(31))
    while (width := bits.shape[1]) > 1:
        half = -(-width // 2)
        bits[:, : width - half] |= bits[:, half:]
        bits = bits[:, :half]
    shifts = torch.arange(_DEPTH_OUTSIDE, dtype=torch.int32, device=depths.device)
    present = ((bits >> shifts) & 1).to(torch.uint8)
    return torch.nn.functional.pad(present, (0, 1))


def _codes(present: torch.Tensor) -> torch.Tensor:
    """The code of each depth, given which occur: how many that occur are less deep."""
    before = present.cumsum(1, dtype=torch.int64) - present
    return before.masked_fill_(present == 0, ESCAPE).clamp_(max=ESCAPE).to(torch.uint8)


def _side(
    base: torch.Tensor, present: torch.Tensor, row_codes: torch.Tensor, exponents: torch.Tensor
) -> torch.Tensor:
    side = torch.zeros((len(base), SIDE_BYTES), dtype=torch.uint8, device=base.device)
    side[:, :1] = base
    eights = present[:, :_DEPTH_OUTSIDE].view(-1, 4, 8)
    weights = 1 << torch.arange(8, device=base.device)
    side[:, 1:5] = (eights * weights).sum(2)
    escaped, nth, columns = _escapes(row_codes)
    if len(nth) and int(nth.max()) >= ESCAPES_MAX:
        raise UnrepresentableError("a row has too many different exponents")
    side[escaped, SIDE_BYTES - ESCAPES_MAX + nth] = exponents[escaped, columns].to(torch.uint8)
    return side


def _palette(side: torch.Tensor) -> torch.Tensor:
    """The exponent of each code ``[rows, 16]``; that of ``ESCAPE`` means nothing."""
    eights = torch.arange(8, device=side.device)
    present = ((side[:, 1:5, None] >> eights) & 1).to(torch.uint8).flatten(1)
    exponents = side[:, :1].long() - torch.arange(_DEPTH_OUTSIDE, device=side.device)
    exponents[:, DEPTH_SPECIAL] = _EXPONENT_SPECIAL
    exponents[:, DEPTH_ZERO] = 0
    palette = torch.zeros((len(side), ESCAPE + 1), dtype=torch.uint8, device=side.device)
    return palette.scatter_(1, _codes(present).long(), exponents.to(torch.uint8))


def _escapes(row_codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, number within the row and column of each escape."""
    if int(row_codes.amax()) < ESCAPE:
        none = torch.empty(0, dtype=torch.int64, device=row_codes.device)
        return none, none, none
    rows, columns = torch.nonzero(row_codes == ESCAPE, as_tuple=True)
    nth = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    return rows, nth, columns
