"""The rotated codecs' arithmetic on a CPU against the oracle, bit for bit, both ways."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.rotated import RotatedKernel, rowwise
from kvtier_kernels.rotated.centre import Taken
from kvtier_kernels.rotated.codebooks import sign_tensor
from kvtier_kernels.rotated.paged import Arithmetic, ReferenceArithmetic
from kvtier_kernels.rotated.rowwise import RowwiseArithmetic
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, Code
from kvtier_kernels.rows.scratch import scratch
from tests.lib import rotated_oracle as oracle
from tests.lib.rotated_pools import form, gaussian, span_of, views

CPU = torch.device("cpu")
CODES = (INT8, INT6, LM5, LM4)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: One run and many, odd numbers of runs, runs below and beyond what a matrix takes.
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 320, 384, 512)

#: The largest value of bfloat16 that float16 holds.
LARGEST = 65280.0


@pytest.fixture
def _medium_precision() -> Iterator[None]:
    """Let torch multiply float32 as bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Block:
    """Some planes' rows and room for what they become, with a gap behind each plane."""

    values: torch.Tensor
    scales: torch.Tensor
    planes: list[torch.Tensor]

    @staticmethod
    def of(values: torch.Tensor, code: Code) -> Block:
        count, tokens, dim = values.shape
        planes = [
            torch.full((count, 2 * tokens, width), 0xEE, dtype=torch.uint8)[:, :tokens]
            for width in code.row_bytes(dim)
        ]
        return Block(values, torch.zeros(count, tokens, 1, dtype=torch.float16), planes)

    def rows(self) -> Iterator[tuple[torch.Tensor, tuple[bytes, ...], bytes]]:
        """Each row, its bit planes and its scale."""
        for plane in range(self.values.shape[0]):
            for token in range(self.values.shape[1]):
                planes = tuple(field[plane, token].numpy().tobytes() for field in self.planes)
                scale = self.scales[plane, token].numpy().tobytes()
                yield self.values[plane, token], planes, scale


def rowwise_for(values: torch.Tensor, code: Code) -> RowwiseArithmetic:
    assert rowwise.suits(values.shape[2], CPU)
    return RowwiseArithmetic(values.shape[2], code, torch.empty(3 * values.numel()))


