"""The rotated codecs in plain torch: the truth that the kernels are compared with.

A row is brought to integers first, so all that is summed up is exact in any order: a GPU's tensor
cores, its reductions and a CPU's butterflies come to the same. What remains is float32, one
rounding per operation in exactly this order, no fused multiply-add. ``x`` is a piece of
D = m * 2**k values, m odd, as m runs of 2**k, and a its largest |x|:

1. (centred K only) ``x = x - (mean * cos + partner * sin)``.
2. ``q = round(x * (1 / a * 2047)) * signs``: integers.
3. Within each run, for h = 1, 2, 4 .. 2**(k-1) and i with bit h clear:
   ``q[i], q[i + h] = q[i] + q[i + h], q[i] - q[i + h]``.
4. With m > 1, across the runs: ``q = q * m - 2 * total``, where ``total`` is the sum of the runs.

Steps 2 to 4 are orthogonal but for rounding and a factor: signs, Walsh-Hadamard, Householder
reflection, which mixes the runs evenly where D is no power of two. They give z and, with
``step = a * (1 / 2047)``, its unit ``there = 2**-ceil(k/2) / m``. An integer code (``int8``,
``int6``), with b the largest |z|:

    scale = float16(b * (there / peak) * step)
    code  = round(z * min(step * there * (1 / scale), 1 / b * peak))

A code of levels, which stands for ``level / 256`` standard deviations:

    root  = sqrt(max(1, sum(q * q)))               an integer, of step 2
    v     = clamp(z * (1 / root * (sqrt(D) / (m * 2**(k/2)))), -largest, largest)
    code  = round(v * (a - v*v * (b - v*v * c)) + (h - 1/2))
    scale = float16(root * (2**(floor(k/2) - k/2) / sqrt(D)) * step)

Constants are rounded to float32. 1 / a and 1 / scale are 0 where they would be infinite. ``round``
is to nearest, ties to even. On the way back codes or levels take steps 4, 3 and 2 (signs) as they
are, which are their own inverse but for factors; then ``x = q * (scale * back)`` with
``back = 2**-floor(k/2) / m``, for levels / 256; then step 1 is reversed, and the value is cut to
what the pool's dtype can hold and rounded to it. A row of zeros, or too small for a scale, has
scale 0 and comes back as zeros (as the mean, if centred). A row whose scale is not finite cannot be
stored: it held a NaN or an infinity, or values beyond 65504 (below which no row fails).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

import torch

from kvtier_kernels.rotated.codebooks import LEVEL_UNIT, LEVELS, Levels, factors, sign_tensor
from kvtier_kernels.rotated_format import Code

#: Largest magnitude of q: in float16 it is exact, 512 * 2047**2 stays below 2**31, and all that
#: becomes of 512 such values below 2**24.
FIXED_PEAK: Final = 2047.0
FLOAT16_MAX: Final = 65504.0


class Rows(NamedTuple):
    """One piece, packed: bit planes ``[rows, row_bytes]`` uint8, scales ``[rows]`` float16."""

    planes: tuple[torch.Tensor, ...]
    scales: torch.Tensor


class Factors(NamedTuple):
    """What sums are multiplied by, for pieces of one dim and code; see above."""

    there: float
    back: float
    to_deviations: float
    to_scale: float


def factors_of(dim: int, code: Code) -> Factors:
    """The constants; the last two are for codes of levels."""
    odd, exponent = factors(dim)
    there = 2.0 ** -(exponent - exponent // 2) / odd
    back = 2.0 ** -(exponent // 2) / odd
    return Factors(
        there,
        back if code.peak else back / LEVEL_UNIT,
        math.sqrt(dim) / (odd * 2.0 ** (exponent / 2)),
        2.0 ** (exponent // 2 - exponent / 2) / math.sqrt(dim),
    )


def encode(rows: torch.Tensor, code: Code) -> Rows:
    """Quantise float32 rows ``[rows, dim]``, which stay as they are.

    A scale that is no number up to 65504 marks a row that cannot be stored.
    """
    values = rows.t().contiguous()
    known = factors_of(values.shape[0], code)
    peak = values.abs().amax(0)
    step = peak * (1.0 / FIXED_PEAK)
    fixed = (values * (reciprocal(peak) * FIXED_PEAK)).round_()
    turned = rotate(fixed)
    if code.peak:
        factor, scales = integer_factors(turned.abs().amax(0), step, code.peak, known)
        codes = turned.mul_(factor).round_().nan_to_num_(0.0)
        if len(code.widths) == 1:
            codes = codes.to(torch.int8).view(torch.uint8)
        else:
            codes = codes.add_(code.peak + 1).to(torch.uint8)
    else:
        square = fixed.square().sum(0, dtype=torch.float64)
        factor, scales = level_factors(square, step, known)
        spares = torch.empty_like(turned), torch.empty_like(turned)
        codes = level_places(turned.mul_(factor), LEVELS[code.bits], *spares)
        codes = codes.nan_to_num_(0.0).to(torch.uint8)
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
    factor = packed.scales.float() * factors_of(dim, code).back
    return unrotate(values).mul_(factor).t()


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Signs and steps 3 and 4 over the first dimension of float32 ``[dim, rows]``, a new tensor."""
    dim = values.shape[0]
    odd, exponent = factors(dim)
    values = values * sign_tensor(dim, values.device)[:, None]
    return _reflect(_butterflies(values, odd, exponent), odd)


