"""The reference over a paged pool: gather, quantise all planes together, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvtier_kernels import rows
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rotated.centre import Centre
from kvtier_kernels.rotated.fields import Packed
from kvtier_kernels.rotated.reference import FLOAT16_MAX, Rows, decode, encode
from kvtier_kernels.rotated_format import Format

#: Values that are worked on together: they and their temporaries stay in a core's cache.
_VALUES_TOGETHER: Final = 2**17


def pack(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
) -> None:
    """Fill the codes and scales of the span's rows."""
    parts = rows.gather(layers, span)
    for index, piece in enumerate(form.pieces):
        columns = parts[piece.part][..., piece.start : piece.start + piece.dim]
        values = columns.float()
        if centre is not None and piece.part == 0:
            values = values - centre.offsets(piece.start, piece.dim)
        scales = packed.field(packed.section.scales[index]).view(torch.float16)
        planes = [packed.field(area) for area in packed.section.codes[index]]
        for block, scale, *some in _blocks(values, scales, *planes):
            encoded = encode(block.flatten(0, -2), piece.code)
            # NaN compares false as well.
            if not bool((encoded.scales <= FLOAT16_MAX).all()):
                raise rows.UnrepresentableError("a NaN, an infinity or values too large")
            scale.copy_(encoded.scales.view(scale.shape))
            for target, plane in zip(some, encoded.planes, strict=True):
                target.copy_(plane.view(target.shape))


def unpack(
    packed: Packed,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    centre: Centre | None,
) -> None:
    """Write the span's rows into the pool."""
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, piece in enumerate(form.pieces):
        scales = packed.field(packed.section.scales[index]).view(torch.float16)
        planes = [packed.field(area) for area in packed.section.codes[index]]
        values = torch.empty((*scales.shape[:-1], piece.dim), device=packed.data.device)
        for block, scale, *some in _blocks(values, scales, *planes):
            flat = Rows(tuple(plane.flatten(0, -2) for plane in some), scale.flatten())
            block.copy_(decode(flat, piece.dim, piece.code).view(block.shape))
        if centre is not None and piece.part == 0:
            values += centre.offsets(piece.start, piece.dim)
        parts[piece.part].append(values)

    def write(part: int, target: torch.Tensor) -> None:
        bound = torch.finfo(target.dtype).max
        columns = 0
        for values in parts[part]:
            dim = values.shape[-1]
            target[..., columns : columns + dim] = values.clamp_(-bound, bound)
            columns += dim

    rows.scatter(layers, span, write)


def _blocks(*fields: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut ``[layers, heads, tokens, n]`` alike into views ``[some planes, tokens, n]``."""
    together = max(1, _VALUES_TOGETHER // fields[0][0, 0].numel())
    cut = (torch.split(field.flatten(0, 1), together) for field in fields)
    return list(zip(*cut, strict=True))
