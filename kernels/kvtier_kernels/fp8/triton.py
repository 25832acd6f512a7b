"""FP8 on a GPU: one pass over the pool's rows each way, bit for bit as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier_kernels.fp8.reference import CODE_MAX
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed, UnrepresentableError
from kvtier_kernels.rows.scales import scale_bits_max
from kvtier_kernels.rows.triton import (
    divisor,
    from_float32,
    launch,
    load_scale,
    pool_rows,
    scale_bits,
    store_two_bytes,
    to_float32,
)

_CODE_MAX = tl.constexpr(CODE_MAX)
_SCALE_BITS_MAX = tl.constexpr(scale_bits_max(CODE_MAX))


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows; waits for the outcome."""
    failed = torch.zeros(1, dtype=torch.int32, device=packed.data.device)
    launch(_pack, layers, span, packed, failed)
    if failed.item():
        raise UnrepresentableError("NaN or infinity among the values")


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    failed = torch.zeros(1, dtype=torch.int32, device=packed.data.device)
    launch(_unpack, layers, span, packed, failed)


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
def _pack(
    table, packed, failed, layers, heads, tokens, skipped, pool_head, block_tokens,
    codes_start, codes_head, scales_start, scales_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    live = row < tokens
    wanted = live[:, None] & (column < DIM)
    source = pool_rows(
        table, layers, plane // heads, pool_head + plane % heads, skipped + row, live,
        block_tokens, ELEMENT, ALIGN,
    )  # fmt: skip
    values = to_float32(tl.load(source + column, mask=wanted, other=0), DTYPE)
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(failed, 1, mask=tl.max(magnitude, axis=0) >= 0x7F800000)
    scale = scale_bits(magnitude, _CODE_MAX, _SCALE_BITS_MAX)
    divisors = tl.broadcast_to(divisor(scale)[:, None], values.shape)
    quotients = tl.div_rn(values, divisors)
    codes = _encode(tl.minimum(tl.maximum(quotients, -448.0), 448.0))
    plane_step = plane.to(tl.int64)
    place = row.to(tl.int64)
    target = packed + codes_start + plane_step * codes_head + place * DIM
    tl.store(target[:, None] + column, codes.to(tl.uint8), mask=wanted)
    target = packed + scales_start + plane_step * scales_head + place * 2
    store_two_bytes(target, scale, live)


@triton.jit
def _unpack(
    table, packed, failed, layers, heads, tokens, skipped, pool_head, block_tokens,
    codes_start, codes_head, scales_start, scales_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    live = row < tokens
    wanted = live[:, None] & (column < DIM)
    plane_step = plane.to(tl.int64)
    place = row.to(tl.int64)
    source = packed + codes_start + plane_step * codes_head + place * DIM
    codes = tl.load(source[:, None] + column, mask=wanted, other=0).to(tl.int32)
    scale = load_scale(packed + scales_start + plane_step * scales_head + place * 2, live)
    # Moved up by 7, a code's bits are float16's for 2**-8 of its value.
    half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.int16)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)[:, None]
    target = pool_rows(
        table, layers, plane // heads, pool_head + plane % heads, skipped + row, live,
        block_tokens, ELEMENT, ALIGN,
    )  # fmt: skip
    tl.store(target + column, from_float32(values, DTYPE), mask=wanted)
