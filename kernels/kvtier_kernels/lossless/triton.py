"""Lossless bfloat16 on a GPU: one pass over the pool's rows each way, the reference's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed, UnrepresentableError
from kvtier_kernels.rows.triton import run


def pack(layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
    """Pack the span's rows; waits for the outcome."""
    if not run(pack_rows, unpack_rows, layers, span, packed, packs=True):
        raise UnrepresentableError("a row has too many different exponents")


def unpack(packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
    """Write the span's rows into the pool."""
    run(pack_rows, unpack_rows, layers, span, packed, packs=False)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _count_bits(bits):
    """How many bits of a non-negative int32 are set."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return (bits + (bits >> 16)) & 0x3F


@triton.jit
def pack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pack ROWS rows; set ``failed`` where one cannot be."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    bits = tl.load(rows + column, mask=wanted, other=0).to(tl.int32)
    low = ((bits >> 8) & 0x80) | (bits & 0x7F)
    tl.store(first[:, None] + column, low.to(tl.uint8), mask=wanted)

    exponent = (bits >> 7) & 0xFF
    base = tl.max(tl.where(exponent == 255, 0, exponent), axis=1)
    depth = base[:, None] - exponent
    outside = (depth >= 30) & (exponent != 0) & (exponent != 255)
    depth = tl.where(exponent == 255, 30, tl.where(exponent == 0, 31, depth))
    depth = tl.where(outside, 0, depth)
    one = tl.full(depth.shape, 1, tl.int32) << depth
    present = tl.reduce(tl.where(wanted & (outside == 0), one, 0), 1, _either)
    below = ~(tl.full(depth.shape, -1, tl.int32) << depth)
    code = tl.minimum(_count_bits(present[:, None] & below), 15)
    code = tl.where(wanted, tl.where(outside, 15, code), 0)
    even, odd = tl.split(tl.reshape(code, (ROWS, BLOCK_DIM // 2, 2)))
    byte = tl.arange(0, BLOCK_DIM // 2)[None, :]
    stored = live[:, None] & (byte < (DIM + 1) // 2)
    tl.store(second[:, None] + byte, (even | (odd << 4)).to(tl.uint8), mask=stored)

    tl.store(third, base.to(tl.uint8), mask=live)
    for shift in tl.static_range(4):
        four = (present >> (8 * shift)) & 0xFF
        tl.store(third + 1 + shift, four.to(tl.uint8), mask=live)
    left = wanted & (code == 15)
    for nth in tl.static_range(3):
        next_column = tl.min(tl.where(left, column, BLOCK_DIM), axis=1)
        here = left & (column == next_column[:, None])
        escape = tl.sum(tl.where(here, exponent, 0), axis=1)
        tl.store(third + 5 + nth, escape.to(tl.uint8), mask=live)
        left = left & (here == 0)
    too_many = tl.max(tl.max(left.to(tl.int32), axis=1), axis=0)
    tl.store(failed, 1, mask=too_many > 0)


@triton.jit
def unpack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Unpack ROWS rows."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    low = tl.load(first[:, None] + column, mask=wanted, other=0).to(tl.int32)
    byte = tl.arange(0, BLOCK_DIM // 2)[None, :]
    stored = live[:, None] & (byte < (DIM + 1) // 2)
    pairs = tl.load(second[:, None] + byte, mask=stored, other=0).to(tl.int32)
    code = tl.interleave(pairs & 0xF, pairs >> 4)

    base = tl.load(third, mask=live, other=0).to(tl.int32)
    present = tl.zeros((ROWS,), tl.int32)
    for shift in tl.static_range(4):
        four = tl.load(third + 1 + shift, mask=live, other=0).to(tl.int32)
        present = present | (four << (8 * shift))
    # The depth of a code is that of the present bit with as many others below it.
    exponent = tl.zeros((ROWS, BLOCK_DIM), tl.int32)
    count = tl.zeros((ROWS,), tl.int32)
    for depth in tl.static_range(32):
        here = (present >> depth) & 1
        meant = base - depth
        if depth == 30:
            meant = tl.full((ROWS,), 255, tl.int32)
        if depth == 31:
            meant = tl.zeros((ROWS,), tl.int32)
        found = (here == 1)[:, None] & (count[:, None] == code)
        exponent = tl.where(found, meant[:, None], exponent)
        count += here
    left = wanted & (code == 15)
    for nth in tl.static_range(3):
        next_column = tl.min(tl.where(left, column, BLOCK_DIM), axis=1)
        here = left & (column == next_column[:, None])
        escape = tl.load(third + 5 + nth, mask=live, other=0).to(tl.int32)
        exponent = tl.where(here, escape[:, None], exponent)
        left = left & (here == 0)
    bits = ((low & 0x80) << 8) | (exponent << 7) | (low & 0x7F)
    tl.store(rows + column, bits.to(tl.int16), mask=wanted)
