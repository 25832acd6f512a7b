"""INT4 in groups on a GPU: one pass over the pool's rows each way, bit for bit as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from kvtier_kernels.grouped.reference import CODE_MAX, GROUP_DIM
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

_GROUP_DIM = tl.constexpr(GROUP_DIM)
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
def pack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pack ROWS rows; set ``failed`` where one cannot be."""
    group_dim: tl.constexpr = min(BLOCK_DIM, _GROUP_DIM)
    groups: tl.constexpr = BLOCK_DIM // group_dim
    column = tl.arange(0, BLOCK_DIM)[None, :]
    bits = tl.load(rows + column, mask=live[:, None] & (column < DIM), other=0)
    values = tl.reshape(to_float32(bits, DTYPE), (ROWS, groups, group_dim))
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    tl.store(failed, 1, mask=tl.max(tl.max(magnitude, axis=1), axis=0) >= 0x7F800000)
    scale = scale_bits(magnitude, _CODE_MAX, _SCALE_BITS_MAX)
    quotients = tl.div_rn(values, tl.broadcast_to(divisor(scale)[:, :, None], values.shape))
    quotients = tl.minimum(tl.maximum(quotients, -7.0), 7.0)
    # From 1.5 * 2**23 on float32 counts in ones: the sum is rounded to even, the code its low end.
    codes = (quotients + (12582912.0 + 8.0)).to(tl.int32, bitcast=True) & 0xF
    low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK_DIM // 2, 2)))
    byte = tl.arange(0, BLOCK_DIM // 2)[None, :]
    wanted = live[:, None] & (byte < (DIM + 1) // 2)
    tl.store(first[:, None] + byte, (low | (high << 4)).to(tl.uint8), mask=wanted)
    used: tl.constexpr = (DIM + group_dim - 1) // group_dim
    group = tl.arange(0, groups)[None, :]
    store_two_bytes(second[:, None] + 2 * group, scale, live[:, None] & (group < used))


@triton.jit
def unpack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Unpack ROWS rows."""
    group_dim: tl.constexpr = min(BLOCK_DIM, _GROUP_DIM)
    groups: tl.constexpr = BLOCK_DIM // group_dim
    byte = tl.arange(0, BLOCK_DIM // 2)[None, :]
    wanted = live[:, None] & (byte < (DIM + 1) // 2)
    pairs = tl.load(first[:, None] + byte, mask=wanted, other=0x88).to(tl.int32)
    codes = tl.reshape(tl.interleave(pairs & 0xF, pairs >> 4), (ROWS, groups, group_dim))
    used: tl.constexpr = (DIM + group_dim - 1) // group_dim
    group = tl.arange(0, groups)[None, :]
    scale = load_scale(second[:, None] + 2 * group, live[:, None] & (group < used))
    values = tl.reshape((codes - 8).to(tl.float32) * scale[:, :, None], (ROWS, BLOCK_DIM))
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    tl.store(rows + column, from_float32(values, DTYPE), mask=wanted)
