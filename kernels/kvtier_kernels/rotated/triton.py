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
from kvtier_kernels.rotated_format import Code, Format, Piece, Section
from kvtier_kernels.rows import UnrepresentableError
from kvtier_kernels.rows.triton import from_float32, to_float32
from kvtier_kernels.transfer.stripes import COSINE, MEAN, PARTNER, SINE, Means, Stripe
from kvtier_kernels.transfer.triton import field_rows, launch_section, place

#: Values that a program holds at a time.
_TILE_VALUES: Final = 4096
#: A byte of the narrowest bit plane holds this many values.
_BLOCK_DIM_MIN: Final = 8
#: How kernels are compiled: see above.
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}

_MEAN = tl.constexpr(MEAN)
_PARTNER = tl.constexpr(PARTNER)
_COSINE = tl.constexpr(COSINE)
_SINE = tl.constexpr(SINE)
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
    if not _run(layers, span, form, packed, centre, packs=True):
        raise UnrepresentableError("a NaN, an infinity or values too large")


def unpack(
    packed: Packed,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    centre: Centre | None,
) -> None:
    """Write the span's rows into the pool."""
    _run(layers, span, form, packed, centre, packs=False)


def _run(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
    *,
    packs: bool,
) -> bool:
    """Move the span's rows, and tell whether all could be packed: waits for that outcome."""
    device = packed.data.device
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    means = Means(centre.mean, centre.partner) if centre else None
    turns = (centre.cos, centre.sin) if centre else None
    for stripe in stripes(form, packed.section, span.token_count, device, means):
        views = [view for layer in layers if (view := layer[stripe.part]) is not None]
        launch_section(stripe, views, span, packed.data, failed, packs=packs, turns=turns)
    return not packs or not failed.item()


