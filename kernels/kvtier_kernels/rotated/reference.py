"""The rotated codecs in plain torch: the truth that the kernels are compared with.

Everything is float32 in exactly this order, one rounding per operation, no fused multiply-add, so
that every device and the Triton kernels give the same codes and scales, bit for bit. ``y`` is a
piece of D = m * 2**k values, m odd, as m runs of 2**k:

1. (centred K only) ``x = x - (mean * cos + partner * sin)``.
2. ``y = x * signs``.
3. Within each run, for h = 1, 2, 4 .. 2**(k-1) and i with bit h clear:
   ``y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]``.
4. ``y = y * 2**-ceil(k/2)``. (The way back takes 2**-floor(k/2): neither rounds.)
5. With m > 1, across the runs: ``y = y - total * (2/m)``, where ``total`` is the sum of the runs
   as ``fold`` takes it. Steps 2 to 5 are orthogonal up to a power of two: signs, Walsh-Hadamard,
   Householder reflection. The reflection mixes the runs evenly where D is no power of two.

An integer code (``int8``, ``int6``), with a the row's largest |y|:

    scale = float16(a * (1 / peak));  code = clamp(round(y * (1 / scale)), -peak, peak)

A Lloyd-Max code, with integer levels L and ``unit`` of them per standard deviation:

    f    = 1 / a * 180
    p    = round(y * f)                             an integer: sums over p are exact
    v    = clamp(round(y * (f * sqrt(1 / sum(p * p) * D) * unit)), -127, 127)
    code = the number of thresholds at or below v
    scale = float16(sum(p * L[code]) / sum(L[code]**2) * (a * (1 / 180)))    least squares

Reciprocals of constants are constants, rounded to float32. 1 / a and 1 / scale are 0 where they
would be infinite. ``round`` is to nearest, ties to even. A value comes back as ``scale * code`` or
``scale * L[code]``, then steps 5, 3, 4, 2 and 1 reversed, cut to what the pool's dtype can hold and
rounded to it. A row of zeros, or too small for a scale, has scale 0 and comes back as zeros (as the
mean, if centred). A row whose scale is not finite cannot be stored: it held a NaN or an infinity,
or values beyond 65504 (below which no row fails).
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch

from kvtier_kernels.rotated.codebooks import (
    factors,
    levels,
    norms,
    sign_tensor,
    thresholds,
    unit,
)
from kvtier_kernels.rotated_format import Code

#: Largest magnitude of p: 512 * 180**2 and 512 * 180 * 127 stay below 2**24.
FIXED_PEAK: Final = 180.0
FLOAT16_MAX: Final = 65504.0


class Rows(NamedTuple):
    """One piece, packed: bit planes ``[rows, row_bytes]`` uint8, scales ``[rows]`` float16."""

    planes: tuple[torch.Tensor, ...]
    scales: torch.Tensor


def encode(rows: torch.Tensor, code: Code) -> Rows:
    """Quantise float32 rows ``[rows, dim]``, which stay as they are.

    A scale that is no number up to 65504 marks a row that cannot be stored.
    """
    values = rotate(rows.t().contiguous())
    peak = values.abs().amax(0)
    if code.peak:
        codes, scales = _integer_codes(values, peak, code)
    else:
        codes, scales = _level_codes(values, peak, code)
    planes = []
    shift = code.bits
    for width in code.widths:
        shift -= width
        bits = codes if len(code.widths) == 1 else (codes >> shift) & ((1 << width) - 1)
        planes.append(_pack_bits(bits, width).t())
    return Rows(tuple(planes), scales)


def decode(packed: Rows, dim: int, code: Code) -> torch.Tensor:
    """Give the float32 rows ``[rows, dim]`` back."""
    codes = None
    for plane, width in zip(packed.planes, code.widths, strict=True):
        bits = _unpack_bits(plane.t().contiguous(), width, dim)
        codes = bits if codes is None else (codes << width) | bits
    assert codes is not None, "a code has planes"
    if not code.peak:
        values = _lookup(_level_table(code.bits, codes.device), codes)
    elif len(code.widths) == 1:
        values = codes.view(torch.int8).float()
    else:
        values = codes.float() - (code.peak + 1)
    return unrotate(values * packed.scales.float()).t()


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Steps 2 to 5 over the first dimension of float32 ``[dim, rows]``, a new tensor."""
    dim = values.shape[0]
    odd, exponent = factors(dim)
    values = values * sign_tensor(dim, values.device)[:, None]
    values = _butterflies(values, odd, exponent)
    values.mul_(norms(exponent)[0])
    return _reflect(values, odd)


