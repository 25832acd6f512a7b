"""Constants of the rotated codecs, part of the format: signs, the rotation's matrix, levels.

The codes of 4 and 5 bits follow the Lloyd-Max quantiser of the normal distribution (Max,
"Quantizing for minimum distortion", IRE Trans. IT-6, 1960), both ways by a short polynomial instead
of a table: a comparison for each threshold, or a table's lookups, would cost a GPU more than all
the rest. With a value v in standard deviations, h codes on either side of zero and m = h - 1/2:

    code  = round(v * (a - v**2 * (b - v**2 * c)) + m)
    level = round(w * (p0 + w**2 * (p1 + ...))), with w = code - m, in 1/256 deviations

The error is 0.03 dB (4 bits) and 0.04 dB (5 bits) above that of the ideal quantiser; the tests
compute that afresh.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

#: Level units per standard deviation. Levels are integers below 2**10: in float16 they are exact.
LEVEL_UNIT: Final = 256
#: Matrices are at most so wide; longer runs are butterflies over several of them.
RUN_MAX: Final = 128
#: The narrowest matrix that tensor cores multiply with.
_MATRIX_MIN: Final = 16

_SIGN_SEED: Final = b"kvtier rotated signs "


@dataclass(frozen=True, slots=True)
class Levels:
    """The polynomials of one width of codes: ``a``, ``b``, ``c`` and the level's ``p``.

    ``half`` codes lie on either side of zero. Beyond ``largest`` deviations all is the last code.
    """

    half: int
    a: float
    b: float
    c: float
    largest: float
    p: tuple[float, ...]

    def level(self, code: int) -> int:
        """The level of a code. No rounding on the way decides: all are far from a half."""
        place = code - self.half + 0.5
        slope = 0.0
        for factor in reversed(self.p):
            slope = slope * place * place + factor
        return round(place * slope)


LEVELS: Final = {
    4: Levels(8, 3.78, 0.1496, 0.0, 2.9, (68.852, -0.03044, 7.971e-3)),
    5: Levels(16, 7.529, 0.3785, 0.01101, 3.2, (33.624, 0.05224, -2.6656e-4, 1.61856e-6)),
}


def signs(run: int) -> tuple[int, ...]:
    """The rotation's signs: bit d of SHA-256 over the seed and d // 256 as a decimal number.

    Bits count from the lowest bit of the first byte; a one is -1.
    """
    digests = b"".join(
        hashlib.sha256(_SIGN_SEED + str(block).encode()).digest() for block in range(-(-run // 256))
    )
    return tuple(-1 if digests[d // 8] >> (d % 8) & 1 else 1 for d in range(run))


def factors(dim: int) -> tuple[int, int]:
    """``dim`` as an odd number m times a power of two 2**k: (m, k)."""
    exponent = (dim & -dim).bit_length() - 1
    return dim >> exponent, exponent


def run_of(dim: int) -> int:
    """How many values share their signs' pattern: 2**k, at most ``RUN_MAX``."""
    return min(1 << factors(dim)[1], RUN_MAX)


@cache
def sign_tensor(dim: int, device: torch.device) -> torch.Tensor:
    """The signs of all values, those of a run over and over, as float32. Never written to."""
    run = run_of(dim)
    return torch.tensor(signs(run) * (dim // run), dtype=torch.float32, device=device)


@cache
def matrix(dim: int, device: torch.device) -> torch.Tensor:
    """Signs and butterflies of a run as a float16 matrix; a row of values times it is rotated.

    Of narrow runs as many as make it wide enough, side by side. Never written to.
    """
    run = run_of(dim)
    turned = torch.tensor(signs(run), dtype=torch.float16).diag()
    width = 1
    while width < run:
        pairs = turned.view(run, -1, 2, width)
        turned = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        turned = turned.view(run, run)
        width *= 2
    sides = max(1, _MATRIX_MIN // run)
    wide = torch.zeros(sides, run, sides, run, dtype=torch.float16)
    for nth in range(sides):
        wide[nth, :, nth] = turned
    return wide.view(sides * run, sides * run).to(device)
