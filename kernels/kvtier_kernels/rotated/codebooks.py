"""Constants of the rotated codecs: signs, levels and thresholds. They are part of the format.

Levels are the Lloyd-Max levels of the standard normal distribution (Max, "Quantizing for minimum
distortion", IRE Trans. IT-6, 1960), times the factor that brings the outermost to 127, rounded:
as int8 they fit integer arithmetic, sums over them are exact, and rounding them costs 0.01 dB of
20.22 (4 bits) and 0.05 dB of 26.01 (5 bits). The tests compute them afresh.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import pairwise
from typing import Final

import torch

#: The upper half of each table; the lower half is its mirror image.
_LM4_HALF: Final = (6, 18, 31, 44, 58, 75, 96, 127)
_LM5_HALF: Final = (3, 8, 13, 18, 24, 29, 35, 41, 47, 54, 61, 70, 79, 90, 105, 127)

#: The outermost level before it was scaled to 127, in standard deviations.
_LM4_OUTERMOST: Final = 2.732589570995
_LM5_OUTERMOST: Final = 3.260732493401

_SIGN_SEED: Final = b"kvtier rotated signs "


def levels(bits: int) -> tuple[int, ...]:
    """All levels of 4 or 5 bits, ascending."""
    half = {4: _LM4_HALF, 5: _LM5_HALF}[bits]
    return (*(-level for level in reversed(half)), *half)


def unit(bits: int) -> float:
    """Level units per standard deviation: 127 over the outermost level."""
    return 127.0 / {4: _LM4_OUTERMOST, 5: _LM5_OUTERMOST}[bits]


def thresholds(bits: int) -> tuple[int, ...]:
    """Where codes begin: an integer value v has as many of these at or below it as its code says.

    Ascending. Between two levels the nearer one wins, the upper one when both are as near.
    """
    values = levels(bits)
    return tuple(-(-(low + high) // 2) for low, high in pairwise(values))


def signs(dim: int) -> tuple[int, ...]:
    """The rotation's signs: bit d of SHA-256 over the seed and d // 256 as a decimal number.

    Bits count from the lowest bit of the first byte; a one is -1.
    """
    digests = b"".join(
        hashlib.sha256(_SIGN_SEED + str(block).encode()).digest() for block in range(-(-dim // 256))
    )
    return tuple(-1 if digests[d // 8] >> (d % 8) & 1 else 1 for d in range(dim))


@cache
def sign_tensor(dim: int, device: torch.device) -> torch.Tensor:
    """The signs as float32 on a device. Shared: never written to."""
    return torch.tensor(signs(dim), dtype=torch.float32, device=device)


def factors(dim: int) -> tuple[int, int]:
    """``dim`` as an odd number m times a power of two 2**k: (m, k)."""
    exponent = (dim & -dim).bit_length() - 1
    return dim >> exponent, exponent


def norms(exponent: int) -> tuple[float, float]:
    """What the values are multiplied by after 2**exponent were added up: there and back.

    Both are powers of two, so neither rounds; together they are 2**-exponent.
    """
    back = exponent // 2
    return 2.0 ** (back - exponent), 2.0**-back