def hard_rows(dim: int, seed: int) -> torch.Tensor:
    """Rows of all sizes: zeros, spikes, and those whose sums become as large as they can."""
    values = gaussian(2, 8, dim, seed=seed) * torch.logspace(-6, 4, 8)[:, None]
    values[0, 0] = 0
    values[0, 1] = 1e-9
    values[0, 2, seed % dim] = 6e4
    worst = sign_tensor(dim, CPU) * LARGEST
    for token, run in enumerate((dim, 64, 32, 16)):
        values[1, token] = torch.where(torch.arange(dim) // run % 2 == 1, -worst, worst)
    return values.clamp(-LARGEST, LARGEST)


def hard_bytes(block: Block, seed: int) -> None:
    """Every code, in no order, and rows of nothing but the outermost ones."""
    generator = torch.Generator().manual_seed(seed)
    for plane in block.planes:
        plane.copy_(torch.randint(0, 256, plane.shape, generator=generator))
        for token, byte in enumerate((0x00, 0xFF, 0x80, 0x0F)):
            plane[0, token] = byte
        half = plane.shape[2] // 2
        plane[1, 0, :half], plane[1, 0, half:] = 0xFF, 0x00
        plane[1, 1, :half], plane[1, 1, half:] = 0x7F, 0x80
    block.scales.copy_(torch.rand(block.scales.shape, generator=generator))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@settings(max_examples=12, deadline=None)
@given(dim=st.sampled_from(DIMS), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 10**6))
def test_b139_rows_are_encoded_as_the_oracle_says(
    code: Code, dim: int, dtype: torch.dtype, seed: int
) -> None:
    block = Block.of(hard_rows(dim, seed).to(dtype), code)
    rowwise_for(block.values, code).encode(block.values, None, block.scales, block.planes)
    for values, planes, scale in block.rows():
        expected = oracle.encode(values.float().numpy(), code.name, oracle.BOOKS[code.name])
        assert (planes, scale) == expected


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@settings(max_examples=12, deadline=None)
@given(dim=st.sampled_from(DIMS), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 10**6))
def test_b139_rows_are_decoded_as_the_oracle_says(
    code: Code, dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Whatever the bytes are. The reference as well."""
    values = torch.full((2, 6, dim), float("nan"), dtype=dtype)
    block = Block.of(values, code)
    hard_bytes(block, seed)
    both: list[Arithmetic] = [rowwise_for(values, code), ReferenceArithmetic(dim, code)]
    for arithmetic in both:
        values.fill_(float("nan"))
        arithmetic.decode(values, None, block.scales, block.planes)
        for found, planes, scale in block.rows():
            expected = torch.from_numpy(oracle.decode(planes, scale, dim, code.name)).to(dtype)
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@settings(max_examples=10, deadline=None)
@given(dim=st.sampled_from(DIMS), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 10**6))
def test_centred_rows_are_those_of_the_reference(
    code: Code, dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Of large values in float16 some come back beyond its range, and are cut."""
    values = hard_rows(dim, seed).clamp(-6e4, 6e4).to(dtype)
    means, turns = gaussian(2, 2, 1, dim, seed=seed + 1), gaussian(2, 8, dim, seed=seed + 2)
    taken = Taken(means[0], means[1], turns[0], turns[1])
    both: list[Arithmetic] = [rowwise_for(values, code), ReferenceArithmetic(dim, code)]
    found = []
    for arithmetic in both:
        block = Block.of(values.clone(), code)
        arithmetic.encode(block.values, taken, block.scales, block.planes)
        assert torch.equal(block.values, values)
        block.values.fill_(float("nan"))
        arithmetic.decode(block.values, taken, block.scales, block.planes)
        found.append([field.clone() for field in (block.values, block.scales, *block.planes)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("centred", [False, True])
def test_a_row_that_cannot_be_stored_has_no_finite_scale(
    code: Code, bad: float, *, centred: bool
) -> None:
    values = hard_rows(64, 3)
    values[1, 5, 63] = bad
    block = Block.of(values, code)
    taken = Taken(*(gaussian(2, 1, 64),) * 2, *(gaussian(8, 64),) * 2) if centred else None
    rowwise_for(values, code).encode(values, taken, block.scales, block.planes)
    stored = (block.scales <= 65504).squeeze(2)
    assert not stored[1, 5]
    assert int(stored.sum()) == 15


def sections_of(code: Code, dim: int) -> tuple[bytes, list[torch.Tensor]]:
    """A section, and what it becomes in a pool."""
    kernel = RotatedKernel(form(torch.bfloat16, code, dim, dim))
    layers = views(torch.bfloat16, heads=2, k_dim=dim, v_dim=dim, layers=3)
    span = span_of(45, heads=2)
    section = bytearray(kernel.form.section(3, 2, 45, 0).nbytes)
    kernel.pack(layers, span, memoryview(section))
    kernel.unpack(memoryview(section), layers, span)
    return bytes(section), [view for layer in layers for view in layer if view is not None]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_without_an_exact_product_the_reference_makes_the_same_bytes(
    code: Code, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, restored = sections_of(code, dim)
    monkeypatch.setattr(rowwise, "suits", lambda *_: False)
    other, same = sections_of(code, dim)
    assert other == section
    assert all(map(torch.equal, same, restored))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_lower_precision_of_float32_products_changes_nothing(
    code: Code, dim: int, request: pytest.FixtureRequest
) -> None:
    section, restored = sections_of(code, dim)
    request.getfixturevalue("_medium_precision")
    other, same = sections_of(code, dim)
    assert other == section
    assert all(map(torch.equal, same, restored))


def test_a_product_that_is_missing_or_cut_to_16_bits_is_not_taken() -> None:
    def cut(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """As if pairs were summed up in int16."""
        pairs = left.int()[:, :, None] * right.int()
        halves = (pairs[:, 0::2] + pairs[:, 1::2]).clamp(-(2**13), 2**13)
        return halves.sum(1, dtype=torch.int32)

    def exact(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.int() @ right.int()

    assert rowwise.is_exact(exact)
    assert not rowwise.is_exact(cut)
    assert not rowwise.is_exact(None)


def test_narrow_runs_and_other_devices_do_not_suit() -> None:
    assert rowwise.suits(48, CPU)
    assert not rowwise.suits(40, CPU)
    assert not rowwise.suits(5, CPU)
    assert not rowwise.suits(64, torch.device("meta"))


def test_threads_that_pack_at_once_do_not_meet() -> None:
    expected = {code: sections_of(code, 64)[0] for code in CODES}
    found: dict[Code, set[bytes]] = {code: set() for code in CODES}

    def work(code: Code) -> None:
        for _ in range(5):
            found[code].add(sections_of(code, 64)[0])

    threads = [threading.Thread(target=work, args=(code,)) for code in CODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {code: {section} for code, section in expected.items()}


def test_scratch_is_the_threads_own_and_the_same_again() -> None:
    first, second = scratch(100, 3)
    assert (first.numel(), second.numel()) == (100, 3)
    assert second.data_ptr() - first.data_ptr() == 128
    assert scratch(70)[0].data_ptr() == first.data_ptr()
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(scratch(100)[0].data_ptr()))
    thread.start()
    thread.join()
    assert elsewhere != [first.data_ptr()]


def test_scratch_beyond_16_mib_is_not_kept() -> None:
    kept = scratch(2**24)[0]
    large = scratch(2**24 + 1)[0]
    assert large.numel() == 2**24 + 1
    assert scratch(2**24)[0].data_ptr() == kept.data_ptr() != large.data_ptr()
    assert np.shares_memory(scratch(8)[0].numpy(), kept.numpy())
