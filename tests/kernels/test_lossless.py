"""Lossless bfloat16: golden bytes, every bit pattern, and rows that have no room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_kernels import lossless, raw, rows
from tests.lib.one_row import SPAN, pack_row, round_trip, unpack_row


def row_of(bits: list[int]) -> torch.Tensor:
    """A row whose values have these bits."""
    signed = [value - 0x10000 if value >= 0x8000 else value for value in bits]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16)


def bits_of(row: torch.Tensor) -> list[int]:
    return [value & 0xFFFF for value in row.view(torch.int16).tolist()]


def value(exponent: int, sign_mantissa: int = 0) -> int:
    return (sign_mantissa & 0x80) << 8 | exponent << 7 | sign_mantissa & 0x7F


def test_b139_golden_bytes() -> None:
    """1, -1.5, 0.25, 0, NaN: base 127; exponents 127, 125, NaN and zero; no escape."""
    row = row_of([0x3F80, 0xBFC0, 0x3E80, 0x0000, 0x7FC1])
    golden = bytes.fromhex("00 c0 00 00 41  00 31 02  7f 05 00 00 c0 00 00 00")
    assert pack_row(lossless, row) == golden
    assert bits_of(unpack_row(lossless, golden, row)) == bits_of(row)


def test_b139_golden_bytes_with_escapes() -> None:
    """The 16th exponent and one 31 below the base are escapes, in the order of the values."""
    row = row_of([value(100), *(value(131 - depth) for depth in range(16))])
    codes = "0f 21 43 65 87 a9 cb ed 0f"
    golden = bytes(17) + bytes.fromhex(f"{codes}  83 ff ff 00 00 64 74 00")
    assert pack_row(lossless, row) == golden
    assert bits_of(unpack_row(lossless, golden, row)) == bits_of(row)


@pytest.mark.parametrize("exponent", range(256))
def test_every_exponent_comes_back_with_every_sign_and_mantissa(exponent: int) -> None:
    """All 65,536 bit patterns: NaN payloads, infinities, denormals and both zeros."""
    bits = [value(exponent, low) for low in range(256)]
    assert bits_of(round_trip(lossless, row_of(bits))) == bits


@given(
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=15, unique=True),
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 70),
)
def test_a_row_comes_back_bit_for_bit_or_is_refused(
    exponents: list[int], seed: int, dim: int
) -> None:
    """Any exponents at all, near each other or far apart."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(exponents), (dim,), generator=generator).tolist()
    lows = torch.randint(0, 256, (dim,), generator=generator).tolist()
    bits = [value(exponents[pick], low) for pick, low in zip(picks, lows, strict=True)]
    used = {exponents[pick] for pick in picks}
    base = max((exponent for exponent in used if exponent < 255), default=0)
    far = {exponent for exponent in used if exponent and base - exponent >= 30}
    escapes = sum(exponents[pick] in far for pick in picks)
    if escapes > 3:
        with pytest.raises(rows.UnrepresentableError):
            pack_row(lossless, row_of(bits))
        return
    assert bits_of(round_trip(lossless, row_of(bits))) == bits


def test_three_escapes_have_room_and_four_do_not() -> None:
    near = [value(130 - depth) for depth in range(15)]
    far = [value(exponent, 5) for exponent in (90, 80, 70)]
    assert bits_of(round_trip(lossless, row_of(far + near))) == far + near
    with pytest.raises(rows.UnrepresentableError, match="different exponents"):
        pack_row(lossless, row_of([*far, *near, value(90)]))


def test_outliers_and_gaps_cost_no_room() -> None:
    """Channels 100 times as large, as biases of K make them, and a third of exact zeros."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(5)).bfloat16()
    row[::16] *= 100
    row[1::3] = 0.0
    assert torch.equal(round_trip(lossless, row), row)


def test_ordinary_rows_are_never_refused() -> None:
    """20,000 normally distributed rows of 128, of any magnitude."""
    generator = torch.Generator().manual_seed(11)
    pool = torch.randn(20_000, 1, 1, 128, generator=generator)
    pool = (pool * torch.logspace(-20, 20, 20_000).view(-1, 1, 1, 1)).bfloat16()
    span = raw.Span(20_000, 0, 20_000, 1, 0, 1, 0, tuple(range(20_000)))
    section = memoryview(bytearray(20_000 * 200))
    lossless.pack([(pool, None)], span, section)
    target = torch.zeros_like(pool)
    lossless.unpack(section, [(target, None)], span)
    assert torch.equal(target.view(torch.int16), pool.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_other_dtypes_are_kept_as_they_are(dtype: torch.dtype) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    row = patterns.view(dtype)
    section = bytearray(256)
    lossless.pack([(row.view(1, 1, 1, -1), None)], SPAN, memoryview(section))
    assert section == bytes(range(256))
    target = torch.zeros(256, dtype=torch.uint8)
    layers: list[raw.LayerViews] = [(target.view(dtype).view(1, 1, 1, -1), None)]
    lossless.unpack(memoryview(section), layers, SPAN)
    assert torch.equal(target, patterns)
