"""FP8 (e4m3fn) with one scale per token, head and part.

::

    codes   [layer][kv_head][K, V][tokens][dim]   one byte a value
    scales  [layer][kv_head][K, V][tokens]        bfloat16, little-endian

A value is its code times its row's scale, rounded to the pool's dtype. The scale is the row's
largest magnitude over 448, rounded to bfloat16 (to even), which, unlike float16, is as fine for
rows that are tiny, and cut to the largest whose product with 448 is finite. A row whose largest
magnitude is below ``2**-64`` has scale 0 and comes back as zeros. A code is the value over the
scale (float32 division), cut to 448 and rounded to even. Every step is exact or rounds once, so
that all devices make the same bytes. There is no NaN among the codes.

A pool whose values are one byte (an engine's own FP8 pages) is never quantised again: its section
is that of ``raw``, the engine's bytes. The dtype in the shard's header tells which of both it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels import raw, rows
from kvtier_kernels.fp8 import reference
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.transfer.stripes import Shape, Stripe

__all__ = ["pack", "row_bytes", "stripes", "unpack"]

#: What is quantised; one-byte dtypes are stored as they are.
_QUANTISED = (torch.float32, torch.bfloat16, torch.float16)


def pack(layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int = 0) -> None:
    """Pack the span's rows into ``target``; contract of ``raw.pack``.

    Raises ``rows.UnrepresentableError`` for NaN and infinities.
    """
    if _stored_as_is(layers):
        raw.pack(layers, span, target, stream)
        return
    rows.pack(layers, span, target, stream, row_bytes, _engine(layers))


def unpack(source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int = 0) -> None:
    """Unpack the span's rows from ``source`` into the pool; contract of ``raw.unpack``."""
    if _stored_as_is(layers):
        raw.unpack(source, layers, span, stream)
        return
    rows.unpack(source, layers, span, stream, row_bytes, _engine(layers))


def stripes(shape: Shape) -> list[Stripe]:
    """What kernels move of a section: of K, and of V if there is one."""
    if shape.dtype.itemsize == 1:
        return raw.stripes(shape)
    from kvtier_kernels.fp8.triton import pack_rows, unpack_rows
    from kvtier_kernels.rows.triton import stripes as row_stripes

    return row_stripes(pack_rows, unpack_rows, rows.packed_form(shape, row_bytes), shape.dims)


def row_bytes(dim: int) -> tuple[int, int]:
    """Bytes of a row's codes and of its scale."""
    return dim, 2


def _stored_as_is(layers: Sequence[LayerViews]) -> bool:
    if not layers:
        raise ValueError("no layers")
    first = layers[0][0]
    if first.element_size() > 1 and first.dtype not in _QUANTISED:
        raise ValueError(f"fp8 does not take {first.dtype}")
    return first.element_size() == 1


def _engine(layers: Sequence[LayerViews]) -> rows.Engine:
    if layers[0][0].device.type == "cuda":
        from kvtier_kernels.fp8 import triton

        return triton
    return reference
