"""Gather paged KV, rotate and quantise it into packed planes, and back, with checks at the door.

The packed form is drawn in ``kvtier_kernels.rotated_format``, the arithmetic in ``reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from kvtier_kernels import raw, rows
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rotated import paged
from kvtier_kernels.rotated.centre import Centre
from kvtier_kernels.rotated.fields import Packed, matching, room, sink_count, sink_span
from kvtier_kernels.rotated_format import PIECE_DIM_MAX, Format
from kvtier_kernels.transfer.stripes import Means, Shape, Stripe

__all__ = ["Centre", "Engine", "RotatedKernel"]

#: Rows of a kernel's tile where only sink tokens move: a power of two.
_SINK_ROWS: Final = 4

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


class Engine(Protocol):
    """The arithmetic on one kind of device. Arguments were checked at the door.

    ``packed`` has exactly the span's rows and lies on the pool's device, as ``centre`` does; sink
    tokens are moved elsewhere.
    """

    def pack(
        self,
        layers: Sequence[LayerViews],
        span: Span,
        form: Format,
        packed: Packed,
        centre: Centre | None,
    ) -> None:
        """Fill codes and scales. Raises ``rows.UnrepresentableError``."""

    def unpack(
        self,
        packed: Packed,
        layers: Sequence[LayerViews],
        span: Span,
        form: Format,
        centre: Centre | None,
    ) -> None:
        """Write the span's rows into the pool."""


@dataclass(frozen=True, slots=True)
class RotatedKernel:
    """Packing of sections of one form.

    Of a section, the first ``sink_tokens`` rows are kept exactly beside their codes. From K,
    ``centre`` is taken before it is rotated, and given back.
    """

    form: Format
    sink_tokens: int = 0
    centre: Centre | None = None

    def stripes(self, shape: Shape) -> list[Stripe]:
        """What kernels move of a section, in this order: the sink tokens last."""
        from kvtier_kernels.raw.triton import copied
        from kvtier_kernels.rotated import triton

        section = self.form.section(shape.layers, shape.kv_heads, shape.tokens, self.sink_tokens)
        means = None
        if self.centre is not None:
            mean, partner = self.centre.mean, self.centre.partner
            means = Means(mean.to(shape.device), partner.to(shape.device))
        made = triton.stripes(self.form, section, shape.tokens, shape.device, means)
        made[0] = replace(made[0], pads=section.pads)
        if self.sink_tokens:
            for part, area in enumerate(section.sinks):
                made.append(copied(part, area, self.form.part_dims[part], _SINK_ROWS))
        return made

    def pack(
        self, layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int = 0
    ) -> None:
        """Quantise the span's rows into ``target``, one whole section; contract of ``raw.pack``.

        The bytes between the section's areas become zeros. Raises ``rows.UnrepresentableError``
        for a NaN, an infinity or values that are too large; what was written of the rows that move
        is undefined then.
        """
        if target.readonly:
            raise ValueError("the target is read-only")
        layers = raw.PoolLayers(layers)
        whole = self._section(layers, span, target)
        device = layers[0][0].device
        with raw.on_stream(device, stream):
            direct = span.whole and device.type == "cpu"
            few = whole if direct else room(self.form, whole.section, span, device)
            self._pack(layers, span, few)
            if direct:
                return
            if span.whole:
                whole.data.copy_(few.data)
                return
            # One transfer instead of one for each field.
            few = replace(few, data=few.data.cpu())
            for moved, target_rows in matching(few, whole, span):
                target_rows.copy_(moved)
            whole.zero_pads()

    def unpack(
        self, source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int = 0
    ) -> None:
        """Write the span's rows from ``source``, one section, into the pool; as ``raw.unpack``."""
        layers = raw.PoolLayers(layers)
        whole = self._section(layers, span, source)
        if len(set(span.block_ids)) < len(span.block_ids):
            raise ValueError("a block is named twice")
        device = layers[0][0].device
        few = whole
        if not span.whole:
            few = room(self.form, whole.section, span, whole.data.device)
            for moved, source_rows in matching(few, whole, span):
                moved.copy_(source_rows)
        with raw.on_stream(device, stream):
            few = replace(few, data=few.data.to(device))
            centre = self._centre(span, device)
            _engine(device).unpack(few, layers, span, self.form, centre)
            if not sink_count(self.sink_tokens, span):
                return

            def write(part: int, values: torch.Tensor) -> None:
                values.copy_(_sink_rows(few, part, values.dtype))

            sinks = sink_span(self.sink_tokens, span, layers[0][0].shape[1])
            rows.scatter(layers, sinks, write)

    def _pack(self, layers: Sequence[LayerViews], span: Span, few: Packed) -> None:
        """Fill ``few``, which has exactly the span's rows and lies on the pool's device."""
        centre = self._centre(span, few.data.device)
        _engine(few.data.device).pack(layers, span, self.form, few, centre)
        if sink_count(self.sink_tokens, span):
            sinks = sink_span(self.sink_tokens, span, layers[0][0].shape[1])
            for part, values in enumerate(rows.gather(layers, sinks)):
                _sink_rows(few, part, values.dtype).copy_(values)
        few.zero_pads()

    def _centre(self, span: Span, device: torch.device) -> Centre | None:
        return None if self.centre is None else self.centre.cut(span, device)

    def _section(self, layers: Sequence[LayerViews], span: Span, section: memoryview) -> Packed:
        """Raise ``ValueError`` unless all fits together."""
        raw.check_span(layers, span)
        form = self.form
        first = layers[0][0]
        if first.dtype not in _DTYPES or first.element_size() != form.element_bytes:
            raise ValueError(f"rotated codecs take float32, float16 and bfloat16: {first.dtype}")
        dims = tuple(view.shape[3] for view in layers[0] if view is not None)
        if dims != form.part_dims:
            raise ValueError(f"the pool's dims are {dims}, the format's {form.part_dims}")
        if max(piece.dim for piece in form.pieces) > PIECE_DIM_MAX:
            raise ValueError(f"a dim is beyond {PIECE_DIM_MAX}: {dims}")
        if not 0 <= self.sink_tokens <= span.tokens:
            raise ValueError(f"{self.sink_tokens} sink tokens of {span.tokens}")
        if self.centre is not None:
            self.centre.check(len(layers), span, form.k_dim)
        shape = form.section(len(layers), span.kv_heads, span.tokens, self.sink_tokens)
        if not section.c_contiguous or section.nbytes != shape.nbytes:
            raise ValueError(f"a contiguous section has {shape.nbytes} bytes, not {section.nbytes}")
        return Packed(torch.frombuffer(section, dtype=torch.uint8), shape)


def _sink_rows(few: Packed, part: int, dtype: torch.dtype) -> torch.Tensor:
    """The sink rows of one part as values; their area begins at a whole line."""
    return few.field(few.section.sinks[part]).view(dtype)


def _engine(device: torch.device) -> Engine:
    if device.type == "cuda":
        from kvtier_kernels.rotated import triton

        return triton
    return paged
