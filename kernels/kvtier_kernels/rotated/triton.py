"""The rotated codecs on a GPU: one pass over the pool's rows each way, bit for bit the reference.

A program takes some rows of one piece of one plane, ``[ROWS, BLOCK_DIM]`` in registers; columns
from ``DIM`` on are padding and stay zero. Fused multiply-adds are switched off at the launch, and
divisions and square roots are the IEEE ones: the order of operations is ``reference``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rotated.centre import Centre
from kvtier_kernels.rotated.codebooks import factors, levels, norms, sign_tensor, thresholds, unit
from kvtier_kernels.rotated.fields import Packed
from kvtier_kernels.rotated.reference import FIXED_PEAK
from kvtier_kernels.rotated_format import Code, Format, Piece
from kvtier_kernels.rows import UnrepresentableError
from kvtier_kernels.rows.triton import (
    address_table,
    alignment,
    element_type,
    from_float32,
    pool_rows,
    to_float32,
)

#: Values that a program holds at a time.
_TILE_VALUES: Final = 4096
#: A byte of the narrowest bit plane holds this many values.
_BLOCK_DIM_MIN: Final = 8
#: How kernels are compiled: see above.
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}

_FIXED_PEAK = tl.constexpr(FIXED_PEAK)
_FIXED_STEP = tl.constexpr(1.0 / FIXED_PEAK)
# Adding and taking 1.5 * 2**23 rounds what is below 2**22 to an integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


def pack(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
) -> None:
    """Fill the codes and scales of the span's rows; waits for the outcome."""
    failed = torch.zeros(1, dtype=torch.int32, device=packed.data.device)
    for index in range(len(form.pieces)):
        _launch(pack_kernel, layers, span, form, packed, centre, index, failed)
    if failed.item():
        raise UnrepresentableError("a NaN, an infinity or values too large")


def unpack(
    packed: Packed,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    centre: Centre | None,
) -> None:
    """Write the span's rows into the pool."""
    failed = torch.zeros(1, dtype=torch.int32, device=packed.data.device)
    for index in range(len(form.pieces)):
        _launch(unpack_kernel, layers, span, form, packed, centre, index, failed)


def _launch(
    kernel: Any,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
    index: int,
    failed: torch.Tensor,
) -> None:
    """Run ``kernel`` on one piece of the span's rows of all layers."""
    piece = form.pieces[index]
    views = [view for layer in layers if (view := layer[piece.part]) is not None]
    device = packed.data.device
    block_tokens = views[0].shape[1]
    codes, scales = packed.section.codes[index], packed.section.scales[index]
    second = codes[-1]
    centred = centre is not None and piece.part == 0
    # Where nothing is taken from the rows, any address does.
    taken = (centre.mean, centre.partner, centre.cos, centre.sin) if centre else (failed,) * 4
    fixed = constants(piece, span.token_count)
    grid = (
        packed.section.layers * span.head_count,
        triton.cdiv(span.token_count, fixed["ROWS"]),
    )
    kernel[grid](
        address_table(views, span),
        packed.data,
        failed,
        sign_tensor(piece.dim, device),
        _level_tables(piece.code, device),
        *taken,
        len(layers),
        span.head_count,
        span.token_count,
        span.token_start % block_tokens,
        span.pool_head_start,
        block_tokens,
        form.part_dims[piece.part],
        *(codes[0].offset, codes[0].head_step, codes[0].row_bytes),
        *(second.offset, second.row_bytes),
        *(scales.offset, scales.head_step),
        CENTRED=centred,
        ELEMENT=element_type(views),
        DTYPE=str(views[0].dtype).removeprefix("torch."),
        ALIGN=alignment(views) if piece.start * views[0].element_size() % 16 == 0 else 1,
        **OPTIONS,
        **fixed,
    )


