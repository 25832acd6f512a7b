"""The raw op on a GPU: rows copied as integers of their own width, whatever they mean."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kvtier_kernels.rotated_format import Area
from kvtier_kernels.transfer.stripes import Shape, Stripe
from kvtier_kernels.transfer.triton import row_kernel

#: Values that a program holds at a time.
_TILE_VALUES: Final = 8192
_WARPS: Final = 8


def stripes(shape: Shape) -> list[Stripe]:
    """One stripe for K and one for V."""
    made: list[Stripe] = []
    offset = 0
    head_step = shape.tokens * sum(shape.dims) * shape.dtype.itemsize
    for part, dim in enumerate(shape.dims):
        block_dim = triton.next_power_of_2(dim)
        rows = max(1, min(_TILE_VALUES // block_dim, triton.next_power_of_2(shape.tokens)))
        area = Area(offset, head_step, shape.tokens, dim * shape.dtype.itemsize)
        made.append(copied(part, area, dim, rows))
        offset += shape.tokens * area.row_bytes
    return made


def copied(part: int, area: Area, dim: int, rows: int) -> Stripe:
    """A stripe of rows of ``dim`` values that lie in ``area`` as they are."""
    block_dim = triton.next_power_of_2(dim)
    constants = {"DIM": dim, "BLOCK_DIM": block_dim, "ROWS": rows, "STAGES": 1}
    return Stripe(
        part,
        (area,),
        area.rows,
        row_kernel(pack_rows),
        row_kernel(unpack_rows),
        constants,
        {"num_warps": _WARPS},
    )


@triton.jit
def pack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows from the pool."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    target = first.to(rows.dtype)[:, None] + column
    tl.store(target, tl.load(rows + column, mask=wanted, other=0), mask=wanted)


@triton.jit
def unpack_rows(
    rows, live, first, second, third, failed,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows into the pool."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    wanted = live[:, None] & (column < DIM)
    source = first.to(rows.dtype)[:, None] + column
    tl.store(rows + column, tl.load(source, mask=wanted, other=0), mask=wanted)
