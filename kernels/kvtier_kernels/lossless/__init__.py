"""bfloat16 in 12 bits a value and 8 bytes a row, bit for bit: NaN payloads, -0.0 and all.

::

    low    [layer][kv_head][K, V][tokens][dim]             sign and mantissa, one byte a value
    codes  [layer][kv_head][K, V][tokens][ceil(dim / 2)]   exponents, two a byte, low half first
    side   [layer][kv_head][K, V][tokens][8]               of each row:

           [ base ][ exponents in use, 4 bytes ][ escape ][ escape ][ escape ]

A row's values rarely have more than a dozen different exponents. ``base`` is the largest of them,
255 (NaN, infinity) apart. Bit ``k`` of the next four bytes (little-endian) says whether exponent
``base - k`` occurs, for ``k`` up to 29; bit 30 stands for 255, and bit 31 for 0 (zeros, denormals).
A value's code is the number of bits below its own that are set. The 15 lowest set bits have codes
so; code 15 is every other exponent, an escape: it stands, in the order of the values, in the
row's last three bytes. What is unused is zero.

The size is fixed, so a row with more than three escapes has no room: it is refused as
``rows.UnrepresentableError``. Of normally distributed rows of 128 values, one in millions has an
escape at all. A pool of any other dtype is stored as ``raw`` does; the shard's header tells it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels import raw, rows
from kvtier_kernels.lossless import reference
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows.nibbles import nibble_bytes
from kvtier_kernels.transfer.stripes import Shape, Stripe

__all__ = ["pack", "row_bytes", "stripes", "unpack"]


def pack(layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int = 0) -> None:
    """Pack the span's rows into ``target``; contract of ``raw.pack``.

    Raises ``rows.UnrepresentableError`` for a row with too many exponents.
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
    if shape.dtype != torch.bfloat16:
        return raw.stripes(shape)
    from kvtier_kernels.lossless.triton import pack_rows, unpack_rows
    from kvtier_kernels.rows.triton import stripes as row_stripes

    return row_stripes(pack_rows, unpack_rows, rows.packed_form(shape, row_bytes), shape.dims)


def row_bytes(dim: int) -> tuple[int, int, int]:
    """Bytes of a row's signs and mantissas, of its codes and of its side data."""
    return dim, nibble_bytes(dim), reference.SIDE_BYTES


def _stored_as_is(layers: Sequence[LayerViews]) -> bool:
    if not layers:
        raise ValueError("no layers")
    return layers[0][0].dtype != torch.bfloat16


def _engine(layers: Sequence[LayerViews]) -> rows.Engine:
    if layers[0][0].device.type == "cuda":
        from kvtier_kernels.lossless import triton

        return triton
    return reference
