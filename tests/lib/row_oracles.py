"""Rows packed one value at a time, as the formats' descriptions say, sharing nothing with kernels.

Import this before any ``kvtier_kernels.*.triton``: without a GPU it chooses Triton's interpreter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from kvtier_kernels import fp8, grouped, lossless
from kvtier_kernels.raw import LayerViews
from tests.lib.interpreted import choose_interpreter
from tests.lib.paged_cases import POISON, Case

choose_interpreter()

WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: The magnitudes of e4m3fn's codes 0 .. 126.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()


@dataclass(frozen=True)
class Format:
    """A kernel and what its rows must be: bytes by region, and the values that come back."""

    kernel: ModuleType
    dtypes: tuple[torch.dtype, ...]
    encode: Callable[[torch.Tensor], Sequence[bytes]]
    decode: Callable[[torch.Tensor], torch.Tensor]

    def engine(self) -> ModuleType:
        """The kernel in Triton."""
        name = self.kernel.__name__.rpartition(".")[2]
        if name == "fp8":
            from kvtier_kernels.fp8 import triton
        elif name == "grouped":
            from kvtier_kernels.grouped import triton  # type: ignore[no-redef]
        else:
            from kvtier_kernels.lossless import triton  # type: ignore[no-redef]
        return triton

    def section(self, case: Case, views: Sequence[LayerViews]) -> bytes:
        """The whole section, poison where no row moves."""
        regions = [bytearray() for _ in self.kernel.row_bytes(1)]
        for dim, moved in rows_in_order(case, views):
            if moved is None:
                pieces = [bytes([POISON]) * size for size in self.kernel.row_bytes(dim)]
            else:
                pieces = list(self.encode(moved))
            for region, piece in zip(regions, pieces, strict=True):
                region.extend(piece)
        return b"".join(regions)


def rows_in_order(case: Case, views: Sequence[LayerViews]) -> list[tuple[int, torch.Tensor | None]]:
    """Every row of the section with its dim; its values in the pool, or None if it stays."""
    span, rows = case.span, []
    for layer in views:
        for head in range(span.kv_heads):
            for part in layer:
                if part is None:
                    continue
                for token in range(span.tokens):
                    moved = span.token_start <= token < span.token_start + span.token_count
                    moved &= span.head_start <= head < span.head_start + span.head_count
                    values = None
                    if moved:
                        nth = token // case.block_tokens - span.token_start // case.block_tokens
                        pool_head = head - span.head_start + span.pool_head_start
                        values = part[span.block_ids[nth], token % case.block_tokens, pool_head]
                    rows.append((part.shape[3], values))
    return rows


def scale_of(values: Sequence[float], code_max: int) -> float:
    """The largest magnitude over ``code_max`` in 8 significant bits, ties to even."""
    magnitude = max(abs(value) for value in values)
    if magnitude < 2.0**-64:
        return 0.0
    ratio = float32(magnitude / code_max)
    mantissa, exponent = math.frexp(ratio)
    scale = math.ldexp(round(mantissa * 256), exponent - 8)
    while scale * code_max > 255 * 2.0**120:
        scale -= math.ldexp(1, exponent - 8)
    return scale


def float32(value: float) -> float:
    """Round to float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bfloat16_bytes(value: float) -> bytes:
    """The upper half of float32's bytes: exact for 8 significant bits."""
    packed = struct.pack("<f", value)
    assert packed[:2] == b"\0\0"
    return packed[2:]


def e4m3(value: float) -> int:
    """The nearest code, the even one of two as near, the largest where it is too large."""
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    distances = [(abs(abs(value) - step), code % 2, code) for code, step in enumerate(E4M3)]
    return sign | min(distances)[2]


def fp8_codes(row: torch.Tensor) -> tuple[list[int], float]:
    values = row.tolist()
    scale = scale_of(values, 448)
    if scale == 0.0:
        return [e4m3(math.copysign(0, value)) for value in values], scale
    return [e4m3(float32(value / scale)) for value in values], scale


