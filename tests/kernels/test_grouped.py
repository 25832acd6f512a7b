"""INT4 in groups: golden bytes, groups of any width, scales of any magnitude."""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels import grouped
from tests.lib.one_row import pack_row, round_trip, unpack_row


def test_b139_golden_bytes() -> None:
    """Codes 1 .. 15, low half first, 8 in the half that no value needs; scale 1 is 0x3F80."""
    row = torch.arange(-7, 8).float()
    golden = bytes.fromhex("21 43 65 87 a9 cb ed 8f 80 3f")
    assert pack_row(grouped, row) == golden
    assert torch.equal(unpack_row(grouped, golden, row), row)


def test_b139_ties_go_to_even() -> None:
    row = torch.tensor([7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -6.5])
    assert round_trip(grouped, row).tolist() == [7, 0, 2, 2, 0, -2, -2, -6]


@pytest.mark.parametrize("dim", [6, 64, 80, 96, 127, 128, 129, 192, 256, 576])
def test_b136_errors_stay_within_half_a_step_of_the_own_group(dim: int) -> None:
    """No padding takes part in a group's scale, nor the group beside it."""
    generator = torch.Generator().manual_seed(dim)
    row = torch.rand(dim, generator=generator) + 10
    row[128:256] *= 1e-3
    back = round_trip(grouped, row)
    for start in range(0, dim, 128):
        group, error = row[start : start + 128], (back - row)[start : start + 128].abs()
        assert error.max() <= group.abs().max() / 14 * 1.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.5, -3.0, 1e-3, 1e-8])
def test_b137_constants_come_back_within_half_a_percent(dtype: torch.dtype, value: float) -> None:
    row = torch.full((64,), value, dtype=dtype)
    assert (round_trip(grouped, row) - row).abs().max() <= 0.005 * abs(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b137_an_outlier_and_the_largest_values_come_back_finite(dtype: torch.dtype) -> None:
    outlier = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    outlier[7] = 6e4
    assert (round_trip(grouped, outlier).float() - outlier.float()).abs().max() <= 6e4 / 14 * 1.004
    largest = torch.finfo(dtype).max
    row = torch.tensor([largest, -largest, 0.0], dtype=dtype)
    back = round_trip(grouped, row)
    assert bool(torch.isfinite(back).all())
    assert (back.double() - row.double()).abs().max() <= largest * 0.02


def test_b137_zeros_have_scale_zero() -> None:
    assert pack_row(grouped, torch.tensor([0.0, -0.0])) == bytes.fromhex("88 00 00")
    assert not round_trip(grouped, torch.zeros(200)).any()
