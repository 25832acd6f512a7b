"""FP8's values: golden bytes, saturation, scales of any size, pages that are FP8 already."""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels import fp8, raw
from tests.lib.one_row import SPAN, pack_row, round_trip, unpack_row

WIDE = [torch.float32, torch.bfloat16, torch.float16]


def test_b139_golden_bytes() -> None:
    """Scale 1 (bfloat16 0x3F80) and codes as e4m3fn defines them."""
    row = torch.tensor([448, -448, 1, -1.5, 2**-6, 2**-9, -(2**-9), 0.0, -0.0, 240, 17, 19])
    golden = bytes.fromhex("7e fe 38 bc 08 01 81 00 80 77 58 5a 80 3f")
    assert pack_row(fp8, row) == golden
    back = torch.tensor([448, -448, 1, -1.5, 2**-6, 2**-9, -(2**-9), 0.0, -0.0, 240, 16, 20])
    assert torch.equal(unpack_row(fp8, golden, row), back)


@pytest.mark.parametrize(("magnitude", "scale"), [(449.75, "80 3f"), (453.25, "82 3f")])
def test_b139_of_two_scales_as_near_the_even_one_is_taken(magnitude: float, scale: str) -> None:
    assert pack_row(fp8, torch.tensor([magnitude]))[1:] == bytes.fromhex(scale)


@pytest.mark.parametrize("dtype", WIDE)
def test_b142_codes_saturate_and_are_never_nan(dtype: torch.dtype) -> None:
    """The scale is cut to bfloat16, so quotients end above 448: they are cut, not NaN."""
    for magnitude in torch.linspace(1, 2, 257).tolist():
        row = torch.tensor([magnitude, -magnitude, 1e-3], dtype=dtype)
        section = pack_row(fp8, row)
        assert section[:2] == b"\x7e\xfe"
        assert bool(torch.isfinite(unpack_row(fp8, section, row)).all())


@pytest.mark.parametrize("dtype", WIDE)
def test_b137_the_largest_values_come_back_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    row = torch.tensor([largest, -largest, 0.0, largest / 2], dtype=dtype)
    back = round_trip(fp8, row)
    assert bool(torch.isfinite(back).all())
    assert (back.double() - row.double()).abs().max() <= largest * 0.04


@pytest.mark.parametrize("value", [0.5, -3.0, 1e-3, 1e-8, 6e4, 3e-19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b137_constants_come_back_within_half_a_percent(dtype: torch.dtype, value: float) -> None:
    row = torch.full((64,), value, dtype=dtype)
    error = (round_trip(fp8, row) - row).abs().max()
    assert error <= 0.005 * abs(value)


def test_b137_zeros_are_zeros_and_so_is_what_is_too_small_for_a_scale() -> None:
    row = torch.tensor([0.0, -0.0, 0.0])
    assert pack_row(fp8, row) == bytes.fromhex("00 80 00 00 00")
    below = 2.0**-64 * (1 - 2.0**-20)
    assert not round_trip(fp8, torch.tensor([below, -below])).any()
    assert round_trip(fp8, torch.tensor([2.0**-64, 0.0])).any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_b144_pages_that_are_fp8_are_kept_as_they_are(dtype: torch.dtype) -> None:
    """Every bit pattern, NaN among them: never quantised twice."""
    patterns = torch.arange(256, dtype=torch.uint8)
    section = bytearray(256)
    fp8.pack([(patterns.view(dtype).view(1, 1, 1, 256), None)], SPAN, memoryview(section))
    assert section == bytes(range(256))
    target = torch.zeros(256, dtype=torch.uint8)
    layers: list[raw.LayerViews] = [(target.view(dtype).view(1, 1, 1, 256), None)]
    fp8.unpack(memoryview(section), layers, SPAN)
    assert torch.equal(target, patterns)


def test_what_came_back_packs_to_the_same_bytes() -> None:
    """In float32: a second pass through the codec loses nothing more."""
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    for row in rows:
        section = pack_row(fp8, row)
        assert pack_row(fp8, unpack_row(fp8, section, row)) == section
