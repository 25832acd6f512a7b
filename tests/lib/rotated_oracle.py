"""The rotated codecs row by row in numpy, from their description alone: an oracle for the tests."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
F32 = np.float32

WIDTHS = {"int8": (8,), "int6": (4, 2), "lm5": (4, 1), "lm4": (4,)}
PEAKS = {"int8": 127, "int6": 31}


@dataclass(frozen=True)
class Codebook:
    """``half`` codes on either side of zero, and the polynomials that make codes and levels."""

    half: int
    a: float
    b: float
    c: float
    largest: float
    p: tuple[float, ...]


BOOKS = {
    "int8": None,
    "int6": None,
    "lm4": Codebook(8, 3.78, 0.1496, 0.0, 2.9, (68.852, -0.03044, 7.971e-3)),
    "lm5": Codebook(16, 7.529, 0.3785, 0.01101, 3.2, (33.624, 0.05224, -2.6656e-4, 1.61856e-6)),
}


def lloyd_max_error(count: int) -> float:
    """The mean squared error of the ideal quantiser of N(0, 1)."""
    levels = [(i + 0.5 - count / 2) * 6 / count for i in range(count)]
    for _ in range(4000):
        bounds = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels))]
        bounds.append(math.inf)
        levels = [_moments(bounds[i], bounds[i + 1])[1] for i in range(count)]
    return quantiser_error(bounds, levels)


def quantiser_error(bounds: list[float], levels: list[float]) -> float:
    """The mean squared error for N(0, 1) of levels between bounds, infinite ones outermost."""
    error = 1.0
    for low, high, level in zip(bounds, bounds[1:], levels, strict=False):
        share, mean = _moments(low, high)
        error += share * (level * level - 2 * level * mean)
    return error


def _moments(low: float, high: float) -> tuple[float, float]:
    """The share of N(0, 1) between two bounds, and its mean there."""
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
    share = (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2
    return share, (density[0] - density[1]) / share


def code_of(value: float, book: Codebook) -> int:
    """The code of a value in standard deviations, each operation rounded to float32."""
    v = F32(min(max(F32(value), F32(-book.largest)), F32(book.largest)))
    square = F32(v * v)
    inner = F32(book.b) if not book.c else F32(F32(book.b) - F32(square * F32(book.c)))
    slope = F32(F32(book.a) - F32(square * inner))
    return int(np.rint(F32(F32(v * slope) + F32(book.half - 0.5))))


@cache
def level_of(code: int, book: Codebook) -> int:
    """The level of a code, in exact arithmetic."""
    w = Fraction(2 * code + 1, 2) - book.half
    value = sum(Fraction(factor) * w ** (2 * nth + 1) for nth, factor in enumerate(book.p))
    return round(value)


def signs(run: int) -> list[int]:
    digest = hashlib.sha256(b"kvtier rotated signs 0").digest()
    return [-1 if digest[d // 8] & (1 << d % 8) else 1 for d in range(run)]


def turned(fixed: list[int]) -> list[int]:
    """Signs, butterflies and reflection of whole numbers."""
    dim = len(fixed)
    run = dim & -dim
    odd, exponent = dim // run, run.bit_length() - 1
    pattern = signs(min(run, 128))
    values = [q * pattern[i % len(pattern)] for i, q in enumerate(fixed)]
    for stage in range(exponent):
        h = 1 << stage
        for i in range(dim):
            if not i & h:
                values[i], values[i + h] = values[i] + values[i + h], values[i] - values[i + h]
    if odd > 1:
        totals = [sum(values[j::run]) for j in range(run)]
        values = [odd * z - 2 * totals[i % run] for i, z in enumerate(values)]
    return values


def encode(row: Row, name: str, book: Codebook | None) -> tuple[tuple[bytes, ...], bytes]:
    """The bytes of one row in each bit plane, and of its scale."""
    dim = len(row)
    run = dim & -dim
    odd, exponent = dim // run, run.bit_length() - 1
    peak = F32(max(abs(v) for v in row))
    to_fixed = F32(_inverse(peak) * F32(2047))
    fixed = [int(np.rint(F32(x * to_fixed))) for x in row]
    step = F32(peak * F32(1 / 2047))
    values = turned(fixed)
    if book is None:
        limit, there = PEAKS[name], 2.0 ** -math.ceil(exponent / 2) / odd
        largest = F32(max(map(abs, values)))
        scale = np.float16(F32(F32(largest * F32(there / limit)) * step))
        factor = F32(F32(step * F32(there)) * _inverse(F32(scale)))
        factor = min(factor, F32(_inverse(largest) * F32(limit)))
        codes = [int(np.rint(F32(F32(z) * factor))) for z in values]
        codes = [c & 0xFF for c in codes] if name == "int8" else [c + limit + 1 for c in codes]
    else:
        root = np.sqrt(F32(max(1, sum(q * q for q in fixed))))
        spread = F32(math.sqrt(dim) / (odd * 2 ** (exponent / 2)))
        deviations = F32(_inverse(root) * spread)
        codes = [code_of(float(F32(F32(z) * deviations)), book) for z in values]
        share = F32(2.0 ** (exponent // 2 - exponent / 2) / math.sqrt(dim))
        scale = np.float16(F32(F32(root * share) * step))
    planes, shift = [], sum(WIDTHS[name])
    for width in WIDTHS[name]:
        shift -= width
        number = 0
        for place, code in enumerate(codes):
            number |= (code >> shift & ((1 << width) - 1)) << place * width
        planes.append(number.to_bytes(-(-len(codes) * width // 8), "little"))
    return tuple(planes), scale.tobytes()


def decode(planes: tuple[bytes, ...], scale: bytes, dim: int, name: str) -> Row:
    """The values of one row; ``scale`` is a finite number."""
    run = dim & -dim
    odd, exponent = dim // run, run.bit_length() - 1
    codes = [0] * dim
    for plane, width in zip(planes, WIDTHS[name], strict=True):
        number = int.from_bytes(plane, "little")
        bits = [number >> place * width & ((1 << width) - 1) for place in range(dim)]
        codes = [code << width | own for code, own in zip(codes, bits, strict=True)]
    book, back = BOOKS[name], 2.0 ** -(exponent // 2) / odd
    if book is not None:
        codes = [level_of(code, book) for code in codes]
        back /= 256
    elif name == "int8":
        codes = [code - 256 * (code > 127) for code in codes]
    else:
        codes = [code - PEAKS[name] - 1 for code in codes]
    factor = F32(F32(np.frombuffer(scale, np.float16)[0]) * F32(back))
    # Signs come last on the way back.
    pattern = signs(min(run, 128))
    unsigned = [code * pattern[i % len(pattern)] for i, code in enumerate(codes)]
    values = [z * pattern[i % len(pattern)] for i, z in enumerate(turned(unsigned))]
    return np.array([F32(F32(z) * factor) for z in values])


def _inverse(value: np.float32) -> np.float32:
    """1 / value, and 0 where that is no finite number."""
    with np.errstate(all="ignore"):
        inverse = F32(F32(1) / value)
    return inverse if np.isfinite(inverse) else F32(0)
