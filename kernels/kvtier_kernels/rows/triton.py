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
from kvtier_kernels.transfer.stripes import Stripe
from kvtier_kernels.transfer.triton import launch_section, row_kernel

#: Values that a program holds at a time, and its warps: the fastest of 1024 .. 8192 and 2 .. 8 on
#: an H200, for dims of 128.
_TILE_VALUES: Final = 2048
_WARPS: Final = 2

# The interpreter's cast to bfloat16 does not round.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def stripes(pack: Any, unpack: Any, packed: Packed, dims: Sequence[int]) -> list[Stripe]:
    """One stripe for K and one for V, moved by these two bodies of ``row_kernel``."""
    made: list[Stripe] = []
    for part, dim in enumerate(dims):
        block_dim = max(2, triton.next_power_of_2(dim))
        rows = max(1, min(_TILE_VALUES // block_dim, triton.next_power_of_2(packed.tokens)))
        areas = tuple(packed.area(region, part) for region in range(len(packed.row_bytes)))
        constants = {"DIM": dim, "BLOCK_DIM": block_dim, "ROWS": rows, "STAGES": 1}
        kernels = row_kernel(pack), row_kernel(unpack)
        stripe = Stripe(part, areas, packed.tokens, *kernels, constants, {"num_warps": _WARPS})
        made.append(stripe)
    return made


def run(
    pack: Any, unpack: Any, layers: Sequence[LayerViews], span: Span, packed: Packed, *, packs: bool
) -> bool:
    """Move the span's rows, and tell whether all could be packed: waits for that outcome."""
    failed = torch.zeros(1, dtype=torch.int32, device=packed.data.device)
    dims = [view.shape[3] for view in layers[0] if view is not None]
    for stripe in stripes(pack, unpack, packed, dims):
        views = [view for layer in layers if (view := layer[stripe.part]) is not None]
        launch_section(stripe, views, span, packed.data, failed, packs=packs)
    return not packs or not failed.item()


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
    if DTYPE == "bfloat16" and _INTERPRETED:
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif DTYPE == "bfloat16":
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
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
