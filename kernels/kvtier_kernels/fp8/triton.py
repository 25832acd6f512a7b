"""FP8 on a GPU: one pass over the pool's rows each way, bit for bit as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from kvtier_kernels.fp8.reference import CODE_MAX
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed, UnrepresentableError
from kvtier_kernels.rows.scales import scale_bits_max
from kvtier_kernels.rows.triton import (
    divisor,
    from_float32,
    load_scale,
    run,
    scale_bits,
    store_two_bytes,
    to_float32,
)

_CODE_MAX = tl.constexpr(CODE_MAX)
_SCALE_BITS_MAX = tl.constexpr(scale_bits_max(CODE_MAX))


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows; waits for the outcome."""
    if not run(pack_rows, unpack_rows, layers, span, packed, packs=True):
        raise UnrepresentableError("NaN or infinity among the values")


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    run(pack_rows, unpack_rows, layers, span, packed, packs=False)


@triton.jit
def _encode(values):
    """The e4m3fn codes of values within -448 .. 448, rounded to even, as int32."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = tl.abs(values)
    # Normal codes: keep 3 of 23 mantissa bits; the exponent's bias goes from 127 to 7.
    kept = magnitude.to(tl.int32, bitcast=True)
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes count steps of 2**-9, which is what float32 resolves from 2**14 on.
    steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(magnitude < 0.015625, steps, normal) | ((bits >> 24) & 0x80)


@triton.jit
def pack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pack ROWS rows; set ``failed`` where one cannot be."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    values = to_float32(tl.load(rows + column, mask=wanted, other=0), DTYPE)
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(failed, 1, mask=tl.max(magnitude, axis=0) >= 0x7F800000)
    scale = scale_bits(magnitude, _CODE_MAX, _SCALE_BITS_MAX)
    divisors = tl.broadcast_to(divisor(scale)[:, None], values.shape)
    quotients = tl.div_rn(values, divisors)
    codes = _encode(tl.minimum(tl.maximum(quotients, -448.0), 448.0))
    tl.store(first[:, None] + column, codes.to(tl.uint8), mask=wanted)
    store_two_bytes(second, scale, live)


@triton.jit
def unpack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Unpack ROWS rows."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    codes = tl.load(first[:, None] + column, mask=wanted, other=0).to(tl.int32)
    scale = load_scale(second, live)
    # Moved up by 7, a code's bits are float16's for 2**-8 of its value.
    half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.int16)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)[:, None]
    tl.store(rows + column, from_float32(values, DTYPE), mask=wanted)