def unrotate(values: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rotate``."""
    dim = values.shape[0]
    odd, exponent = factors(dim)
    values = _butterflies(_reflect(values, odd), odd, exponent)
    values.mul_(norms(exponent)[1])
    return values.mul_(sign_tensor(dim, values.device)[:, None])


def fold(runs: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension: padded with zeros to a power of two, then halved by adding
    the upper half to the lower until one is left.
    """
    count = runs.shape[0]
    width = 1 << (count - 1).bit_length()
    if width > count:
        runs = torch.cat([runs, runs.new_zeros((width - count, *runs.shape[1:]))])
    while runs.shape[0] > 1:
        half = runs.shape[0] // 2
        runs = runs[:half] + runs[half:]
    return runs[0]


def _butterflies(values: torch.Tensor, odd: int, exponent: int) -> torch.Tensor:
    """Step 3 on ``[dim, rows]``, unnormalised: its own inverse up to 2**exponent."""
    rows = values.shape[1]
    spare = torch.empty_like(values) if exponent else values
    for stage in range(exponent):
        half = 1 << stage
        shape = (odd << (exponent - 1 - stage), 2, half, rows)
        source, target = values.view(shape), spare.view(shape)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        values, spare = spare, values
    return values


def _reflect(values: torch.Tensor, odd: int) -> torch.Tensor:
    """Step 5: its own inverse."""
    if odd == 1:
        return values
    runs = values.view(odd, -1, values.shape[1])
    return (runs - fold(runs) * (2.0 / odd)).view(values.shape)


def _integer_codes(
    values: torch.Tensor, peak: torch.Tensor, code: Code
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (peak * (1.0 / code.peak)).half()
    factor = _reciprocal(scales.float())
    codes = (values * factor).round_().clamp_(-code.peak, code.peak)
    if len(code.widths) == 1:
        return codes.to(torch.int8).view(torch.uint8), scales
    return codes.add_(code.peak + 1).to(torch.uint8), scales


def _level_codes(
    values: torch.Tensor, peak: torch.Tensor, code: Code
) -> tuple[torch.Tensor, torch.Tensor]:
    to_fixed = _reciprocal(peak) * FIXED_PEAK
    fixed = (values * to_fixed).round_()
    square = fixed.square().sum(0).clamp_(min=1.0)
    to_unit = to_fixed * (square.reciprocal() * values.shape[0]).sqrt() * unit(code.bits)
    places = (values * to_unit).round_().clamp_(-127.0, 127.0).nan_to_num_(0.0)
    places.add_(127.0)
    codes = _lookup(_code_table(code.bits, places.device), places)
    chosen = _lookup(_level_table(code.bits, places.device), codes)
    scales = (fixed * chosen).sum(0) / chosen.square().sum(0) * (peak * (1.0 / FIXED_PEAK))
    return codes, scales.half()


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 where that is no finite number: such a row is all zeros."""
    inverse = values.reciprocal()
    return torch.where(inverse.isinf(), 0.0, inverse)


def _lookup(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``table[places]``, several times as fast on a CPU."""
    return table.index_select(0, places.int().flatten()).view(places.shape)


@cache
def _code_table(bits: int, device: torch.device) -> torch.Tensor:
    """The codes (uint8) of v = -127 .. 127. Shared: never written to."""
    bounds = torch.tensor(thresholds(bits))
    codes = (torch.arange(-127, 128)[:, None] >= bounds).sum(1)
    return codes.to(torch.uint8).to(device)


@cache
def _level_table(bits: int, device: torch.device) -> torch.Tensor:
    """The levels as float32. Shared: never written to."""
    return torch.tensor(levels(bits), dtype=torch.float32, device=device)


def _pack_bits(bits: torch.Tensor, width: int) -> torch.Tensor:
    """``[dim, rows]`` values of ``width`` bits as ``[row_bytes, rows]``."""
    if width == 8:
        return bits
    per_byte = 8 // width
    missing = -bits.shape[0] % per_byte
    if missing:
        bits = torch.cat([bits, bits.new_zeros((missing, bits.shape[1]))])
    packed = bits[::per_byte].clone()
    for place in range(1, per_byte):
        packed |= bits[place::per_byte] << (place * width)
    return packed


def _unpack_bits(packed: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """``[row_bytes, rows]`` as ``[dim, rows]`` values."""
    if width == 8:
        return packed
    places = [(packed >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.stack(places, 1).flatten(0, 1)[:dim]
