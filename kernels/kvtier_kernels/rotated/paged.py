"""The reference over a paged pool: gather, quantise all planes together, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

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
        values = parts[piece.part]
        for block, taken, scale, *some in _blocks(values, packed, form, index, centre):
            wide = block.float() if taken is None else block.float() - taken
            encoded = encode(wide.flatten(0, 1), piece.code)
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

    def write(part: int, values: torch.Tensor) -> None:
        bound = torch.finfo(values.dtype).max
        for index, piece in enumerate(form.pieces):
            if piece.part != part:
                continue
            for block, taken, scale, *some in _blocks(values, packed, form, index, centre):
                flat = Rows(tuple(plane.flatten(0, 1) for plane in some), scale.flatten())
                wide = decode(flat, piece.dim, piece.code).view(block.shape)
                if taken is not None:
                    wide = wide + taken
                block.copy_(wide.clamp_(-bound, bound))

    rows.scatter(layers, span, write)


def _blocks(
    values: torch.Tensor, packed: Packed, form: Format, index: int, centre: Centre | None
) -> Iterator[Any]:
    """Cut one piece of rows ``[layers, heads, tokens, dim]`` and what is packed of it alike.

    Gives ``(values, taken, scales, *planes)`` of some planes each, ``[planes, tokens, n]``: views,
    so that what is written into them is written into the whole. ``taken`` is the centre's, or
    None.
    """
    piece = form.pieces[index]
    values = values[..., piece.start : piece.start + piece.dim]
    fields = [values, packed.field(packed.section.scales[index]).view(torch.float16)]
    fields += [packed.field(area) for area in packed.section.codes[index]]
    centred = centre is not None and piece.part == 0
    if centre is not None and centred:
        fields.append(centre.offsets(piece.start, piece.dim))
    together = max(1, _VALUES_TOGETHER // (values.shape[2] * piece.dim))
    # A view, never a copy.
    flat = (torch.split(field.view(-1, *field.shape[2:]), together) for field in fields)
    for block, scale, *some in zip(*flat, strict=True):
        taken = some.pop() if centred else None
        yield block, taken, scale, *some
