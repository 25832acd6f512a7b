"""The rotated op against a row-by-row oracle, its error, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvtier_kernels import raw, rows
from kvtier_kernels.rotated import RotatedKernel, codebooks
from kvtier_kernels.rotated.reference import Rows, decode, encode, rotate, unrotate
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, Code
from tests.lib import rotated_oracle as oracle
from tests.lib.rotated_pools import form, gaussian, span_of, views

CODES = (INT8, INT6, LM5, LM4)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: For normally distributed values, dB; with the dim, an integer code's step grows as its peak does.
SNR_MIN = {"int8": 42.8, "int6": 30.5, "lm5": 25.7, "lm4": 20.0}
POISON = 0xEE


@pytest.mark.parametrize(("bits", "decibels"), [(4, 0.03), (5, 0.04)])
def test_the_polynomials_are_nearly_the_quantiser_of_lloyd_and_max(
    bits: int, decibels: float
) -> None:
    book = oracle.BOOKS[f"lm{bits}"]
    assert book is not None
    grid = np.linspace(-4, 4, 200_001)
    codes = np.array([oracle.code_of(value, book) for value in grid])
    assert set(np.diff(codes)) == {0, 1}, "monotonic, and no code is left out"
    assert (codes[0], codes[-1]) == (0, 2 * book.half - 1)
    inner = grid[1:][np.diff(codes) == 1].tolist()
    levels = [codebooks.LEVELS[bits].level(code) / 256 for code in range(2 * book.half)]
    error = oracle.quantiser_error([-math.inf, *inner, math.inf], levels)
    assert 10 * math.log10(error / oracle.lloyd_max_error(1 << bits)) < decibels


@pytest.mark.parametrize("bits", [4, 5])
def test_levels_round_alike_whatever_is_fused(bits: int) -> None:
    """No level is so near to a half that the arithmetic before it could decide."""
    book = codebooks.LEVELS[bits]
    for code in range(2 * book.half):
        place = code - book.half + 0.5
        exact = sum(factor * place ** (2 * nth + 1) for nth, factor in enumerate(book.p))
        assert abs(abs(exact % 1) - 0.5) > 0.005
        known = oracle.BOOKS[f"lm{bits}"]
        assert known is not None
        assert book.level(code) == oracle.level_of(code, known)


@pytest.mark.parametrize("dim", [*HEAD_DIMS, 512, 1, 2, 3, 5, 7, 12, 9])
def test_the_rotation_is_orthogonal_and_undone(dim: int) -> None:
    """But for a factor: integers stay integers."""
    values = torch.randint(-2047, 2048, (dim, 50), generator=torch.Generator().manual_seed(1))
    run = dim & -dim
    factor = run * (dim // run) ** 2
    turned = rotate(values.float())
    assert torch.equal(turned, turned.round())
    assert turned.abs().max() < 2**24
    assert torch.equal(unrotate(turned).double(), values.double() * factor) or dim > 256
    products = turned.double().T @ turned.double()
    assert torch.equal(products, values.double().T @ values.double() * factor)


@pytest.mark.parametrize("dim", [*HEAD_DIMS, 512, 1, 3, 5])
def test_the_matrix_is_the_rotation_of_a_run(dim: int) -> None:
    run = codebooks.run_of(dim)
    known = codebooks.matrix(dim, torch.device("cpu")).float()
    values = torch.randint(-9, 9, (known.shape[0], 3), generator=torch.Generator().manual_seed(2))
    expected = [rotate(part.float()) for part in torch.split(values, run)]
    assert torch.equal(known.T @ values.float(), torch.cat(expected))


@pytest.mark.parametrize("dim", [*HEAD_DIMS, 512])
def test_one_outlier_is_spread_over_the_whole_row(dim: int) -> None:
    """Rotated, no value of a spike's row is far above the root mean square."""
    turned = rotate(torch.eye(dim))
    share = turned.square() / turned.square().sum(0)
    assert share.max() * dim < 2


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [64, 80, 5, 1, 192])
def test_b136_b139_rows_are_what_the_oracle_says(code: Code, dim: int) -> None:
    """Bit for bit: signs, butterflies, rounding, levels, the order of bits."""
    values = gaussian(6, dim, seed=dim)
    values[1] = 10 + torch.arange(dim) / dim
    values[2] = 0
    values[3, dim // 2] = 6e4
    values[4] *= 1e-6
    packed = encode(values, code)
    for index, row in enumerate(values.numpy()):
        planes, scale = oracle.encode(row, code.name, oracle.BOOKS[code.name])
        assert tuple(plane[index].numpy().tobytes() for plane in packed.planes) == planes
        assert packed.scales[index].numpy().tobytes() == scale


def test_b139_nibbles_come_low_half_first() -> None:
    """The bytes 10 32 54 76 98 BA DC FE are the codes 0 .. 15 in order."""
    nibbles = torch.tensor(list(bytes.fromhex("1032547698BADCFE")), dtype=torch.uint8)
    rows_of_16 = rotate(decode(packed_rows(nibbles[None]), 16, LM4).T.contiguous()).T
    levels = [codebooks.LEVELS[4].level(code) for code in range(16)]
    assert torch.equal(rows_of_16[0], torch.tensor(levels) / 64)


def packed_rows(plane: torch.Tensor) -> Rows:
    return Rows((plane,), torch.ones(1, dtype=torch.float16))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_snr_of_normal_values(code: Code, dim: int) -> None:
    values = gaussian(2048, dim)
    error = decode(encode(values, code), dim, code) - values
    snr = 20 * torch.log10(values.norm() / error.norm())
    assert snr > SNR_MIN[code.name]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_b137_constants_zeros_and_outliers(code: Code, dim: int) -> None:
    values = torch.zeros(6, dim)
    for index, constant in enumerate((0.0, 0.5, -3.0, 1e-8, 65504.0)):
        values[index] = constant
    values[5] = gaussian(dim)
    values[5, 7] = 6e4
    packed = encode(values, code)
    assert bool(torch.isfinite(packed.scales).all())
    back = decode(packed, dim, code)
    assert bool((back[0] == 0).all())
    assert bool((back[3].abs() < 1e-6).all())
    error = (back - values).norm(dim=1) / values.norm(dim=1).clamp(min=1)
    bound = 10 ** (-SNR_MIN[code.name] / 20)
    # One spike leaves the other values nearly equal in the rotated domain: two levels serve it.
    assert bool((error < 1.6 * bound).all()), error
    if code.peak:
        steps = packed.scales.float() * dim**0.5
        assert bool(((back - values).abs().amax(1) <= steps + 1e-6).all())


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 512])
def test_b137_no_row_up_to_65504_overflows_its_scale(code: Code, dim: int) -> None:
    """Not even a row that becomes a single value when rotated, or all values of its run."""
    worst = codebooks.sign_tensor(dim, torch.device("cpu")) * 65504
    alternating = worst * torch.tensor([1.0, -1.0]).repeat(dim // 2)
    packed = encode(torch.stack([worst, alternating]), code)
    assert bool(torch.isfinite(packed.scales).all())
    back = decode(packed, dim, code)
    assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_b141_twenty_encodes_are_the_same_bytes(code: Code) -> None:
    kernel = RotatedKernel(form(torch.bfloat16, code))
    layers, span = views(torch.bfloat16), span_of(42)
    nbytes = kernel.form.section(1, 1, 42, 0).nbytes
    seen = set()
    for nth in range(20):
        section = bytearray([nth]) * nbytes
        kernel.pack(layers, span, memoryview(section))
        seen.add(bytes(section))
    assert len(seen) == 1


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dim", [64, 80])
def test_what_is_not_finite_is_refused(
    code: Code, dtype: torch.dtype, bad: float, dim: int
) -> None:
    kernel = RotatedKernel(form(dtype, code, dim, dim))
    layers, span = views(dtype, k_dim=dim, v_dim=dim), span_of(8)
    v_view = layers[0][1]
    assert v_view is not None
    v_view[2, 3, 0, 63] = bad
    section = bytearray(kernel.form.section(1, 1, 8, 0).nbytes)
    with pytest.raises(rows.UnrepresentableError):
        kernel.pack(layers, span, memoryview(section))
    v_view[2, 3, 0, 63] = 65504.0
    kernel.pack(layers, span, memoryview(section))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_values_too_large_for_a_scale_are_refused(code: Code) -> None:
    kernel = RotatedKernel(form(torch.float32, code))
    layers = views(torch.float32)
    layers[0][0][7] = 1e30
    section = bytearray(kernel.form.section(1, 1, 4, 0).nbytes)
    with pytest.raises(rows.UnrepresentableError):
        kernel.pack(layers, span_of(4), memoryview(section))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b147_rows_come_back_in_the_pools_dtype(code: Code, dtype: torch.dtype) -> None:
    """Into a pool of NaN, within the code's error, and beyond it nothing but the dtype's own."""
    kernel = RotatedKernel(form(dtype, code))
    layers, span = views(dtype, layers=2), span_of(40)
    section = bytearray(kernel.form.section(2, 1, 40, 0).nbytes)
    kernel.pack(layers, span, memoryview(section))
    target: list[raw.LayerViews] = [
        (torch.full_like(k, float("nan")), torch.full_like(k, float("nan"))) for k, _ in layers
    ]
    kernel.unpack(memoryview(section).toreadonly(), target, span)
    ids = list(span.block_ids)
    for stored, restored in zip(layers, target, strict=True):
        for before, after in zip(stored, restored, strict=True):
            assert before is not None
            assert after is not None
            expected = before[ids].double()
            error = (after[ids].double() - expected).norm() / expected.norm()
            assert error < 1.15 * 10 ** (-SNR_MIN[code.name] / 20)
            assert bool(after[6].isnan().all())


def test_float16_values_are_cut_and_do_not_become_infinite() -> None:
    kernel = RotatedKernel(form(torch.float16, LM4))
    layers = views(torch.float16)
    layers[0][0][:] = 65504.0
    section = bytearray(kernel.form.section(1, 1, 8, 0).nbytes)
    kernel.pack(layers, span_of(8), memoryview(section))
    kernel.unpack(memoryview(section), layers, span_of(8))
    assert bool(torch.isfinite(layers[0][0]).all())
