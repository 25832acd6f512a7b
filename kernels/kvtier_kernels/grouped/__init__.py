"""INT4 in groups of 128 values, symmetric: for compatibility, it loses more than other 4-bit codes.

::

    codes   [layer][kv_head][K, V][tokens][ceil(dim / 2)]      two codes a byte, low half first
    scales  [layer][kv_head][K, V][tokens][ceil(dim / 128)]    bfloat16, little-endian

A row is cut into groups of 128 values; what is left, or a smaller row, is a group of its own. A
value is its code less 8, times its group's scale, rounded to the pool's dtype. Scales are those of
``fp8`` with 7 for 448. A code is the value over the scale (float32 division), cut to 7, rounded to
even, plus 8; so codes are 1 .. 15, and 8 fills the last half of an odd row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels import rows
from kvtier_kernels.grouped import reference
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows.nibbles import nibble_bytes
from kvtier_kernels.transfer.stripes import Shape, Stripe

__all__ = ["pack", "row_bytes", "stripes", "unpack"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int = 0) -> None:
    """Pack the span's rows into ``target``; contract of ``raw.pack``.

    Raises ``rows.UnrepresentableError`` for NaN and infinities.
    """
    rows.pack(layers, span, target, stream, row_bytes, _engine(layers))


def unpack(source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int = 0) -> None:
    """Unpack the span's rows from ``source`` into the pool; contract of ``raw.unpack``."""
    rows.unpack(source, layers, span, stream, row_bytes, _engine(layers))


def stripes(shape: Shape) -> list[Stripe]:
    """What kernels move of a section: of K, and of V if there is one."""
    from kvtier_kernels.grouped.triton import pack_rows, unpack_rows
    from kvtier_kernels.rows.triton import stripes as row_stripes

    return row_stripes(pack_rows, unpack_rows, rows.packed_form(shape, row_bytes), shape.dims)


def row_bytes(dim: int) -> tuple[int, int]:
    """Bytes of a row's codes and of its scales."""
    return nibble_bytes(dim), 2 * -(-dim // reference.GROUP_DIM)


def _engine(layers: Sequence[LayerViews]) -> rows.Engine:
    if not layers:
        raise ValueError("no layers")
    first = layers[0][0]
    if first.dtype not in _DTYPES:
        raise ValueError(f"int4-g128 does not take {first.dtype}")
    if first.device.type == "cuda":
        from kvtier_kernels.grouped import triton

        return triton
    return reference