def encode_fp8(row: torch.Tensor) -> list[bytes]:
    codes, scale = fp8_codes(row)
    return [bytes(codes), bfloat16_bytes(scale)]


def decode_fp8(row: torch.Tensor) -> torch.Tensor:
    codes, scale = fp8_codes(row)
    signed = [math.copysign(E4M3[code & 0x7F], -1 if code & 0x80 else 1) for code in codes]
    return torch.tensor([value * scale for value in signed]).to(row.dtype)


def int4_codes(values: Sequence[float]) -> tuple[list[int], float]:
    scale = scale_of(values, 7)
    if scale == 0.0:
        return [8] * len(values), scale
    return [8 + max(-7, min(7, round(float32(value / scale)))) for value in values], scale


def encode_grouped(row: torch.Tensor) -> list[bytes]:
    values, codes, scales = row.tolist(), [], b""
    for start in range(0, len(values), 128):
        group_codes, scale = int4_codes(values[start : start + 128])
        codes += group_codes
        scales += bfloat16_bytes(scale)
    return [nibbles(codes, 8), scales]


def decode_grouped(row: torch.Tensor) -> torch.Tensor:
    values, restored = row.tolist(), []
    for start in range(0, len(values), 128):
        codes, scale = int4_codes(values[start : start + 128])
        restored += [(code - 8) * scale for code in codes]
    return torch.tensor(restored).to(row.dtype)


def nibbles(codes: Sequence[int], fill: int) -> bytes:
    padded = [*codes, fill] if len(codes) % 2 else codes
    return bytes(low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True))


def encode_lossless(row: torch.Tensor) -> list[bytes]:
    bits = [value & 0xFFFF for value in row.contiguous().view(torch.int16).tolist()]
    exponents = [value >> 7 & 0xFF for value in bits]
    base = max((exponent for exponent in exponents if exponent < 255), default=0)
    depths = {exponent: base - exponent for exponent in exponents if base - exponent < 30}
    depths |= {special: depth for special, depth in ((255, 30), (0, 31)) if special in exponents}
    in_use = sorted(depths, key=lambda exponent: depths[exponent])
    codes = [
        min(in_use.index(exponent), 15) if exponent in depths else 15 for exponent in exponents
    ]
    escapes = [exponent for exponent, code in zip(exponents, codes, strict=True) if code == 15]
    assert len(escapes) <= 3, "a row that cannot be packed"
    side = struct.pack("<BI", base, sum(1 << depth for depth in depths.values()))
    low = bytes(value >> 8 & 0x80 | value & 0x7F for value in bits)
    return [low, nibbles(codes, 0), side + bytes(escapes).ljust(3, b"\0")]


FORMATS = {
    "fp8": Format(fp8, WIDE, encode_fp8, decode_fp8),
    "grouped": Format(grouped, WIDE, encode_grouped, decode_grouped),
    "lossless": Format(lossless, (torch.bfloat16,), encode_lossless, lambda row: row),
}


def fill(views: Sequence[LayerViews], seed: int, *, specials: bool = False) -> None:
    """Values as in KV: rows of any magnitude, channels apart, zeros; NaN and infinity if asked."""
    generator = torch.Generator().manual_seed(seed)
    for layer in views:
        for view in layer:
            if view is None:
                continue
            values = torch.randn(view.shape, generator=generator)
            values[..., 0] *= 50
            magnitudes = torch.randint(-8, 9, view.shape[:3], generator=generator)
            values *= torch.exp2(magnitudes.float())[..., None]
            kinds = torch.randint(0, 16, view.shape[:3], generator=generator)
            values[kinds == 0] = 0.0
            values[kinds == 1] *= 2.0**-80
            values[kinds == 2, -1] = -0.0
            if specials:
                values[kinds == 3, -1] = float("nan")
                values[kinds == 4, -1] = float("-inf")
                values[kinds == 5, -1] = 1e-39
            view.copy_(values.to(view.dtype))
