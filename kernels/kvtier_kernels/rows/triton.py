"""What the kernels of the codecs that pack token by token share: addresses, casts, the launch.

A program takes some rows of one plane. Everything that is rounded is rounded by integer
arithmetic or by one IEEE operation, so that a GPU, Triton's interpreter and torch agree bit for
bit; Triton's own ``/`` is approximate, its interpreter's casts to short floats are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rows import Packed

#: Values that a program holds at a time, and its warps: the fastest of 1024 .. 8192 and 2 .. 8 on
#: an H200, for dims of 128.
_TILE_VALUES: Final = 2048
_WARPS: Final = 2
_ALIGN_BYTES: Final = 16

_ELEMENTS: Final = {2: tl.int16, 4: tl.int32}


def launch(
    kernel: Any,
    layers: Sequence[LayerViews],
    span: Span,
    packed: Packed,
    failed: torch.Tensor,
) -> None:
    """Run ``kernel`` on the span's rows of all layers, for K and for V.

    A kernel's parameters are the table of addresses, the packed bytes, ``failed`` (one int32, to
    be set to 1), the counts of layers, heads and tokens, the span's place, for each region where
    its rows start and how far the next head's are, and constants.
    """
    block_tokens = layers[0][0].shape[1]
    for part in range(len(packed.row_bytes[0])):
        views = [view for layer in layers if (view := layer[part]) is not None]
        dim = views[0].shape[3]
        block_dim = max(2, triton.next_power_of_2(dim))
        rows = max(1, min(_TILE_VALUES // block_dim, triton.next_power_of_2(packed.tokens)))
        regions = [
            place
            for region in range(len(packed.row_bytes))
            for place in (packed.start(region, part), packed.head_bytes(region))
        ]
        grid = (packed.layers * packed.kv_heads, triton.cdiv(packed.tokens, rows))
        kernel[grid](
            address_table(views, span),
            packed.data,
            failed,
            packed.layers,
            packed.kv_heads,
            packed.tokens,
            span.token_start % block_tokens,
            span.pool_head_start,
            block_tokens,
            *regions,
            DIM=dim,
            BLOCK_DIM=block_dim,
            ROWS=rows,
            ELEMENT=element_type(views),
            DTYPE=str(views[0].dtype).removeprefix("torch."),
            ALIGN=alignment(views),
            num_warps=_WARPS,
        )


def address_table(views: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    """For each layer its address and the steps to the next block, token and head; the blocks."""
    table = [entry for view in views for entry in (view.data_ptr(), *view.stride()[:3])]
    return torch.tensor([*table, *span.block_ids], dtype=torch.int64).to(views[0].device)


def element_type(views: Sequence[torch.Tensor]) -> Any:
    """The integer as which a pool's values are read: of their width."""
    return _ELEMENTS[views[0].element_size()]


def alignment(views: Sequence[torch.Tensor]) -> int:
    """How many bytes divide the address of every row: 16, or 1 where they are odd."""
    steps = [view.data_ptr() for view in views]
    steps += [step * view.element_size() for view in views for step in view.stride()[:3]]
    return _ALIGN_BYTES if all(step % _ALIGN_BYTES == 0 for step in steps) else 1


@triton.jit
def pool_rows(
    table,
    layers,
    layer,
    head,
    tokens,
    live,
    block_tokens,
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Pointers ``[rows, 1]`` to the pool's rows; ``tokens`` count from the first block's first."""
    entry = table + layer * 4
    block = tl.load(table + layers * 4 + tokens // block_tokens, mask=live, other=0)
    offset = block * tl.load(entry + 1)
    offset += (tokens % block_tokens).to(tl.int64) * tl.load(entry + 2)
    offset += head.to(tl.int64) * tl.load(entry + 3)
    rows = tl.load(entry).to(tl.pointer_type(ELEMENT)) + offset
    return tl.multiple_of(rows[:, None], (ALIGN, ALIGN))


@triton.jit
def to_float32(bits, DTYPE: tl.constexpr):
    """The values whose bits these are."""
    if DTYPE == "bfloat16":
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def from_float32(values, DTYPE: tl.constexpr):
    """The values' bits in the pool's dtype, rounded to even; none is NaN or too large."""
    bits = values.to(tl.int32, bitcast=True)
    # One return: what stands behind a return is compiled all the same, for the wrong type.
    if DTYPE == "bfloat16":
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif DTYPE == "float16":
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def scale_bits(magnitudes, CODE_MAX: tl.constexpr, BITS_MAX: tl.constexpr):
    """The scales of ``scales.encode_scales``, as bfloat16's bits, for magnitudes as float32's."""
    values = magnitudes.to(tl.float32, bitcast=True)
    bits = tl.div_rn(values, tl.full(values.shape, CODE_MAX, tl.float32))
    bits = bits.to(tl.int32, bitcast=True)
    rounded = tl.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, BITS_MAX)
    return tl.where(values < 5.421010862427522e-20, 0, rounded)


@triton.jit
def divisor(bits):
    """The scale in float32, to divide by: infinity for zero, so that all codes are zero."""
    return tl.where(bits == 0, float("inf"), (bits << 16).to(tl.float32, bitcast=True))


@triton.jit
def store_two_bytes(target, bits, live):
    """Write 16 bits, little-endian, where no address need be even."""
    tl.store(target, (bits & 0xFF).to(tl.uint8), mask=live)
    tl.store(target + 1, (bits >> 8).to(tl.uint8), mask=live)


@triton.jit
def load_scale(source, live):
    """Read a bfloat16 scale, written by ``store_two_bytes``, as float32."""
    low = tl.load(source, mask=live, other=0).to(tl.int32)
    high = tl.load(source + 1, mask=live, other=0).to(tl.int32)
    return ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)