def unrotate(values: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rotate``, but for a factor of 2**k * m**2."""
    dim = values.shape[0]
    odd, exponent = factors(dim)
    values = _reflect(_butterflies(values, odd, exponent), odd)
    # A sum that is zero has no sign elsewhere.
    return values.mul_(sign_tensor(dim, values.device)[:, None]).add_(0.0)


def _butterflies(values: torch.Tensor, odd: int, exponent: int) -> torch.Tensor:
    """Step 3 on ``[dim, rows]``: its own inverse up to 2**exponent. A new tensor."""
    rows = values.shape[1]
    spare = torch.empty_like(values)
    values = values if exponent else values.clone()
    for stage in range(exponent):
        half = 1 << stage
        shape = (odd << (exponent - 1 - stage), 2, half, rows)
        source, target = values.view(shape), spare.view(shape)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        # The first stage's source is the caller's.
        values, spare = spare, (values if stage else torch.empty_like(values))
    return values


def _reflect(values: torch.Tensor, odd: int) -> torch.Tensor:
    """Step 4: its own inverse up to m**2."""
    if odd == 1:
        return values
    runs = values.view(odd, -1, values.shape[1])
    return (runs * odd - 2.0 * runs.sum(0)).view(values.shape)


def integer_factors(
    largest: torch.Tensor, step: torch.Tensor, peak: int, known: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rotated values are multiplied by before they are rounded to codes; their scales."""
    scales = (largest * (known.there / peak) * step).half()
    # A scale that was rounded down must not bring a code beyond the peak.
    bound = reciprocal(largest) * peak
    return torch.minimum(step * known.there * reciprocal(scales.float()), bound), scales


def level_factors(
    square: torch.Tensor, step: torch.Tensor, known: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rotated values are multiplied by to be standard deviations, and the rows' scales.

    ``square`` is the sum of a row's ``q * q``, exact in whatever dtype.
    """
    # The square root of torch in float32 is not always the nearest number.
    root = square.float().clamp_(min=1.0).double().sqrt_().float()
    return root.reciprocal() * known.to_deviations, (root * known.to_scale * step).half()


def level_places(
    places: torch.Tensor, book: Levels, squares: torch.Tensor, spare: torch.Tensor
) -> torch.Tensor:
    """Turn standard deviations into codes of levels, whole numbers, in place.

    ``squares`` and ``spare`` are room for as many values.
    """
    torch.square(places.clamp_(-book.largest, book.largest), out=squares)
    # Signs are turned around, which changes no rounding: -(b - v*v * c), and so on.
    if book.c:
        squares.mul_(torch.mul(squares, book.c, out=spare).sub_(book.b))
    else:
        squares.mul_(-book.b)
    return places.mul_(squares.add_(book.a)).add_(book.half - 0.5).round_()


def reciprocal(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 where that is no finite number: such a row is all zeros."""
    return values.reciprocal().nan_to_num_(nan=math.nan, posinf=0.0, neginf=0.0)


def _lookup(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``table[places]``, several times as fast on a CPU."""
    return table.index_select(0, places.int().flatten()).view(places.shape)


@cache
def _level_table(bits: int, device: torch.device) -> torch.Tensor:
    """The levels of all codes as float32. Shared: never written to."""
    book = LEVELS[bits]
    table = [book.level(code) for code in range(2 * book.half)]
    return torch.tensor(table, dtype=torch.float32, device=device)


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
