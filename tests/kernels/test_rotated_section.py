"""Sections of the rotated op: where everything lies, centred K, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kvtier_kernels import raw
from kvtier_kernels.rotated import Centre, RotatedKernel
from kvtier_kernels.rotated_format import INT6, INT8, LM4, LM5, Format
from tests.lib import rotated_oracle as oracle
from tests.lib.rotated_pools import form, gaussian, span_of, views

POISON = 0xEE


@dataclass(frozen=True)
class Field:
    """Where one field of a section lies, worked out from the drawing of the format."""

    start: int
    head_bytes: int
    row_bytes: int


def drawn_fields(kernel: RotatedKernel, layers: int, span: raw.Span) -> tuple[list[Field], int]:
    """Codes, scales, sinks of all pieces in order, and the section's size."""
    planes = layers * span.kv_heads
    groups: list[list[tuple[int, int]]] = [[], [], []]
    for piece in kernel.form.pieces:
        for width in oracle.WIDTHS[piece.code.name]:
            groups[0].append((span.tokens, -(-piece.dim * width // 8)))
        groups[1].append((span.tokens, 2))
    for dim in kernel.form.part_dims:
        groups[2].append((kernel.sink_tokens, dim * kernel.form.element_bytes))
    fields, end = [], 0
    for group in groups:
        head_bytes = sum(count * nbytes for count, nbytes in group)
        start = end
        for count, nbytes in group:
            fields.append(Field(start, head_bytes, nbytes))
            start += count * nbytes
        end += planes * head_bytes
        end += -end % 128
    return fields, end


LATENT = Format(72, 0, LM4, LM4, 4)
FORMS = [Format(12, 20, INT6, LM5, 4), Format(5, 3, LM5, INT8, 4), LATENT]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("start", "count", "sinks"), [(0, 18, 0), (3, 9, 4), (1, 2, 4), (5, 13, 4)]
)
def test_rows_and_scales_lie_where_the_drawing_says(
    form: Format, start: int, count: int, sinks: int
) -> None:
    """Some rows of some heads, byte by byte, and no other byte but padding."""
    kernel = RotatedKernel(form, sinks)
    layers = views(torch.float32, heads=3, k_dim=form.k_dim, v_dim=form.v_dim, layers=2)
    whole = raw.Span(18, start, count, 3, 1, 2, 0, ())
    blocks = (7, 2, 9, 0, 4)[start // 4 : (start + count - 1) // 4 + 1]
    span = replace(whole, block_ids=blocks)
    fields, nbytes = drawn_fields(kernel, 2, span)
    expected = bytearray([POISON]) * nbytes
    for layer in range(2):
        for head in range(2):
            for token in range(start, start + count):
                block = blocks[token // 4 - start // 4]
                parts = [v[block, token % 4, head].numpy() for v in layers[layer] if v is not None]
                place(expected, kernel, fields, parts, (layer * 3 + head + 1, token))
    section = bytearray([POISON]) * nbytes
    kernel.pack(layers, span, memoryview(section))
    zero_padding(expected, kernel, 6, 18, fields)
    assert section == expected


def place(
    section: bytearray,
    kernel: RotatedKernel,
    fields: list[Field],
    parts: list[np.ndarray],
    where: tuple[int, int],
) -> None:
    """Write one token's row of one head by the oracle."""
    plane, token = where
    stored: list[bytes] = []
    scales: list[bytes] = []
    for piece in kernel.form.pieces:
        row = parts[piece.part][piece.start : piece.start + piece.dim]
        planes, scale = oracle.encode(row, piece.code.name, oracle.BOOKS[piece.code.name])
        stored += planes
        scales.append(scale)
    stored += scales
    if token < kernel.sink_tokens:
        stored += [part.tobytes() for part in parts]
    for field, data in zip(fields, stored, strict=False):
        begin = field.start + plane * field.head_bytes + token * field.row_bytes
        section[begin : begin + len(data)] = data


def zero_padding(
    section: bytearray, kernel: RotatedKernel, planes: int, tokens: int, fields: list[Field]
) -> None:
    """What lies between codes, scales and sinks."""
    codes = sum(len(oracle.WIDTHS[piece.code.name]) for piece in kernel.form.pieces)
    pieces = len(kernel.form.pieces)
    starts = [fields[0], fields[codes], fields[codes + pieces]]
    for first, end in zip(starts, [*(f.start for f in starts[1:]), len(section)], strict=True):
        used = first.start + planes * first.head_bytes
        section[used:end] = bytes(end - used)


def centre(layers: int, heads: int, dim: int, tokens: int) -> Centre:
    """A large mean, turned by 0.3 per token in each pair of columns."""
    mean = 5 * gaussian(layers, heads, dim, seed=9)
    half = dim // 2
    angle = 0.3 * torch.arange(tokens)[:, None].expand(tokens, half)
    sine = torch.cat([-angle.sin(), angle.sin()], 1)
    cosine = torch.cat([angle.cos()] * 2, 1)
    return Centre(mean, mean.roll(half, -1), cosine.half(), sine.half())


def test_a_centre_takes_the_mean_of_k_at_each_position() -> None:
    """What is left is small, so the error is: 12 dB less than of the same rows uncentred."""
    known = centre(2, 2, 64, 24)
    taken = known.offsets(0, 64)
    layers = views(torch.float32, heads=2, layers=2)
    span = span_of(24, heads=2)
    for layer, (k_view, _) in enumerate(layers):
        for token in range(24):
            k_view[span.block_ids[token // 4], token % 4] += taken[layer, :, token]
    errors = []
    for kernel in (
        RotatedKernel(form(torch.float32, LM4)),
        RotatedKernel(form(torch.float32, LM4), centre=known),
    ):
        section = bytearray(kernel.form.section(2, 2, 24, 0).nbytes)
        kernel.pack(layers, span, memoryview(section))
        target = views(torch.float32, heads=2, layers=2)
        kernel.unpack(memoryview(section), target, span)
        ids = list(span.block_ids)
        errors.append((target[1][0][ids] - layers[1][0][ids]).norm())
    assert errors[1] < errors[0] / 4


def test_a_centre_that_does_not_fit_is_refused() -> None:
    layers, span = views(torch.float32, layers=2), span_of(8)
    section = memoryview(bytearray(form(torch.float32, LM4).section(2, 1, 8, 0).nbytes))
    known = centre(2, 1, 64, 8)
    bad = [
        replace(known, mean=known.mean[:1]),
        replace(known, partner=known.partner.double()),
        replace(known, cos=known.cos[:7]),
        replace(known, sin=known.sin[:, :63]),
    ]
    for wrong in bad:
        with pytest.raises(ValueError, match="not"):
            RotatedKernel(form(torch.float32, LM4), centre=wrong).pack(layers, span, section)


@pytest.mark.parametrize(
    ("kernel", "dtype", "message"),
    [
        (RotatedKernel(Format(64, 64, LM4, LM4, 2)), torch.float32, "float32"),
        (RotatedKernel(Format(64, 64, LM4, LM4, 1)), torch.float8_e4m3fn, "float8"),
        (RotatedKernel(Format(64, 32, LM4, LM4, 4)), torch.float32, "dims"),
        (RotatedKernel(Format(64, 64, LM4, LM4, 4), sink_tokens=9), torch.float32, "sink"),
        (RotatedKernel(Format(64, 64, LM4, LM4, 4)), torch.float32, "section has"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused(
    kernel: RotatedKernel, dtype: torch.dtype, message: str
) -> None:
    layers, span = views(dtype), span_of(8)
    section = memoryview(bytearray(100))
    with pytest.raises(ValueError, match=message):
        kernel.pack(layers, span, section)
    with pytest.raises(ValueError, match=message):
        kernel.unpack(section, layers, span)


def test_a_dim_beyond_512_is_refused() -> None:
    kernel = RotatedKernel(Format(513, 8, LM4, LM4, 4))
    with pytest.raises(ValueError, match="beyond 512"):
        kernel.pack(views(torch.float32, k_dim=513, v_dim=8), span_of(8), memoryview(bytearray(8)))


def test_read_only_targets_and_blocks_named_twice_are_refused() -> None:
    kernel, layers = RotatedKernel(form(torch.float32, LM4)), views(torch.float32)
    section = bytes(kernel.form.section(1, 1, 8, 0).nbytes)
    with pytest.raises(ValueError, match="read-only"):
        kernel.pack(layers, span_of(8), memoryview(section))
    with pytest.raises(ValueError, match="named twice"):
        kernel.unpack(memoryview(section), layers, replace(span_of(8), block_ids=(3, 3)))
