"""The rotated codecs' Triton kernels against the reference, bit for bit, both ways.

On a machine without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtier_kernels import raw, rows
from kvtier_kernels.rotated import Centre, RotatedKernel, paged
from kvtier_kernels.rotated.fields import Packed, room
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, Code, Format
from tests.lib.rotated_pools import triton_kernels

KERNELS = triton_kernels()
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CODES = (INT8, INT6, LM5, LM4)
POISON = 0xEE
BLOCK_TOKENS, BLOCK_COUNT, HEADS = 4, 9, 3


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of NaN and infinity."""
    with np.errstate(all="ignore"):
        yield


def views(form: Format, dtype: torch.dtype, seed: int, *, layers: int = 1) -> list[raw.LayerViews]:
    """Random rows, some tiny, one with an outlier, one of zeros."""
    generator = torch.Generator().manual_seed(seed)

    def view(dim: int) -> torch.Tensor:
        values = torch.randn((BLOCK_COUNT, BLOCK_TOKENS, HEADS, dim), generator=generator)
        values[2, 1] = 0
        values[5, 0, :, 0] = 6e4
        values[7, 3] *= 1e-7
        return values.to(dtype).to(DEVICE)

    return [(view(form.k_dim), view(form.v_dim) if form.v_dim else None) for _ in range(layers)]


def poisoned(layers: list[raw.LayerViews]) -> list[raw.LayerViews]:
    return [
        (torch.full_like(k, float("nan")), None if v is None else torch.full_like(v, float("nan")))
        for k, v in layers
    ]


def span(start: int, count: int, *, heads: int = 1) -> raw.Span:
    """Rows of a plane of 20 and some of the pool's heads."""
    blocks = (7, 2, 5, 0, 1)[start // BLOCK_TOKENS : (start + count - 1) // BLOCK_TOKENS + 1]
    return raw.Span(20, start, count, 3, 1, heads, 1, blocks)


def centre_of(form: Format, moved: raw.Span, layers: int) -> Centre:
    generator = torch.Generator().manual_seed(5)
    means = torch.randn((2, layers, moved.kv_heads, form.k_dim), generator=generator)
    turns = torch.randn((2, moved.tokens, form.k_dim), generator=generator)
    return Centre(means[0], means[1], turns[0].half(), turns[1].half()).cut(moved, DEVICE)


def assert_same(
    form: Format, dtype: torch.dtype, moved: raw.Span, *, centred: bool = False, layers: int = 1
) -> None:
    """Packed bytes and unpacked rows, and what neither of them may touch."""
    pool = views(form, dtype, seed=form.k_dim, layers=layers)
    section = form.section(layers, moved.kv_heads, moved.tokens, 0)
    centre = centre_of(form, moved, layers) if centred else None
    packed: list[Packed] = []
    for engine in (paged, KERNELS):
        few = room(form, section, moved, DEVICE)
        few.data.fill_(POISON)
        engine.pack(pool, moved, form, few, centre)
        packed.append(few)
    assert torch.equal(packed[0].data, packed[1].data)
    targets = poisoned(pool), poisoned(pool)
    for engine, target in zip((paged, KERNELS), targets, strict=True):
        engine.unpack(packed[0], target, moved, form, centre)
    for expected, found in zip(*targets, strict=True):
        for before, after in zip(expected, found, strict=True):
            if before is not None and after is not None:
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_b139_all_head_dims(code: Code, dim: int) -> None:
    assert_same(Format(dim, dim, code, code, 2), torch.bfloat16, span(3, 5))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(5, 3), (1, 12), (576, 0)])
def test_b16_odd_dims_and_latent_rows(code: Code, k_dim: int, v_dim: int) -> None:
    assert_same(Format(k_dim, v_dim, code, code, 2), torch.bfloat16, span(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("code", [INT8, LM5], ids=lambda code: code.name)
def test_dtypes(code: Code, dtype: torch.dtype) -> None:
    assert_same(Format(64, 80, code, INT6, dtype.itemsize), dtype, span(0, 6))


@pytest.mark.parametrize(("start", "count"), [(0, 20), (0, 1), (19, 1), (4, 8), (1, 17)])
def test_partial_spans(start: int, count: int) -> None:
    assert_same(Format(64, 64, INT6, LM4, 2), torch.bfloat16, span(start, count, heads=2), layers=2)


@pytest.mark.parametrize("dim", [64, 96])
def test_centred_k(dim: int) -> None:
    assert_same(
        Format(dim, dim, LM4, LM4, 2), torch.bfloat16, span(2, 9, heads=2), centred=True, layers=2
    )


def test_centred_latent_rows() -> None:
    assert_same(Format(72, 0, LM5, LM5, 4), torch.float32, span(2, 5), centred=True)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("dim", [12])
def test_what_cannot_be_stored_is_refused(code: Code, bad: float, dim: int) -> None:
    form = Format(dim, dim, code, code, 4)
    layers, moved = views(form, torch.float32, 1), span(0, 4)
    v_view = layers[0][1]
    assert v_view is not None
    v_view[7, 1, 1, dim - 1] = bad
    few = room(form, form.section(1, 3, 20, 0), moved, DEVICE)
    with pytest.raises(rows.UnrepresentableError):
        KERNELS.pack(layers, moved, form, few, None)


# Defined only where they can run.
if CUDA:

    @pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
    @pytest.mark.parametrize("dim", [64, 80, 128, 256])
    def test_a_section_made_on_a_gpu_is_the_one_made_on_a_cpu(code: Code, dim: int) -> None:
        """Whole sections of 256 tokens, over all of pack and unpack, with sink tokens."""
        kernel = RotatedKernel(Format(dim, dim, code, code, 2), sink_tokens=4)
        ids = tuple(torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist())
        pool = torch.randn((4, 2, 64, 4, 8, dim), generator=torch.Generator().manual_seed(dim))
        moved = raw.Span(256, 0, 256, 8, 0, 8, 0, ids)
        sections, restored = [], []
        for device in ("cpu", "cuda"):
            layers = [(k, v) for k, v in pool.to(torch.bfloat16).to(device)]
            section = bytearray([POISON]) * kernel.form.section(4, 8, 256, 4).nbytes
            kernel.pack(layers, moved, memoryview(section))
            target = poisoned(layers)
            kernel.unpack(memoryview(section), target, moved)
            sections.append(section)
            restored.append([view.cpu() for layer in target for view in layer if view is not None])
        assert sections[0] == sections[1]
        assert all(map(torch.equal, *restored))