def stripes(
    form: Format, section: Section, tokens: int, device: torch.device, means: Means | None
) -> list[Stripe]:
    """One stripe for each piece; the sink tokens beside them are rows as they are."""
    made: list[Stripe] = []
    for index, piece in enumerate(form.pieces):
        centred = means is not None and piece.part == 0
        tables = _level_tables(piece.code, device)
        stripe = Stripe(
            part=piece.part,
            areas=(*section.codes[index], section.scales[index]),
            rows=tokens,
            kernel=rotated_kernel,
            pack=pack_rows,
            unpack=unpack_rows,
            constants=constants(piece, tokens) | {"CENTRED": centred, "STAGES": 1},
            options=OPTIONS,
            arguments=(sign_tensor(piece.dim, device), tables, form.part_dims[piece.part]),
            column_bytes=piece.start * form.element_bytes,
            means=means if centred else None,
        )
        made.append(stripe)
    return made


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
        "FIRST_BITS": widths[0],
        "SECOND_BITS": widths[1] if len(widths) > 1 else 0,
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
    mean, partner, cosine, sine, row, column, wanted, part_dim, START: tl.constexpr
):  # fmt: skip
    """What the centre takes from the rows: ``mean * cos + partner * sin``."""
    columns = START + column
    inside = columns < part_dim
    turn = row.to(tl.int64)[:, None] * part_dim + columns
    turned = tl.load(mean + columns, mask=inside, other=0.0)
    turned = turned * tl.load(cosine + turn, mask=wanted, other=0.0)
    crossed = tl.load(partner + columns, mask=inside, other=0.0)
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
def pack_rows(
    rows, live, row, first, second, scales, failed, signs, tables, mean, partner, cosine, sine,
    part_dim, CENTRED: tl.constexpr, DTYPE: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ODD: tl.constexpr, EXPONENT: tl.constexpr, FOLDS: tl.constexpr, NORM: tl.constexpr,
    NORM_BACK: tl.constexpr, REFLECT: tl.constexpr,
    PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr, UNIT: tl.constexpr, LEVELS: tl.constexpr,
    FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Quantise ROWS rows; set ``failed`` where one cannot be stored."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = column < DIM
    wanted = live[:, None] & inside
    values = to_float32(tl.load(rows + START + column, mask=wanted, other=0), DTYPE)
    if CENTRED:
        values -= _offsets(mean, partner, cosine, sine, row, column, wanted, part_dim, START)
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
    tl.store(scales.to(tl.pointer_type(tl.int16)), scale_bits, mask=live)
    if FIRST_BITS < 8 and not LEVELS:
        codes += PEAK + 1
    codes = tl.where(inside, codes, 0)
    used: tl.constexpr = (DIM * FIRST_BITS + 7) // 8
    byte = tl.arange(0, BLOCK_DIM * FIRST_BITS // 8)[None, :]
    upper = _join_bits(codes >> SECOND_BITS, ROWS, BLOCK_DIM, FIRST_BITS)
    tl.store(first[:, None] + byte, upper, mask=live[:, None] & (byte < used))
    if SECOND_BITS:
        rest: tl.constexpr = (DIM * SECOND_BITS + 7) // 8
        byte = tl.arange(0, BLOCK_DIM * SECOND_BITS // 8)[None, :]
        lower = _join_bits(codes & ((1 << SECOND_BITS) - 1), ROWS, BLOCK_DIM, SECOND_BITS)
        tl.store(second[:, None] + byte, lower, mask=live[:, None] & (byte < rest))


@triton.jit
def unpack_rows(
    rows, live, row, first, second, scales, failed, signs, tables, mean, partner, cosine, sine,
    part_dim, CENTRED: tl.constexpr, DTYPE: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ODD: tl.constexpr, EXPONENT: tl.constexpr, FOLDS: tl.constexpr, NORM: tl.constexpr,
    NORM_BACK: tl.constexpr, REFLECT: tl.constexpr,
    PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr, UNIT: tl.constexpr, LEVELS: tl.constexpr,
    FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows into the pool; arguments as ``pack_rows``."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = column < DIM
    wanted = live[:, None] & inside
    used: tl.constexpr = (DIM * FIRST_BITS + 7) // 8
    byte = tl.arange(0, BLOCK_DIM * FIRST_BITS // 8)[None, :]
    upper = tl.load(first[:, None] + byte, mask=live[:, None] & (byte < used), other=0)
    codes = _split_bits(upper, ROWS, BLOCK_DIM, FIRST_BITS)
    if SECOND_BITS:
        rest: tl.constexpr = (DIM * SECOND_BITS + 7) // 8
        byte = tl.arange(0, BLOCK_DIM * SECOND_BITS // 8)[None, :]
        lower = tl.load(second[:, None] + byte, mask=live[:, None] & (byte < rest), other=0)
        codes = (codes << SECOND_BITS) | _split_bits(lower, ROWS, BLOCK_DIM, SECOND_BITS)
    if LEVELS:
        codes = tl.load(tables + codes)
    elif FIRST_BITS == 8:
        codes = (codes << 24) >> 24
    else:
        codes -= PEAK + 1
    scale = tl.load(scales.to(tl.pointer_type(tl.int16)), mask=live, other=0)
    scale = scale.to(tl.float16, bitcast=True).to(tl.float32)
    values = tl.where(inside, codes, 0).to(tl.float32) * scale[:, None]
    if ODD > 1:
        values = _reflect(values, inside, ROWS, BLOCK_DIM, EXPONENT, FOLDS, REFLECT)
    values = _butterflies(values, ROWS, BLOCK_DIM, EXPONENT) * NORM_BACK
    values = values * tl.load(signs + column, mask=inside, other=0.0)
    if CENTRED:
        values += _offsets(mean, partner, cosine, sine, row, column, wanted, part_dim, START)
    if DTYPE == "float16":
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    tl.store(rows + START + column, from_float32(values, DTYPE), mask=wanted)


@triton.jit
def rotated_kernel(
    jobs, blocks, failed, total, tiles, heads, tokens, skipped, block_tokens,
    first_head, first_bytes, second_head, second_bytes, third_head, third_bytes,
    signs, tables, part_dim,
    BODY: tl.constexpr, STAGES: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    CENTRED: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    ODD: tl.constexpr, EXPONENT: tl.constexpr, FOLDS: tl.constexpr, NORM: tl.constexpr,
    NORM_BACK: tl.constexpr, REFLECT: tl.constexpr,
    PEAK: tl.constexpr, PEAK_INVERSE: tl.constexpr, UNIT: tl.constexpr, LEVELS: tl.constexpr,
    FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Pack or unpack one piece of all jobs' rows by ``BODY``."""
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        job, head, row, live, rows = place(
            jobs, blocks, tile, tiles, heads, tokens, skipped, block_tokens, ROWS, ELEMENT, ALIGN
        )
        first = field_rows(job, head, row, first_head, first_bytes, 0, FIRST)
        second = first
        scales = field_rows(job, head, row, second_head, second_bytes, 1, SECOND)
        if SECOND_BITS:
            second = scales
            scales = field_rows(job, head, row, third_head, third_bytes, 2, THIRD)
        floats: tl.constexpr = tl.pointer_type(tl.float32)
        # Rows of other dims begin anywhere, but are read value by value.
        mean = tl.multiple_of(tl.load(job + _MEAN).to(floats), 16) + head * part_dim
        partner = tl.multiple_of(tl.load(job + _PARTNER).to(floats), 16) + head * part_dim
        cosine = tl.multiple_of(tl.load(job + _COSINE).to(floats), 16)
        sine = tl.multiple_of(tl.load(job + _SINE).to(floats), 16)
        BODY(
            rows, live, row, first, second, scales, failed,
            signs, tables, mean, partner, cosine, sine, part_dim,
            CENTRED, DTYPE, START, DIM, BLOCK_DIM, ROWS, ODD, EXPONENT, FOLDS, NORM, NORM_BACK,
            REFLECT, PEAK, PEAK_INVERSE, UNIT, LEVELS, FIRST_BITS, SECOND_BITS,
        )  # fmt: skip
