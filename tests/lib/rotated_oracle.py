"""The rotated codecs row by row in numpy, from their description alone: an oracle for the tests."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
F32 = np.float32

WIDTHS = {"int8": (8,), "int6": (4, 2), "lm5": (4, 1), "lm4": (4,)}
PEAKS = {"int8": 127, "int6": 31}
LEVELS = {"lm4": 16, "lm5": 32}


def lloyd_max(count: int) -> tuple[list[float], list[int]]:
    """The Lloyd-Max levels of N(0, 1), and as integers with the outermost at 127."""
    levels = [(i + 0.5 - count / 2) * 6 / count for i in range(count)]
    for _ in range(4000):
        bounds = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels))]
        bounds.append(math.inf)
        levels = [_mean(bounds[i], bounds[i + 1]) for i in range(count)]
    return levels, [round(level * 127 / levels[-1]) for level in levels]


def _mean(low: float, high: float) -> float:
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
    share = (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2
    return (density[0] - density[1]) / share


@dataclass(frozen=True)
class Codebook:
    """Integer levels, units per standard deviation."""

    levels: list[int]
    unit: float


def codebook(name: str) -> Codebook:
    exact, levels = lloyd_max(LEVELS[name])
    return Codebook(levels, 127 / exact[-1])


def signs(dim: int) -> list[int]:
    found = []
    for d in range(dim):
        digest = hashlib.sha256(b"kvtier rotated signs %d" % (d // 256)).digest()
        bit = d % 256
        found.append(-1 if digest[bit // 8] & (1 << bit % 8) else 1)
    return found


def rotate(row: Row) -> Row:
    dim = len(row)
    run = dim & -dim
    odd, exponent = dim // run, run.bit_length() - 1
    values = [F32(x * F32(s)) for x, s in zip(row, signs(dim), strict=True)]
    for stage in range(exponent):
        h = 1 << stage
        for i in range(dim):
            if not i & h:
                low, high = values[i], values[i + h]
                values[i], values[i + h] = F32(low + high), F32(low - high)
    values = [F32(v * F32(2.0 ** -math.ceil(exponent / 2))) for v in values]
    if odd > 1:
        for j in range(run):
            terms = values[j::run]
            terms += [F32(0)] * ((1 << (odd - 1).bit_length()) - odd)
            while len(terms) > 1:
                half = len(terms) // 2
                terms = [F32(a + b) for a, b in zip(terms[:half], terms[half:], strict=True)]
            part = F32(terms[0] * F32(2.0 / odd))
            for i in range(j, dim, run):
                values[i] = F32(values[i] - part)
    return np.array(values, np.float32)


def encode(row: Row, name: str, book: Codebook | None) -> tuple[tuple[bytes, ...], bytes]:
    """The bytes of one row in each bit plane, and of its scale."""
    values = rotate(row)
    peak = F32(max(abs(v) for v in values))
    if book is None:
        limit = PEAKS[name]
        scale = np.float16(peak * F32(1.0 / limit))
        factor = F32(1) / F32(scale) if scale else F32(0)
        codes = [max(-limit, min(limit, int(np.rint(F32(v * factor))))) for v in values]
        codes = [c & 0xFF for c in codes] if name == "int8" else [c + limit + 1 for c in codes]
    else:
        codes, scale = _nearest_levels(values, peak, book)
    planes, shift = [], sum(WIDTHS[name])
    for width in WIDTHS[name]:
        shift -= width
        number = 0
        for place, code in enumerate(codes):
            number |= (code >> shift & ((1 << width) - 1)) << place * width
        planes.append(number.to_bytes(-(-len(codes) * width // 8), "little"))
    return tuple(planes), np.float16(scale).tobytes()


def _nearest_levels(values: Row, peak: np.float32, book: Codebook) -> tuple[list[int], np.float16]:
    to_fixed = F32(F32(1) / peak * F32(180)) if peak else F32(0)
    fixed = [int(np.rint(F32(v * to_fixed))) for v in values]
    square = F32(max(1, sum(p * p for p in fixed)))
    spread = np.sqrt(F32(F32(1) / square * F32(len(values))))
    to_unit = F32(F32(to_fixed * spread) * F32(book.unit))
    codes = []
    for v in values:
        place = max(-127, min(127, int(np.rint(F32(v * to_unit)))))
        # Two levels as near as each other: the upper one.
        codes.append(min(range(len(book.levels)), key=lambda c: (abs(book.levels[c] - place), -c)))
    chosen = [book.levels[c] for c in codes]
    fit = F32(sum(p * z for p, z in zip(fixed, chosen, strict=True)))
    fit = F32(fit / F32(sum(z * z for z in chosen)))
    return codes, np.float16(F32(fit * F32(peak * F32(1.0 / 180))))