def constants(piece: Piece, tokens: int) -> dict[str, Any]:
    """What the kernels are specialized for, by a piece and the number of its rows."""
    odd, exponent = factors(piece.dim)
    block_dim = max(_BLOCK_DIM_MIN, triton.next_power_of_2(piece.dim))
    widths = piece.code.widths
    return {
        "START": piece.start,
        "DIM": piece.dim,
        "BLOCK_DIM": block_dim,
        "ROWS": max(1, min(_TILE_VALUES // block_dim, triton.next_power_of_2(tokens))),
        "ODD": odd,
        "EXPONENT": exponent,
        "FOLDS": (block_dim >> exponent).bit_length() - 1,
        "NORM": norms(exponent)[0],
        "NORM_BACK": norms(exponent)[1],
        "REFLECT": 2.0 / odd,
        "PEAK": piece.code.peak,
        "PEAK_INVERSE": 1.0 / piece.code.peak if piece.code.peak else 0.0,
        "UNIT": 0.0 if piece.code.peak else unit(piece.code.bits),
        "LEVELS": 0 if piece.code.peak else 1 << piece.code.bits,
        "FIRST": widths[0],
        "SECOND": widths[1] if len(widths) > 1 else 0,
    }


@cache
def _level_tables(code: Code, device: torch.device) -> torch.Tensor:
    """Levels, then thresholds, as int32; for integer codes anything."""
    values = (0,) if code.peak else (*levels(code.bits), *thresholds(code.bits))
    return torch.tensor(values, dtype=torch.int32, device=device)


@triton.jit
def _butterflies(values, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, EXPONENT: tl.constexpr):
    for stage in tl.static_range(EXPONENT):
        pairs = tl.reshape(values, (ROWS, BLOCK_DIM >> (stage + 1), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        values = tl.reshape(joined, (ROWS, BLOCK_DIM))
    return values


@triton.jit
def _reflect(
    values, inside, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, EXPONENT: tl.constexpr,
    FOLDS: tl.constexpr, REFLECT: tl.constexpr,
):  # fmt: skip
    run: tl.constexpr = 1 << EXPONENT
    runs: tl.constexpr = BLOCK_DIM // run
    total = values
    for stage in tl.static_range(FOLDS):
        halves = tl.reshape(total, (ROWS, 2, runs >> (stage + 1), run))
        low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        total = low + high
    total = tl.reshape(total, (ROWS, 1, run)) * REFLECT
    mixed = tl.reshape(tl.reshape(values, (ROWS, runs, run)) - total, (ROWS, BLOCK_DIM))
    return tl.where(inside, mixed, 0.0)


@triton.jit
def _reciprocal(values):
    """1 / values, 0 for zero and where it would be infinite."""
    inverse = tl.div_rn(1.0, tl.where(values == 0, 1.0, values))
    return tl.where((values == 0) | (inverse == float("inf")), 0.0, inverse)


@triton.jit
def _round(values):
    return (values + _ROUNDER) - _ROUNDER


@triton.jit
def _join_bits(codes, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes ``[ROWS, BLOCK_DIM * WIDTH / 8]`` of codes, the earlier ones in the lower bits."""
    for step in tl.static_range(3):
        if WIDTH << step < 8:
            low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK_DIM >> (step + 1), 2)))
            codes = low | (high << (WIDTH << step))
    return codes.to(tl.uint8)


@triton.jit
def _split_bits(joined, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of ``_join_bits``, as int32."""
    codes = joined.to(tl.int32)
    for step in tl.static_range(3):
        if (4 >> step) >= WIDTH:
            low, high = codes & ((1 << (4 >> step)) - 1), codes >> (4 >> step)
            codes = tl.reshape(tl.join(low, high), (ROWS, (BLOCK_DIM * WIDTH // 4) << step))
    return codes


@triton.jit
def _offsets(
    mean, partner, cosine, sine, plane, row, column, wanted, part_dim, START: tl.constexpr
):  # fmt: skip
    """What the centre takes from the rows: ``mean * cos + partner * sin``."""
    columns = START + column
    head = plane.to(tl.int64) * part_dim + columns
    inside = columns < part_dim
    turn = row.to(tl.int64)[:, None] * part_dim + columns
    turned = tl.load(mean + head, mask=inside, other=0.0)
    turned = turned * tl.load(cosine + turn, mask=wanted, other=0.0)
    crossed = tl.load(partner + head, mask=inside, other=0.0)
    crossed = crossed * tl.load(sine + turn, mask=wanted, other=0.0)
    return turned + crossed


@triton.jit
def _integer_codes(values, peak, PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr):
    scale = (peak * PEAK_INVERSE).to(tl.float16)
    factor = _reciprocal(scale.to(tl.float32))
    codes = _round(values * factor[:, None])
    return tl.minimum(tl.maximum(codes, -PEAK), PEAK).to(tl.int32), scale


@triton.jit
def _level_codes(
    values, peak, inside, tables, DIM: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    to_fixed = _reciprocal(peak) * _FIXED_PEAK
    fixed = _round(values * to_fixed[:, None])
    square = tl.maximum(tl.sum(fixed * fixed, axis=1), 1.0)
    to_unit = to_fixed * tl.sqrt_rn(tl.div_rn(1.0, square) * DIM) * UNIT
    places = _round(values * to_unit[:, None])
    places = tl.minimum(tl.maximum(places, -127.0), 127.0).to(tl.int32)
    codes = tl.zeros_like(places)
    chosen = codes + tl.load(tables)
    for level in tl.static_range(1, LEVELS):
        reached = places >= tl.load(tables + LEVELS - 1 + level)
        codes += reached.to(tl.int32)
        chosen = tl.where(reached, tl.load(tables + level), chosen)
    weights = tl.where(inside, chosen, 0).to(tl.float32)
    fit = tl.div_rn(tl.sum(fixed * weights, axis=1), tl.sum(weights * weights, axis=1))
    return codes, (fit * (peak * _FIXED_STEP)).to(tl.float16)


@triton.jit
def pack_kernel(
    table, packed, failed, signs, tables, mean, partner, cosine, sine,
    layers, heads, tokens, skipped, pool_head, block_tokens, part_dim,
    codes_start, codes_head, first_bytes, second_start, second_bytes, scales_start, scales_head,
    CENTRED: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ODD: tl.constexpr, EXPONENT: tl.constexpr, FOLDS: tl.constexpr, NORM: tl.constexpr,
    NORM_BACK: tl.constexpr, REFLECT: tl.constexpr,
    PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr, UNIT: tl.constexpr, LEVELS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Quantise ROWS rows of one plane's piece; set ``failed`` where one cannot be stored."""
    plane = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    live = row < tokens
    inside = column < DIM
    wanted = live[:, None] & inside
    source = pool_rows(
        table, layers, plane // heads, pool_head + plane % heads, skipped + row, live,
        block_tokens, ELEMENT, ALIGN,
    )  # fmt: skip
    values = to_float32(tl.load(source + START + column, mask=wanted, other=0), DTYPE)
    if CENTRED:
        values -= _offsets(mean, partner, cosine, sine, plane, row, column, wanted, part_dim, START)
        values = tl.where(wanted, values, 0.0)
    values = values * tl.load(signs + column, mask=inside, other=0.0)
    values = _butterflies(values, ROWS, BLOCK_DIM, EXPONENT) * NORM
    if ODD > 1:
        values = _reflect(values, inside, ROWS, BLOCK_DIM, EXPONENT, FOLDS, REFLECT)
    # As integers, NaN is larger than infinity and every number.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    peak = bits.to(tl.float32, bitcast=True)
    if LEVELS:
        codes, scale = _level_codes(values, peak, inside, tables, DIM, LEVELS, UNIT)
    else:
        codes, scale = _integer_codes(values, peak, PEAK, PEAK_INVERSE)
    scale_bits = scale.to(tl.int16, bitcast=True)
    bad = (scale_bits & 0x7FFF) >= 0x7C00
    tl.store(failed, 1, mask=tl.max(bad.to(tl.int32), axis=0) > 0)
    place = row.to(tl.int64)
    head = plane.to(tl.int64)
    target = (packed + scales_start + head * scales_head).to(tl.pointer_type(tl.int16))
    tl.store(target + place, scale_bits, mask=live)
    if FIRST < 8 and not LEVELS:
        codes += PEAK + 1
    codes = tl.where(inside, codes, 0)
    rows = packed + codes_start + head * codes_head + place * first_bytes
    byte = tl.arange(0, BLOCK_DIM * FIRST // 8)[None, :]
    upper = _join_bits(codes >> SECOND, ROWS, BLOCK_DIM, FIRST)
    tl.store(rows[:, None] + byte, upper, mask=live[:, None] & (byte < first_bytes))
    if SECOND:
        rows = packed + second_start + head * codes_head + place * second_bytes
        byte = tl.arange(0, BLOCK_DIM * SECOND // 8)[None, :]
        lower = _join_bits(codes & ((1 << SECOND) - 1), ROWS, BLOCK_DIM, SECOND)
        tl.store(rows[:, None] + byte, lower, mask=live[:, None] & (byte < second_bytes))


@triton.jit
def unpack_kernel(
    table, packed, failed, signs, tables, mean, partner, cosine, sine,
    layers, heads, tokens, skipped, pool_head, block_tokens, part_dim,
    codes_start, codes_head, first_bytes, second_start, second_bytes, scales_start, scales_head,
    CENTRED: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ODD: tl.constexpr, EXPONENT: tl.constexpr, FOLDS: tl.constexpr, NORM: tl.constexpr,
    NORM_BACK: tl.constexpr, REFLECT: tl.constexpr,
    PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr, UNIT: tl.constexpr, LEVELS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of one plane's piece into the pool; arguments as ``pack_kernel``."""
    plane = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    live = row < tokens
    inside = column < DIM
    wanted = live[:, None] & inside
    place = row.to(tl.int64)
    head = plane.to(tl.int64)
    rows = packed + codes_start + head * codes_head + place * first_bytes
    byte = tl.arange(0, BLOCK_DIM * FIRST // 8)[None, :]
    upper = tl.load(rows[:, None] + byte, mask=live[:, None] & (byte < first_bytes), other=0)
    codes = _split_bits(upper, ROWS, BLOCK_DIM, FIRST)
    if SECOND:
        rows = packed + second_start + head * codes_head + place * second_bytes
        byte = tl.arange(0, BLOCK_DIM * SECOND // 8)[None, :]
        lower = tl.load(rows[:, None] + byte, mask=live[:, None] & (byte < second_bytes), other=0)
        codes = (codes << SECOND) | _split_bits(lower, ROWS, BLOCK_DIM, SECOND)
    if LEVELS:
        codes = tl.load(tables + codes)
    elif FIRST == 8:
        codes = (codes << 24) >> 24
    else:
        codes -= PEAK + 1
    source = (packed + scales_start + head * scales_head).to(tl.pointer_type(tl.int16))
    scale = tl.load(source + place, mask=live, other=0)
    scale = scale.to(tl.float16, bitcast=True).to(tl.float32)
    values = tl.where(inside, codes, 0).to(tl.float32) * scale[:, None]
    if ODD > 1:
        values = _reflect(values, inside, ROWS, BLOCK_DIM, EXPONENT, FOLDS, REFLECT)
    values = _butterflies(values, ROWS, BLOCK_DIM, EXPONENT) * NORM_BACK
    values = values * tl.load(signs + column, mask=inside, other=0.0)
    if CENTRED:
        values += _offsets(mean, partner, cosine, sine, plane, row, column, wanted, part_dim, START)
    if DTYPE == "float16":
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    target = pool_rows(
        table, layers, plane // heads, pool_head + plane % heads, skipped + row, live,
        block_tokens, ELEMENT, ALIGN,
    )  # fmt: skip
    tl.store(target + START + column, from_float32(values, DTYPE), mask=wanted)
